#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace deepenough {

constexpr int kChunkTiles = kBand;  // weights that a thread claims at once
constexpr int kPrivateRows = 4;    // up to so many rows every thread prepares for itself
constexpr int kPiece = 1024;       // positions of a long context that one task attends to
constexpr int kTokensInTask = 8;   // of a long prompt
constexpr int kShared = 32;        // positions that are worth a task of their own, to keep all threads busy
// Bytes of weights, and of keys and of values, that a thread asks for before the others have come.
constexpr size_t kFetched = 16384, kFetchedCache = 8192;

// -- cache ---------------------------------------------------------------------------------------

Cache::Cache(const Config& config, int sequences, int capacity, bool bf16)
    : sequences(sequences),
      capacity((capacity + kTile - 1) / kTile * kTile),
      bf16(bf16),
      layers_(config.layers),
      heads_(config.kv_heads),
      width_(config.head_width),
      element_(bf16 ? 2 : 4) {
    const size_t bytes = place(0, sequences, 0);
    for (auto* side : {&keys_, &values_})
        for (int layer = 0; layer < layers_; layer++) {
            side->push_back(make_buffer<uint8_t>(bytes));
            std::memset(side->back().get(), 0, bytes);  // what nobody has written must be a number
        }
}

size_t Cache::place(int, int sequence, int head) const {
    return (size_t(sequence) * heads_ + head) * capacity * width_ * element_;
}

uint8_t* Cache::keys(int layer, int sequence, int head) {
    return keys_[layer].get() + place(layer, sequence, head);
}

uint8_t* Cache::values(int layer, int sequence, int head) {
    return values_[layer].get() + place(layer, sequence, head);
}

void Cache::select(const int* rows, int count) {
    const size_t bytes = place(0, 1, 0);
    for (auto* side : {&keys_, &values_})
        for (auto& layer : *side) {
            Buffer<uint8_t> chosen = make_buffer<uint8_t>(bytes * count);
            for (int row = 0; row < count; row++)
                std::memcpy(chosen.get() + bytes * row, layer.get() + bytes * rows[row], bytes);
            layer = std::move(chosen);
        }
    sequences = count;
}

