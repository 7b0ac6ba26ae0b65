// What Python calls: plain C, over pointers to memory that torch or numpy owns.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "model.h"

using namespace deepenough;

namespace {

thread_local std::string last_error;

// Returns 0, or -1 with a message in `de_error`: no exception crosses into Python.
template <class Work>
int guarded(Work work) {
    try {
        work();
        return 0;
    } catch (const std::exception& error) {
        last_error = error.what();
        return -1;
    }
}

const Kernels* const kAll[] = {
#ifdef __x86_64__
    &kAvx512Vnni, &kAvx512, &kAvx2,
#endif
    &kPortable};

bool is_supported(const Kernels& kernels) {
#ifdef __x86_64__
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (&kernels == &kAvx2) return avx2;
    if (&kernels == &kAvx512) return avx512;
    if (&kernels == &kAvx512Vnni) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
    return &kernels == &kPortable;
}

const Kernels* find_kernels(const char* name) {
    for (const Kernels* kernels : kAll)
        if (is_supported(*kernels) && (name == nullptr || std::strcmp(name, kernels->name) == 0))
            return kernels;
    return nullptr;
}

Matrix* find_matrix(Model* model, int layer, int which) {
    if (layer < 0) return which == 0 ? &model->embedding : which == 1 ? &model->head : &model->fusion;
    Layer& own = model->layers.at(layer);
    Matrix* const all[] = {&own.query, &own.key, &own.value, &own.output, &own.gate, &own.up, &own.down};
    return which < 0 || which > 6 ? nullptr : all[which];
}

std::vector<float>* find_vector(Model* model, int layer, int which) {
    if (layer < 0) return &model->final_norm;
    Layer& own = model->layers.at(layer);
    std::vector<float>* const all[] = {&own.input_norm, &own.inner_norm, &own.query_norm, &own.key_norm,
                                       &own.query_bias, &own.key_bias, &own.value_bias,
                                       &own.hidden_norm, &own.inner_bias};
    return which < 0 || which > 8 ? nullptr : all[which];
}

// Tokens that a pass takes at most: tasks of a phase, one for each head of a token, have 20 bits.
constexpr int64_t kMostTokens = 1 << 14;

Pass make_pass(Cache* cache, const int* rows, const int* starts, int sequences, int tokens) {
    if (int64_t(sequences) * tokens > kMostTokens)
        throw std::out_of_range("more than 16,384 tokens in one pass");
    for (int s = 0; s < sequences; s++)
        if (rows[s] < 0 || rows[s] >= cache->sequences || starts[s] < 0 ||
            starts[s] + tokens > cache->capacity)
            throw std::out_of_range("a sequence or position is not in the cache");
    return {cache, rows, starts, sequences, tokens, nullptr};
}

}  // namespace

#define DE_PUBLIC __attribute__((visibility("default")))

