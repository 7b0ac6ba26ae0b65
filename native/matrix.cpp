#include "matrix.h"

#include <cstdlib>
#include <cstring>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace deepenough {

constexpr size_t kSlab = size_t(16) << 20;

void Free::operator()(void* memory) const { std::free(memory); }

void* allocate(size_t bytes) {
    const size_t page = size_t(2) << 20;
    const size_t align = bytes >= page ? page : 64;
    const size_t size = (bytes + align - 1) / align * align;
    void* memory = std::aligned_alloc(align, size ? size : align);
    if (memory == nullptr) throw std::bad_alloc();
#ifdef __linux__
    if (bytes >= page) madvise(memory, size, MADV_HUGEPAGE);
#endif
    return memory;
}

float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half >> 15) << 31, exponent = (half >> 10) & 31;
    const uint32_t fraction = half & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | fraction << 13;
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    } else {  // zero, or fraction * 2^-24
        float value = float(fraction) * 5.9604644775390625e-08f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static float stored_float(Format format, const uint8_t* at) {
    uint16_t half;
    uint32_t bits;
    float value;
    switch (format) {
        case F32:
            std::memcpy(&value, at, 4);
            return value;
        case F16:
            std::memcpy(&half, at, 2);
            return half_to_float(half);
        default:
            std::memcpy(&half, at, 2);
            bits = uint32_t(half) << 16;
            std::memcpy(&value, &bits, 4);
            return value;
    }
}

static size_t element_bytes(Format format) { return format == F32 ? 4 : 2; }

// Bytes of a block of 32 weights in a GGUF file: scale, minimum, weights.
static size_t gguf_block_bytes(Format format) {
    return format == Q8_0 ? 34 : format == Q4_0 ? 18 : 20;
}

size_t stored_row_bytes(Format format, int cols) {
    if (!is_quantised(format)) return cols * element_bytes(format);
    return size_t(cols / kBlock) * gguf_block_bytes(format);
}

uint8_t* Slabs::take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > left_) {
        left_ = bytes > kSlab ? bytes : kSlab, used_ = 0;
        all_.push_back(make_buffer<uint8_t>(left_));
    }
    uint8_t* found = all_.back().get() + used_;
    left_ -= bytes, used_ += bytes;
    return found;
}

size_t Matrix::weights_at(int index) const {
    const int tile = index / kTile;
    return band_bytes * (tile / kBand) + weight_bytes(format) * (tile % kBand);
}

size_t Matrix::scales_at(int index) const {
    const int tile = index / kTile;
    return band_bytes * (tile / kBand) + kBand * weight_bytes(format) +
           scale_bytes(format) * (tile % kBand);
}

bool Matrix::pack(Format new_format, const uint8_t* stored, int new_rows, int new_cols,
                  const int* order, Slabs& slabs) {
    if (is_quantised(new_format) && new_cols % kBlock != 0) return false;
    format = new_format, rows = new_rows, cols = new_cols;
    const size_t record = record_bytes(format);
    band_bytes = record * (is_quantised(format) ? blocks() : cols);
    uint8_t* packed = slabs.take(bytes());
    data = packed;
    std::memset(packed, 0, bytes());
    const size_t row_bytes = stored_row_bytes(format, cols), element = element_bytes(format);
    for (int index = 0; index < rows; index++) {
        const uint8_t* from = stored + row_bytes * (order ? order[index] : index);
        uint8_t *weights = packed + weights_at(index), *scales = packed + scales_at(index);
        const int lane = index % kTile;
        if (!is_quantised(format)) {
            for (int col = 0; col < cols; col++)
                std::memcpy(weights + col * record + lane * element, from + col * element, element);
            continue;
        }
        for (int block = 0; block < blocks(); block++, weights += record, scales += record) {
            std::memcpy(scales + 2 * lane, from, 2);
            if (format == Q4_1) std::memcpy(scales + 32 + 2 * lane, from + 2, 2);
            const uint8_t* bytes = from + (format == Q4_1 ? 4 : 2);
            const int count = format == Q8_0 ? 32 : 16;  // nibbles: col, and col + 16
            for (int col = 0; col < count; col++)
                weights[(col / 4) * 64 + lane * 4 + col % 4] = bytes[col];
            from += gguf_block_bytes(format);
        }
    }
    return true;
}

void Matrix::stored_row(int index, uint8_t* out) const {
    const uint8_t *weights = data + weights_at(index), *scales = data + scales_at(index);
    const size_t record = record_bytes(format), element = element_bytes(format);
    const int lane = index % kTile;
    if (!is_quantised(format)) {
        for (int col = 0; col < cols; col++)
            std::memcpy(out + col * element, weights + col * record + lane * element, element);
        return;
    }
    for (int block = 0; block < blocks(); block++, weights += record, scales += record) {
        std::memcpy(out, scales + 2 * lane, 2);
        if (format == Q4_1) std::memcpy(out + 2, scales + 32 + 2 * lane, 2);
        uint8_t* bytes = out + (format == Q4_1 ? 4 : 2);
        const int count = format == Q8_0 ? 32 : 16;
        for (int col = 0; col < count; col++)
            bytes[col] = weights[(col / 4) * 64 + lane * 4 + col % 4];
        out += gguf_block_bytes(format);
    }
}

void Matrix::pack_rows(const Matrix& from, const int64_t* chosen, int count, Slabs& slabs) {
    const size_t row_bytes = stored_row_bytes(from.format, from.cols);
    std::vector<uint8_t> stored(row_bytes * count);
    for (int i = 0; i < count; i++) from.stored_row(int(chosen[i]), stored.data() + row_bytes * i);
    pack(from.format, stored.data(), count, from.cols, nullptr, slabs);
}

void Matrix::row(int index, float* out) const {
    const uint8_t *weights = data + weights_at(index), *scales = data + scales_at(index);
    const size_t record = record_bytes(format), element = element_bytes(format);
    const int lane = index % kTile;
    if (!is_quantised(format)) {
        for (int col = 0; col < cols; col++)
            out[col] = stored_float(format, weights + col * record + lane * element);
        return;
    }
    for (int block = 0; block < blocks(); block++, weights += record, scales += record) {
        const float scale = stored_float(F16, scales + 2 * lane);
        const float minimum = format == Q4_1 ? stored_float(F16, scales + 32 + 2 * lane) : 0.0f;
        float* values = out + block * kBlock;
        for (int col = 0; col < kBlock; col++) {
            if (format == Q8_0) {
                values[col] = scale * float(int8_t(weights[(col / 4) * 64 + lane * 4 + col % 4]));
                continue;
            }
            const uint8_t both = weights[(col % 16 / 4) * 64 + lane * 4 + col % 4];
            const int q = col < 16 ? both & 15 : both >> 4;
            values[col] = format == Q4_0 ? scale * float(q - 8) : scale * float(q) + minimum;
        }
    }
}

}  // namespace deepenough