void Cache::grow(int wanted) {
    // Tokens of a head lie in a row, so what there is comes first in the larger rows.
    const size_t before = place(0, 0, 1);
    capacity = std::max(capacity, (wanted + kTile - 1) / kTile * kTile);
    const size_t after = place(0, 0, 1), heads = size_t(sequences) * heads_;
    for (auto* side : {&keys_, &values_})
        for (auto& layer : *side) {
            Buffer<uint8_t> grown = make_buffer<uint8_t>(after * heads);
            std::memset(grown.get(), 0, after * heads);
            for (size_t head = 0; head < heads; head++)
                std::memcpy(grown.get() + after * head, layer.get() + before * head, before);
            layer = std::move(grown);
        }
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void Cache::store(int layer, int sequence, int head, int position, const float* key,
                  const float* value) {
    const size_t key_at = size_t(position / kTile) * kTile * width_ + position % kTile;
    const size_t value_at = size_t(position) * width_;
    uint8_t *all_keys = keys(layer, sequence, head), *all_values = values(layer, sequence, head);
    if (bf16) {
        auto* k = reinterpret_cast<uint16_t*>(all_keys) + key_at;
        auto* v = reinterpret_cast<uint16_t*>(all_values) + value_at;
        for (int d = 0; d < width_; d++) k[d * kTile] = to_bf16(key[d]), v[d] = to_bf16(value[d]);
    } else {
        auto* k = reinterpret_cast<float*>(all_keys) + key_at;
        for (int d = 0; d < width_; d++) k[d * kTile] = key[d];
        std::memcpy(reinterpret_cast<float*>(all_values) + value_at, value, width_ * 4);
    }
}

// -- scratch memory --------------------------------------------------------------------------------

Model::Model(const Config& config, const Kernels& kernels, std::shared_ptr<Threads> threads)
    : config(config),
      layers(config.layers),
      kernels_(kernels),
      shared_threads_(std::move(threads)),
      threads_(*shared_threads_),
      scratch_(threads_.count()) {}

void Model::RowsBuffer::reserve(int new_count, int new_cols) {
    if (size_t(new_count) * new_cols > size_t(count) * cols) {
        const size_t all = size_t(new_count) * new_cols, blocks = all / kBlock + new_count;
        values = make_buffer<float>(all);
        digits = make_buffer<int8_t>(blocks * kDigits * kBlock);
        sums = make_buffer<int32_t>(blocks * kDigits);
        scales = make_buffer<float>(blocks);
        totals = make_buffer<float>(blocks);
        count = new_count, cols = new_cols;
    }
}

Rows Model::RowsBuffer::rows(int count, int cols) const {
    return {count, cols, values.get(), digits.get(), sums.get(), scales.get(), totals.get()};
}

void Model::reserve(const Pass& pass) {
    int longest = 0;
    for (int s = 0; s < pass.sequences; s++) longest = std::max(longest, pass.starts[s]);
    // Long contexts are cut into pieces, all of whose new tokens are in the last; long prompts are cut
    // into groups of tokens.
    const bool is_prompt = pass.tokens > kPrivateRows;
    tokens_in_task_ = is_prompt ? kTokensInTask : pass.tokens;
    pieces_ = is_prompt ? 1 : std::max(1, longest / kPiece);
    const int heads = pass.sequences * config.kv_heads;
    while (!is_prompt && heads * pieces_ % threads_.count() && (pieces_ + 1) * kShared <= longest) pieces_++;
    piece_length_ = (longest / pieces_ + kTile) / kTile * kTile;
    const size_t queries = size_t(pass.count()) * config.heads * pieces_;
    const size_t wanted = std::max(queries, size_t(pass.count()));
    if (wanted <= reserved_) return;
    reserved_ = wanted;
    const size_t count = wanted / config.heads + 1;
    queries_ = make_buffer<float>(count * config.query_width());
    keys_ = make_buffer<float>(count * config.kv_width());
    values_ = make_buffer<float>(count * config.kv_width());
    inner_ = make_buffer<float>(count * std::max(config.inner, config.width));
    if (config.paired) pairs_ = make_buffer<float>(count * 2 * config.width);
    largest_ = make_buffer<float>(wanted);
    sums_ = make_buffer<float>(wanted);
    mixed_ = make_buffer<float>(wanted * config.head_width);
}

// -- phases ----------------------------------------------------------------------------------------

void Model::prepare_row(const RowsBuffer& buffer, int row, int cols, const float* from,
                        const float* norm) const {
    float* values = buffer.values.get() + size_t(row) * cols;
    if (norm != nullptr)
        kernels_.rms_norm(from, norm, cols, config.eps, values);
    else
        std::memcpy(values, from, cols * sizeof(float));
    if (config.exact && cols % kBlock == 0) {
        const size_t at = size_t(row) * (cols / kBlock);
        kernels_.quantise(values, cols, buffer.digits.get() + at * kDigits * kBlock,
                          buffer.sums.get() + at * kDigits, buffer.scales.get() + at,
                          buffer.totals.get() + at);
    }
}

// Rows ready to be multiplied: normed if `norm`, and as digits. Few rows are made by every thread for
// itself, which is cheaper than waiting for another; many are tasks of a phase of their own, before
// the one that has `next_tasks`. `make` writes a row if it is not there yet.
template <class Make>
Rows Model::prepare(int thread, int count, int cols, const float* from, const float* norm,
                    int next_tasks, Make make) {
    const bool is_private = count <= kPrivateRows;
    RowsBuffer& buffer = is_private ? scratch_[thread].rows : shared_;
    const auto prepare_one = [&](int row) {
        make(row);
        prepare_row(buffer, row, cols, from + size_t(row) * cols, norm);
    };
    if (is_private) {
        buffer.reserve(count, cols);
        for (int row = 0; row < count && !threads_.is_late(thread); row++) prepare_one(row);
    } else {
        int row, end;
        while (threads_.claim(thread, 1, &row, &end)) prepare_one(row);
        threads_.meet(thread, next_tasks);
    }
    return buffer.rows(count, cols);
}

Rows Model::prepare(int thread, int count, int cols, const float* from, const float* norm,
                    int next_tasks) {
    return prepare(thread, count, cols, from, norm, next_tasks, [](int) {});
}

void Model::multiply(int thread, const Rows& rows, const Part* parts, int num_parts, bool add) {
    int first, last;
    while (threads_.claim(thread, kChunkTiles, &first, &last)) {
        int begin = 0;  // of a part, in tiles of all parts
        for (int i = 0; i < num_parts; i++) {
            const Part& part = parts[i];
            const int end = begin + part.matrix->tiles();
            const int from = std::max(first, begin), to = std::min(last, end);
            if (from < to)
                kernels_.products(*part.matrix, config.exact, from - begin, to - begin, rows,
                                  part.out + size_t(from - begin) * kTile, part.stride, add);
            begin = end;
        }
    }
}

static void fetch(const uint8_t* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

// Ask for the weights that a thread begins with when some matrices come next, one behind the other.
void Model::fetch_tiles(int thread, std::initializer_list<const Matrix*> matrices) const {
    int tiles = 0;
    for (const Matrix* matrix : matrices) tiles += matrix->tiles();
    int first = threads_.first_task(thread, tiles);
    for (const Matrix* matrix : matrices) {
        if (first >= 0 && first < matrix->tiles())
            fetch(matrix->data + matrix->band_bytes * (first / kBand), kFetched / matrices.size());
        first -= matrix->tiles();
    }
}

// Ask for the keys and values that a task attends to first.
void Model::fetch_cache(const Pass& pass, int index, int task) const {
    const int piece = task % pieces_, head = task / pieces_ % config.kv_heads;
    const int s = task / pieces_ / config.kv_heads;
    if (s >= pass.sequences) return;
    const size_t tile = size_t(kTile) * config.head_width * (pass.cache->bf16 ? 2 : 4);
    const size_t from = piece * piece_length_ / kTile * tile;
    const size_t bytes = std::min(kFetchedCache, size_t(piece_length_ / kTile) * tile);
    const uint8_t* keys = pass.cache->keys(index, pass.rows[s], head);
    fetch(keys + from, bytes);
    if (piece == pieces_ - 1) fetch(keys + pass.starts[s] / kTile * tile, tile);  // of the new key
    fetch(pass.cache->values(index, pass.rows[s], head) + from, bytes);
}

int Model::query_tiles(const Layer& layer) const {
    return layer.query.tiles() + layer.key.tiles() + layer.value.tiles();
}

int Model::attention_tasks(const Pass& pass) const {
    const int groups = (pass.tokens + tokens_in_task_ - 1) / tokens_in_task_;
    return pass.sequences * config.kv_heads * groups * pieces_;
}

void Model::rotate(float* head, int position) const {
    const int half = config.rotary / 2;
    const float* cosine = cosines.data() + size_t(position) * half;
    const float* sine = sines.data() + size_t(position) * half;
    for (int i = 0; i < half; i++) {
        const float x = head[i], y = head[i + half];
        head[i] = x * cosine[i] - y * sine[i];
        head[i + half] = y * cosine[i] + x * sine[i];
    }
}

static void add_bias(float* values, const std::vector<float>& bias, int first, int count) {
    if (!bias.empty())
        for (int i = 0; i < count; i++) values[i] += bias[first + i];
}

// Rotate the new key of a head, and store it and the value, of all heads' `keys` and `values` of a row.
void Model::store_new(int thread, const Pass& pass, int index, int row, int head, const float* keys,
                      const float* values) {
    const Layer& layer = layers[index];
    const int width = config.head_width, s = row / pass.tokens;
    const int position = pass.starts[s] + row % pass.tokens;
    std::vector<float>& own = scratch_[thread].key;
    own.resize(2 * width);
    float *key = own.data(), *value = key + width;
    std::memcpy(key, keys + head * width, width * sizeof(float));
    std::memcpy(value, values + head * width, width * sizeof(float));
    add_bias(key, layer.key_bias, head * width, width);
    add_bias(value, layer.value_bias, head * width, width);
    if (!layer.key_norm.empty())
        kernels_.rms_norm(key, layer.key_norm.data(), width, config.eps, key);
    rotate(key, position);
    pass.cache->store(index, pass.rows[s], head, position, key, value);
}

void Model::attention_work(int thread, const Pass& pass, const Layer& layer, int index) {
    int task, end;
    if (pass.tokens > kPrivateRows) {  // other tasks attend to keys of this one: all are stored first
        while (threads_.claim(thread, 1, &task, &end)) {
            const size_t at = size_t(task) * config.kv_width();
            for (int head = 0; head < config.kv_heads; head++)
                store_new(thread, pass, index, task, head, keys_.get() + at, values_.get() + at);
        }
        threads_.meet(thread, attention_tasks(pass));
    }
    while (threads_.claim(thread, 1, &task, &end)) {
        if (pass.count() <= kPrivateRows) fetch_cache(pass, index, task + 1);
        attend(thread, pass, layer, index, task);
    }
}

void Model::attend(int thread, const Pass& pass, const Layer& layer, int index, int task) {
    Scratch& scratch = scratch_[thread];
    const int width = config.head_width, group = config.heads / config.kv_heads;
    const int groups = (pass.tokens + tokens_in_task_ - 1) / tokens_in_task_;
    const int piece = task % pieces_, tokens_group = task / pieces_ % groups;
    const int head = task / pieces_ / groups % config.kv_heads;
    const int s = task / pieces_ / groups / config.kv_heads;
    const int first = tokens_group * tokens_in_task_;
    const int count = std::min(tokens_in_task_, pass.tokens - first);
    const int start = pass.starts[s], is_last = piece == pieces_ - 1;
    scratch.query.resize(size_t(count) * group * width);
    scratch.scores.resize(4 * kChunk + kTile);
    std::vector<int>& limits = scratch.limits;
    limits.resize(size_t(count) * group);
    for (int t = 0; t < count; t++) {
        const size_t row = size_t(s) * pass.tokens + first + t;
        for (int g = 0; g < group; g++) {
            float* query = scratch.query.data() + (size_t(t) * group + g) * width;
            const int own = (head * group + g) * width;
            std::memcpy(query, queries_.get() + row * config.query_width() + own, width * 4);
            add_bias(query, layer.query_bias, own, width);
            if (!layer.query_norm.empty())
                kernels_.rms_norm(query, layer.query_norm.data(), width, config.eps, query);
            rotate(query, start + first + t);
            limits[t * group + g] = start + first + t + 1;
        }
        if (pass.tokens <= kPrivateRows && is_last)
            store_new(thread, pass, index, int(row), head, keys_.get() + row * config.kv_width(),
                      values_.get() + row * config.kv_width());
    }
    const size_t at = (size_t(s) * config.kv_heads + head) * pieces_ + piece;
    const size_t query_at = at * pass.tokens * group + size_t(first) * group;
    std::fill_n(largest_.get() + query_at, count * group, -INFINITY);
    std::fill_n(sums_.get() + query_at, count * group, 0.0f);
    std::fill_n(mixed_.get() + query_at * width, size_t(count) * group * width, 0.0f);
    const int known = start / kTile * kTile;  // pieces begin with whole tiles of keys
    const int begin = std::min(piece * piece_length_, known);
    const int end = is_last ? start + first + count : std::min((piece + 1) * piece_length_, known);
    Attention attention{count * group,       width,
                        begin,               end,
                        config.attention_scale, scratch.query.data(),
                        limits.data(),       pass.cache->keys(index, pass.rows[s], head),
                        pass.cache->values(index, pass.rows[s], head), pass.cache->bf16,
                        scratch.scores.data(), largest_.get() + query_at,
                        sums_.get() + query_at, mixed_.get() + query_at * width};
    kernels_.attend(attention);
}

// What a row's queries have found in all pieces, head by head.
void Model::attended(const Pass& pass, int row, float* out) const {
    const int width = config.head_width, group = config.heads / config.kv_heads;
    const int s = row / pass.tokens, t = row % pass.tokens;
    for (int head = 0; head < config.heads; head++) {
        const size_t first = (size_t(s) * config.kv_heads + head / group) * pieces_ * pass.tokens * group +
                             size_t(t) * group + head % group;
        const size_t next = size_t(pass.tokens) * group;  // the same query in the next piece
        float largest = -INFINITY, sum = 0.0f;
        for (int piece = 0; piece < pieces_; piece++)
            largest = std::max(largest, largest_[first + piece * next]);
        float* mixed = out + head * width;
        std::fill_n(mixed, width, 0.0f);
        for (int piece = 0; piece < pieces_; piece++) {
            const size_t at = first + piece * next;
            const float weight = pieces_ == 1 ? 1.0f : std::exp(largest_[at] - largest);
            sum += weight * sums_[at];
            for (int d = 0; d < width; d++) mixed[d] += weight * mixed_[at * width + d];
        }
        for (int d = 0; d < width; d++) mixed[d] /= sum;
    }
}

// Memory for rows that threads make each for itself if they are few, else `shared`.
float* Model::memory_for(int thread, int count, int cols, float* shared) {
    if (count > kPrivateRows) return shared;
    std::vector<float>& own = scratch_[thread].gate;
    own.resize(std::max(own.size(), size_t(count) * cols));
    return own.data();
}

Rows Model::attended_rows(int thread, const Pass& pass, int next_tasks) {
    const int count = pass.count(), cols = config.query_width();
    // The queries have been read; where rows are shared out, their memory takes what they have found.
    float* found = memory_for(thread, count, cols, queries_.get());
    return prepare(thread, count, cols, found, nullptr, next_tasks,
                   [&](int row) { attended(pass, row, found + size_t(row) * cols); });
}

// An embedding and a state side by side, each with a norm of its own.
Rows Model::paired_rows(int thread, const Pass& pass, const Layer& layer, const float* hidden,
                        int next_tasks) {
    const int count = pass.count(), width = config.width, cols = 2 * width;
    float* pairs = memory_for(thread, count, cols, pairs_.get());
    return prepare(thread, count, cols, pairs, nullptr, next_tasks, [&](int row) {
        float* to = pairs + size_t(row) * cols;
        kernels_.rms_norm(pass.embeddings + size_t(row) * width, layer.input_norm.data(), width,
                          config.eps, to);
        kernels_.rms_norm(hidden + size_t(row) * width, layer.hidden_norm.data(), width, config.eps,
                          to + width);
    });
}

// Tasks of the phase that begins products: rows to be prepared if they are many, else tiles.
static int first_tasks(int count, int tiles) { return count <= kPrivateRows ? tiles : count; }

// Add to the states what a linear map makes of them, or put it in their place.
void Model::linear_work(int thread, int count, const Matrix& matrix, const std::vector<float>& norm,
                        const std::vector<float>& bias, float* hidden, int next_tasks) {
    const size_t width = config.width;
    const Rows input =
        prepare(thread, count, config.width, hidden, norm.empty() ? nullptr : norm.data(), matrix.tiles());
    const Part map = {&matrix, inner_.get(), width};
    multiply(thread, input, &map, 1, false);
    threads_.meet(thread, count);  // others prepare rows of the states until then
    int row, end;
    while (threads_.claim(thread, 1, &row, &end)) {
        float* to = hidden + row * width;
        const float* from = inner_.get() + row * width;
        for (size_t i = 0; i < width; i++) to[i] = (norm.empty() ? 0.f : to[i]) + (from[i] + bias[i]);
    }
    threads_.meet(thread, next_tasks);
}

// Tasks of the phase that begins what is left of the layers from a part on.
int Model::tasks_from(const Pass& pass, int index, bool is_inner, int last, int tasks_afterwards) const {
    for (; index < last; index++, is_inner = false) {
        const Layer& layer = layers[index];
        if (!is_inner && layer.query.rows) return first_tasks(pass.count(), query_tiles(layer));
        for (const Matrix* matrix : {is_inner ? nullptr : &layer.output, &layer.gate, &layer.down})
            if (matrix != nullptr && matrix->rows) return first_tasks(pass.count(), matrix->tiles());
    }
    return tasks_afterwards;
}

void Model::layers_work(int thread, const Pass& pass, int first, int last, float* hidden,
                        int tasks_afterwards) {
    const int count = pass.count(), width = config.width;
    const size_t kv_width = config.kv_width(), inner_width = config.inner;
    for (int index = first; index < last; index++) {
        const Layer& layer = layers[index];
        const bool is_prompt = pass.tokens > kPrivateRows, is_short = count <= kPrivateRows;
        const int inner_tasks = tasks_from(pass, index, true, last, tasks_afterwards);
        if (layer.query.rows) {
            const int tiles = query_tiles(layer);
            const Rows input =
                config.paired ? paired_rows(thread, pass, layer, hidden, tiles)
                              : prepare(thread, count, width, hidden, layer.input_norm.data(), tiles);
            const Part parts[] = {{&layer.query, queries_.get(), size_t(config.query_width())},
                                  {&layer.key, keys_.get(), kv_width},
                                  {&layer.value, values_.get(), kv_width}};
            multiply(thread, input, parts, 3, false);
            if (is_short) fetch_cache(pass, index, threads_.first_task(thread, attention_tasks(pass)));
            threads_.meet(thread, is_prompt ? count : attention_tasks(pass));
            attention_work(thread, pass, layer, index);
            if (is_short) fetch_tiles(thread, {&layer.output});
            threads_.meet(thread, first_tasks(count, layer.output.tiles()));
            const Part output = {&layer.output, hidden, size_t(width)};
            multiply(thread, attended_rows(thread, pass, layer.output.tiles()), &output, 1, true);
            if (is_short) fetch_tiles(thread, {&layer.gate}), fetch_tiles(thread, {&layer.up});
            threads_.meet(thread, inner_tasks);
        } else if (layer.output.rows) {
            linear_work(thread, count, layer.output, layer.input_norm, layer.query_bias, hidden, inner_tasks);
        }
        const int next_tasks = tasks_from(pass, index + 1, false, last, tasks_afterwards);
        if (!layer.gate.rows) {
            if (layer.down.rows)
                linear_work(thread, count, layer.down, layer.inner_norm, layer.inner_bias, hidden, next_tasks);
            continue;
        }
        const Rows inner = prepare(thread, count, width, hidden, layer.inner_norm.data(), layer.gate.tiles());
        Scratch& scratch = scratch_[thread];
        constexpr int most = kChunkTiles * kTile;
        scratch.gate.resize(std::max(scratch.gate.size(), size_t(count) * most));
        scratch.up.resize(std::max(scratch.up.size(), size_t(count) * most));
        int tile, end;
        while (threads_.claim(thread, kChunkTiles, &tile, &end)) {
            const int from = tile * kTile, rows = std::min(end * kTile, config.inner) - from;
            float *gate = scratch.gate.data(), *up = scratch.up.data();
            kernels_.products(layer.gate, config.exact, tile, end, inner, gate, most, false);
            kernels_.products(layer.up, config.exact, tile, end, inner, up, most, false);
            for (int row = 0; row < count; row++)
                kernels_.silu_times(gate + row * most, up + row * most, rows,
                                    inner_.get() + row * inner_width + from);
        }
        if (is_short) fetch_tiles(thread, {&layer.down});
        threads_.meet(thread, first_tasks(count, layer.down.tiles()));
        const Part down = {&layer.down, hidden, size_t(width)};
        multiply(thread, prepare(thread, count, config.inner, inner_.get(), nullptr, layer.down.tiles()),
                 &down, 1, true);
        const bool goes_on = index + 1 < last;
        if (is_short && goes_on) {
            const Layer& next = layers[index + 1];
            fetch_tiles(thread, {&next.query, &next.key, &next.value});
        }
        if (is_short && !goes_on && tasks_afterwards) fetch_tiles(thread, {&output_matrix()});
        threads_.meet(thread, next_tasks);
    }
}

int Model::head_tasks(int count, const float* logits) const {
    return logits == nullptr ? 0 : first_tasks(count, output_matrix().tiles());
}

void Model::head_work(int thread, int count, const float* hidden, const float* norm, float* normed,
                      float* logits) {
    const int width = config.width;
    if (thread == 0 && normed != nullptr)
        for (int row = 0; row < count; row++)
            kernels_.rms_norm(hidden + size_t(row) * width, norm, width, config.eps,
                              normed + size_t(row) * width);
    if (logits == nullptr) return;
    const Matrix& matrix = output_matrix();
    const size_t vocab = config.vocab;
    std::vector<std::pair<float, int>>& best = scratch_[thread].best;
    best.assign(count, {-INFINITY, config.vocab});
    const Rows rows = prepare(thread, count, width, hidden, norm, matrix.tiles());
    int tile, end;
    while (threads_.claim(thread, kChunkTiles, &tile, &end)) {
        const int from = tile * kTile, to = std::min(end * kTile, config.vocab);
        kernels_.products(matrix, config.exact, tile, end, rows, logits + from, vocab, false);
        for (int row = 0; row < count; row++) {
            const float* own = logits + row * vocab;
            const float largest = kernels_.largest(own + from, to - from);
            if (largest > best[row].first)
                best[row] = {largest, int(std::find(own + from, own + to, largest) - own)};
        }
    }
}

// The place of each row's largest logit, the first of equal ones, from what the threads have found.
void Model::find_best(int count, int64_t* best) const {
    for (int row = 0; row < count; row++) {
        std::pair<float, int> found{-INFINITY, config.vocab - 1};
        for (const Scratch& scratch : scratch_) {
            if (scratch.best.size() <= size_t(row)) continue;
            const auto& own = scratch.best[row];
            if (own.first > found.first || (own.first == found.first && own.second < found.second))
                found = own;
        }
        best[row] = found.second;
    }
}

// -- what callers ask for --------------------------------------------------------------------------

void Model::embed(const int64_t* tokens, int count, float* hidden) const {
    for (int i = 0; i < count; i++) {
        if (tokens[i] < 0 || tokens[i] >= embedding.rows)
            throw std::out_of_range("a token is not in the vocabulary");
        embedding.row(int(tokens[i]), hidden + size_t(i) * config.width);
    }
}

void Model::run_layers(const Pass& pass, int first, int last, float* hidden, float* normed,
                       float* logits, int64_t* best) {
    if (first >= last) return;
    reserve(pass);
    for (Scratch& scratch : scratch_) scratch.best.clear();
    shared_.reserve(pass.count(), std::max({config.width * (1 + config.paired), config.inner, config.query_width()}));
    threads_.run(
        [&](int thread) {
            layers_work(thread, pass, first, last, hidden, head_tasks(pass.count(), logits));
            head_work(thread, pass.count(), hidden, final_norm.data(), normed, logits);
        },
        tasks_from(pass, first, false, last, head_tasks(pass.count(), logits)));
    if (best != nullptr) find_best(pass.count(), best);
}

void Model::write_layer_kv(int thread, const Pass& pass, int index, const Layer* map,
                           const float* hidden) {
    const Layer& layer = layers[index];
    if (!layer.key.rows) return;  // its attention was replaced
    Scratch& scratch = scratch_[thread];
    const int count = pass.count(), width = config.width;
    const size_t kv_width = config.kv_width();
    scratch.rows.reserve(count, width);
    const Rows rows = scratch.rows.rows(count, width);
    if (map != nullptr) {
        scratch.gate.resize(std::max(scratch.gate.size(), size_t(count) * width));
        float* mapped = scratch.gate.data();
        for (int row = 0; row < count; row++)
            prepare_row(scratch.rows, row, width, hidden + size_t(row) * width, nullptr);
        kernels_.products(map->query, config.exact, 0, map->query.tiles(), rows, mapped, width, false);
        for (int row = 0; row < count; row++) add_bias(mapped + size_t(row) * width, map->query_bias, 0, width);
        hidden = mapped;
    }
    for (int row = 0; row < count; row++)
        prepare_row(scratch.rows, row, width, hidden + size_t(row) * width, layer.input_norm.data());
    scratch.up.resize(std::max(scratch.up.size(), 2 * count * kv_width));
    float *keys = scratch.up.data(), *values = keys + count * kv_width;
    kernels_.products(layer.key, config.exact, 0, layer.key.tiles(), rows, keys, kv_width, false);
    kernels_.products(layer.value, config.exact, 0, layer.value.tiles(), rows, values, kv_width, false);
    for (int row = 0; row < count; row++)
        for (int head = 0; head < config.kv_heads; head++)
            store_new(thread, pass, index, row, head, keys + row * kv_width, values + row * kv_width);
}

void Model::write_kv(const Pass& pass, int first, int last, const Model* maps, const int* which,
                     const float* hidden) {
    threads_.run(
        [&](int thread) {
            int task, end;
            while (threads_.claim(thread, 1, &task, &end)) {
                const Layer* map = maps && which[task] >= 0 ? &maps->layers.at(which[task]) : nullptr;
                write_layer_kv(thread, pass, first + task, map, hidden);
            }
        },
        last - first);
}

void Model::finish(const float* hidden, int count, bool is_normed, float* normed, float* logits) {
    const float* norm = is_normed ? nullptr : final_norm.data();
    if (logits == nullptr) {  // not worth waking anybody
        head_work(0, count, hidden, norm, normed, nullptr);
        return;
    }
    shared_.reserve(count, config.width);
    threads_.run([&](int thread) { head_work(thread, count, hidden, norm, normed, logits); },
                 head_tasks(count, logits));
}

void Model::multiply_rows(const Matrix& matrix, const float* values, int count, float* out) {
    shared_.reserve(count, matrix.cols);
    const Part part = {&matrix, out, size_t(matrix.rows)};
    threads_.run(
        [&](int thread) {
            multiply(thread, prepare(thread, count, matrix.cols, values, nullptr, matrix.tiles()), &part,
                     1, false);
        },
        first_tasks(count, matrix.tiles()));
}

size_t Model::weight_bytes() const {
    size_t bytes = embedding.bytes() + head.bytes() + fusion.bytes();
    for (const Layer& layer : layers)
        for (const Matrix* matrix : {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate,
                                     &layer.up, &layer.down})
            bytes += matrix->bytes();
    return bytes;
}

}  // namespace deepenough
