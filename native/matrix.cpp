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

template <class Copy>
void Matrix::each_part(int index, Copy copy) const {
    const size_t record = record_bytes(format), tile = index / kTile, lane = index % kTile;
    const uint8_t* weights = data + band_bytes * (tile / kBand) + weight_bytes(format) * (tile % kBand);
    if (!is_quantised(format)) {
        const size_t element = element_bytes(format);
        for (int col = 0; col < cols; col++)
            copy(weights + col * record + lane * element, col * element, element);
        return;
    }
    const uint8_t* scales = data + band_bytes * (tile / kBand) + kBand * weight_bytes(format) +
                            scale_bytes(format) * (tile % kBand);
    const size_t size = gguf_block_bytes(format), head = format == Q4_1 ? 4 : 2;
    for (size_t at = 0; at < size * blocks(); at += size, weights += record, scales += record) {
        copy(scales + 2 * lane, at, 2);
        if (format == Q4_1) copy(scales + 32 + 2 * lane, at + 2, 2);
        for (size_t group = 0; head + 4 * group < size; group++)
            copy(weights + 64 * group + 4 * lane, at + head + 4 * group, 4);
    }
}

bool Matrix::pack(Format new_format, const uint8_t* stored, int new_rows, int new_cols,
                  const int* order, Slabs& slabs) {
    if (is_quantised(new_format) && new_cols % kBlock != 0) return false;
    format = new_format, rows = new_rows, cols = new_cols;
    band_bytes = record_bytes(format) * (is_quantised(format) ? blocks() : cols);
    uint8_t* packed = slabs.take(bytes());
    data = packed;
    std::memset(packed, 0, bytes());
    for (int index = 0; index < rows; index++) {
        const uint8_t* from = stored + stored_row_bytes(format, cols) * (order ? order[index] : index);
        each_part(index, [&](const uint8_t* own, size_t at, size_t bytes) {
            std::memcpy(packed + (own - data), from + at, bytes);
        });
    }
    return true;
}

void Matrix::stored_row(int index, uint8_t* out) const {
    each_part(index, [&](const uint8_t* own, size_t at, size_t bytes) {
        std::memcpy(out + at, own, bytes);
    });
}

void Matrix::pack_rows(const Matrix& from, const int64_t* chosen, int count, Slabs& slabs) {
    const size_t row_bytes = stored_row_bytes(from.format, from.cols);
    std::vector<uint8_t> stored(row_bytes * count);
    for (int i = 0; i < count; i++) from.stored_row(int(chosen[i]), stored.data() + row_bytes * i);
    pack(from.format, stored.data(), count, from.cols, nullptr, slabs);
}

void Matrix::row(int index, float* out) const {
    std::vector<uint8_t> stored(stored_row_bytes(format, cols));
    stored_row(index, stored.data());
    const uint8_t* from = stored.data();
    if (!is_quantised(format)) {
        for (int col = 0; col < cols; col++)
            out[col] = stored_float(format, from + col * element_bytes(format));
        return;
    }
    for (int block = 0; block < blocks(); block++, from += gguf_block_bytes(format), out += kBlock) {
        const float scale = stored_float(F16, from);
        const float minimum = format == Q4_1 ? stored_float(F16, from + 2) : 0.0f;
        const uint8_t* bytes = from + (format == Q4_1 ? 4 : 2);
        for (int col = 0; col < kBlock; col++) {
            const int q = format == Q8_0 ? int8_t(bytes[col]) : col < 16 ? bytes[col] & 15 : bytes[col - 16] >> 4;
            out[col] = format == Q4_0 ? scale * float(q - 8) : scale * float(q) + minimum;
        }
    }
}

}  // namespace deepenough