extern "C" {

// The number of this interface, which `native_weights.py` expects: raised with every change of a call.
DE_PUBLIC int de_interface() { return 3; }

DE_PUBLIC const char* de_error() { return last_error.c_str(); }

// The kernels that would be used: the fastest, or those of a name; null if this CPU has none such.
DE_PUBLIC const char* de_kernels(const char* name) {
    const Kernels* found = find_kernels(name);
    return found == nullptr ? nullptr : found->name;
}

DE_PUBLIC void* de_model_new(const Config* config, const char* kernels, int threads) {
    Model* model = nullptr;
    guarded([&] {
        const Kernels* found = find_kernels(kernels);
        if (found == nullptr) throw std::invalid_argument("this CPU lacks the instructions");
        model = new Model(*config, *found, std::make_shared<Threads>(threads));
    });
    return model;
}

// A draft head for a model, or maps between its layers: with its kernels, and its threads.
DE_PUBLIC void* de_head_new(const Config* config, void* model) {
    const Model* own = static_cast<Model*>(model);
    Model* head = nullptr;
    guarded([&] { head = new Model(*config, own->kernels(), own->threads()); });
    return head;
}

DE_PUBLIC void de_model_free(void* model) { delete static_cast<Model*>(model); }

DE_PUBLIC int de_model_matrix(void* model, int layer, int which, int format, const void* stored, int rows,
                    int cols, const int* order) {
    return guarded([&] {
        Matrix* matrix = find_matrix(static_cast<Model*>(model), layer, which);
        if (matrix == nullptr || format < 0 || format >= kFormats)
            throw std::invalid_argument("no such matrix or format");
        if (!matrix->pack(Format(format), static_cast<const uint8_t*>(stored), rows, cols, order,
                          static_cast<Model*>(model)->slabs))
            throw std::invalid_argument("the columns do not fill blocks of 32");
    });
}

// Write the floats that some rows of a matrix stand for.
DE_PUBLIC int de_model_rows(void* model, int layer, int which, int first, int count, float* out) {
    return guarded([&] {
        const Matrix* matrix = find_matrix(static_cast<Model*>(model), layer, which);
        if (matrix == nullptr || first < 0 || count < 0 || first + count > matrix->rows)
            throw std::out_of_range("no such rows");
        for (int i = 0; i < count; i++) matrix->row(first + i, out + size_t(i) * matrix->cols);
    });
}

DE_PUBLIC int de_model_vector(void* model, int layer, int which, const float* values, int count) {
    return guarded([&] {
        std::vector<float>* vector = find_vector(static_cast<Model*>(model), layer, which);
        if (vector == nullptr) throw std::invalid_argument("no such vector");
        vector->assign(values, values + count);
    });
}

DE_PUBLIC int de_model_rotary(void* model, const float* cosines, const float* sines, int count) {
    return guarded([&] {
        static_cast<Model*>(model)->cosines.assign(cosines, cosines + count);
        static_cast<Model*>(model)->sines.assign(sines, sines + count);
    });
}

DE_PUBLIC int64_t de_model_bytes(void* model) { return int64_t(static_cast<Model*>(model)->weight_bytes()); }

DE_PUBLIC void* de_cache_new(void* model, int sequences, int capacity, int bf16) {
    Cache* cache = nullptr;
    guarded([&] {
        cache = new Cache(static_cast<Model*>(model)->config, sequences, capacity, bf16 != 0);
    });
    return cache;
}

DE_PUBLIC void de_cache_free(void* cache) { delete static_cast<Cache*>(cache); }

DE_PUBLIC int de_cache_grow(void* cache, int capacity) {
    return guarded([&] { static_cast<Cache*>(cache)->grow(capacity); });
}

DE_PUBLIC int de_cache_select(void* cache, const int* rows, int count) {
    return guarded([&] { static_cast<Cache*>(cache)->select(rows, count); });
}

DE_PUBLIC int de_embed(void* model, const int64_t* tokens, int count, float* hidden) {
    return guarded([&] { static_cast<Model*>(model)->embed(tokens, count, hidden); });
}

// `embeddings` are what a draft head reads beside the states; null for a model.
DE_PUBLIC int de_layers(void* model, void* cache, const int* rows, const int* starts, int sequences, int tokens,
              int first, int last, const float* embeddings, float* hidden, float* normed, float* logits,
              int64_t* best) {
    return guarded([&] {
        Pass pass = make_pass(static_cast<Cache*>(cache), rows, starts, sequences, tokens);
        pass.embeddings = embeddings;
        static_cast<Model*>(model)->run_layers(pass, first, last, hidden, normed, logits, best);
    });
}

// `maps`, from `de_head_new`, may be null; see `Model::write_kv`.
DE_PUBLIC int de_write_kv(void* model, void* cache, const int* rows, const int* starts, int sequences, int tokens,
                int first, int last, void* maps, const int* which, const float* hidden) {
    return guarded([&] {
        const Pass pass = make_pass(static_cast<Cache*>(cache), rows, starts, sequences, tokens);
        if (first < 0 || last > static_cast<Model*>(model)->config.layers)
            throw std::out_of_range("no such layers");
        static_cast<Model*>(model)->write_kv(pass, first, last, static_cast<Model*>(maps), which, hidden);
    });
}

// Let `maps` have a head of some rows of the model's.
DE_PUBLIC int de_take_rows(void* maps, void* model, const int64_t* rows, int count) {
    return guarded([&] {
        Model* own = static_cast<Model*>(maps);
        const Matrix& from = static_cast<Model*>(model)->output_matrix();
        for (int i = 0; i < count; i++)
            if (rows[i] < 0 || rows[i] >= from.rows) throw std::out_of_range("no such token");
        own->head.pack_rows(from, rows, count, own->slabs);
    });
}

DE_PUBLIC int de_finish(void* model, const float* hidden, int count, int is_normed, float* normed, float* logits) {
    return guarded([&] {
        static_cast<Model*>(model)->finish(hidden, count, is_normed != 0, normed, logits);
    });
}

// The products of some rows with one matrix.
DE_PUBLIC int de_multiply(void* model, int layer, int which, const float* values, int count, float* out) {
    return guarded([&] {
        Model* own = static_cast<Model*>(model);
        own->multiply_rows(*find_matrix(own, layer, which), values, count, out);
    });
}

// Bytes a second at which threads read memory that is larger than a cache, the best of some rounds:
// what a pass over weights of that size could at best reach.
DE_PUBLIC double de_read_rate(int64_t bytes, int threads, int rounds) {
    double best = 0;
    guarded([&] {
        const int64_t count = bytes / 8, chunk = 1 << 15;
        Buffer<uint64_t> memory = make_buffer<uint64_t>(count);
        std::fill_n(memory.get(), count, 1);
        Threads pool(threads);
        std::atomic<uint64_t> total{0};
        for (int round = 0; round < rounds; round++) {
            const auto began = std::chrono::steady_clock::now();
            pool.run(
                [&](int thread) {
                    uint64_t sums[8] = {};
                    int first, last;
                    while (pool.claim(thread, 1, &first, &last)) {
                        const int64_t end = std::min<int64_t>(last * chunk, count) - 7;
                        for (int64_t i = first * chunk; i < end; i += 8)
                            for (int j = 0; j < 8; j++) sums[j] += memory[i + j];
                    }
                    for (uint64_t sum : sums) total += sum;
                },
                int((count + chunk - 1) / chunk));
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
            best = std::max(best, double(bytes) / took.count());
        }
        if (total == 0) throw std::logic_error("nothing was read");
    });
    return best;
}

}  // extern "C"
