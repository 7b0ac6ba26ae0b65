// A decoder of RMS norms, rotary grouped attention and gated feed-forward (Llama and its kin), and the
// keys and values of the sequences that it decodes.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "threads.h"

namespace deepenough {

struct Config {
    int layers, width, heads, kv_heads, head_width, inner, vocab;
    int rotary;  // channels of a head that are rotated
    float eps, attention_scale;
    bool exact;   // arithmetic of products with quantised weights
    bool paired;  // whether the layers are a draft head's, which read an embedding beside a state

    int query_width() const { return heads * head_width; }
    int kv_width() const { return kv_heads * head_width; }
};

// Of a part that a linear map stands for, only the matrix of the last product is there (`output` or
// `down`), and the map's bias stands in `query_bias` or `inner_bias`; of one that was removed, nothing.
// A map without a norm before it stands for the whole layer.
struct Layer {
    Matrix query, key, value, output, gate, up, down;
    std::vector<float> input_norm, inner_norm, query_norm, key_norm;
    std::vector<float> hidden_norm;  // of a draft head, whose `input_norm` is that of embeddings
    std::vector<float> query_bias, key_bias, value_bias;
    std::vector<float> inner_bias;  // of a map that stands for gate, up and down
};

// Keys and values of some sequences: [layer][sequence][head][capacity][width]; see Attention.
class Cache {
public:
    Cache(const Config&, int sequences, int capacity, bool bf16);
    void select(const int* rows, int count);  // go on with these sequences alone, in this order
    void grow(int capacity);                  // hold more tokens of each sequence

    int sequences, capacity;
    const bool bf16;
    uint8_t *keys(int layer, int sequence, int head), *values(int layer, int sequence, int head);
    void store(int layer, int sequence, int head, int position, const float* key, const float* value);

private:
    size_t place(int layer, int sequence, int head) const;
    int layers_, heads_, width_;
    size_t element_;
    std::vector<Buffer<uint8_t>> keys_, values_;  // of each layer
};

// Tokens on their way through the layers: `tokens` of each sequence in `rows` of a cache, from the
// positions `starts` on.
struct Pass {
    Cache* cache;
    const int *rows, *starts;
    int sequences, tokens;
    const float* embeddings;  // what a draft head reads beside the states

    int count() const { return sequences * tokens; }
};

class Model {
public:
    Model(const Config&, const Kernels&, std::shared_ptr<Threads>);

    const Config config;
    Slabs slabs;  // of all matrices
    std::vector<Layer> layers;
    Matrix embedding, head;  // a tied head has no rows of its own
    Matrix fusion;           // of a draft head: what makes a state of those of three layers
    std::vector<float> final_norm, cosines, sines;  // the latter [position][rotary / 2]

    void embed(const int64_t* tokens, int count, float* hidden) const;
    // Replace the states before layer `first` by those before layer `last`; write these normed, their
    // logits and the places of the largest, too, unless null.
    void run_layers(const Pass&, int first, int last, float* hidden, float* normed, float* logits,
                    int64_t* best);
    // Write the keys and values that the layers `first` to `last` make of what they are taken to have
    // read: the states as they are or, where `which` is not negative, as the query matrix and bias
    // of that layer of `maps` take them there.
    void write_kv(const Pass&, int first, int last, const Model* maps, const int* which,
                  const float* hidden);
    // Write normed states and, unless null, their logits.
    void finish(const float* hidden, int count, bool is_normed, float* normed, float* logits);

    // Write the products of some rows with a matrix.
    void multiply_rows(const Matrix&, const float* values, int count, float* out);

    const std::shared_ptr<Threads>& threads() const { return shared_threads_; }
    const Kernels& kernels() const { return kernels_; }
    const Matrix& output_matrix() const { return head.rows ? head : embedding; }
    size_t weight_bytes() const;

private:
    struct Part {  // of a phase that multiplies one input with several matrices
        const Matrix* matrix;
        float* out;
        size_t stride;
    };
    struct RowsBuffer {
        Buffer<float> values, scales, totals;
        Buffer<int8_t> digits;
        Buffer<int32_t> sums;
        int count = 0, cols = 0;
        void reserve(int new_count, int new_cols);
        Rows rows(int count, int cols) const;
    };
    struct Scratch {  // of one thread
        RowsBuffer rows;
        std::vector<float> scores, query, key, gate, up;
        std::vector<int> limits;
        std::vector<std::pair<float, int>> best;  // largest logit of each row, and its place
    };

    void reserve(const Pass&);
    void prepare_row(const RowsBuffer&, int row, int cols, const float* from, const float* norm) const;
    template <class Make>
    Rows prepare(int thread, int count, int cols, const float* from, const float* norm, int next_tasks,
                 Make make);
    Rows prepare(int thread, int count, int cols, const float* from, const float* norm, int next_tasks);
    Rows attended_rows(int thread, const Pass&, int next_tasks);
    Rows paired_rows(int thread, const Pass&, const Layer&, const float* hidden, int next_tasks);
    float* memory_for(int thread, int count, int cols, float* shared);
    void attended(const Pass&, int row, float* out) const;
    void multiply(int thread, const Rows&, const Part* parts, int num_parts, bool add);
    void fetch_tiles(int thread, std::initializer_list<const Matrix*> matrices) const;
    void fetch_cache(const Pass&, int index, int task) const;
    void linear_work(int thread, int count, const Matrix&, const std::vector<float>& norm,
                     const std::vector<float>& bias, float* hidden, int next_tasks);
    int tasks_from(const Pass&, int index, bool is_inner, int last, int tasks_afterwards) const;
    void layers_work(int thread, const Pass&, int first, int last, float* hidden, int tasks_afterwards);
    int head_tasks(int count, const float* logits) const;
    void attention_work(int thread, const Pass&, const Layer&, int index);
    void attend(int thread, const Pass&, const Layer&, int index, int task);
    void rotate(float* head, int position) const;
    void store_new(int thread, const Pass&, int index, int row, int head, const float* keys,
                   const float* values);
    void head_work(int thread, int count, const float* hidden, const float* norm, float* normed,
                   float* logits);
    void find_best(int count, int64_t* best) const;
    int query_tiles(const Layer&) const;
    int attention_tasks(const Pass&) const;
    void write_layer_kv(int thread, const Pass&, int index, const Layer* map, const float* hidden);

    const Kernels& kernels_;
    const std::shared_ptr<Threads> shared_threads_;
    Threads& threads_;
    RowsBuffer shared_;
    std::vector<Scratch> scratch_;
    Buffer<float> queries_, keys_, values_, inner_, pairs_, largest_, sums_, mixed_;
    size_t reserved_ = 0;
    int pieces_ = 1, piece_length_ = 0, tokens_in_task_ = 1;
};

}  // namespace deepenough
