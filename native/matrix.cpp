#include "matrix.h"

#include <cstdlib>
#include <cstring>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace deepenough {

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

// Where a tile keeps the scales of its blocks, behind all weights.
static size_t weight_bytes(Format format) { return format == Q8_0 ? 512 : 256; }
static size_t scale_bytes(Format format) { return format == Q4_1 ? 64 : 32; }

bool Matrix::pack(Format new_format, const uint8_t* stored, int new_rows, int new_cols,
                  const int* order) {
    if (is_quantised(new_format) && new_cols % kBlock != 0) return false;
    format = new_format, rows = new_rows, cols = new_cols;
    const size_t row_bytes = stored_row_bytes(format, cols), element = element_bytes(format);
    tile_bytes = is_quantised(format) ? (weight_bytes(format) + scale_bytes(format)) * blocks()
                                      : kTile * element * cols;
    tile_bytes = (tile_bytes + 63) / 64 * 64;
    owned = make_buffer<uint8_t>(bytes());
    data = owned.get();
    std::memset(owned.get(), 0, bytes());
    const size_t block_bytes = gguf_block_bytes(format), all_weights = weight_bytes(format) * blocks();
    for (int index = 0; index < rows; index++) {
        const uint8_t* from = stored + row_bytes * (order ? order[index] : index);
        uint8_t* tile_data = owned.get() + tile_bytes * (index / kTile);
        const int lane = index % kTile;
        if (!is_quantised(format)) {
            for (int col = 0; col < cols; col++)
                std::memcpy(tile_data + (size_t(col) * kTile + lane) * element, from + col * element,
                            element);
            continue;
        }
        for (int block = 0; block < blocks(); block++, from += block_bytes) {
            uint8_t* scales = tile_data + all_weights + scale_bytes(format) * block;
            uint8_t* weights = tile_data + weight_bytes(format) * block;
            std::memcpy(scales + 2 * lane, from, 2);
            if (format == Q4_1) std::memcpy(scales + 32 + 2 * lane, from + 2, 2);
            const uint8_t* packed = from + (format == Q4_1 ? 4 : 2);
            const int bytes_of_weights = format == Q8_0 ? 32 : 16;  // nibbles: col, and col + 16
            for (int col = 0; col < bytes_of_weights; col++)
                weights[(col / 4) * 64 + lane * 4 + col % 4] = packed[col];
        }
    }
    return true;
}

void Matrix::row(int index, float* out) const {
    const uint8_t* tile_data = data + tile_bytes * (index / kTile);
    const int lane = index % kTile;
    if (!is_quantised(format)) {
        const size_t element = element_bytes(format);
        for (int col = 0; col < cols; col++)
            out[col] = stored_float(format, tile_data + (size_t(col) * kTile + lane) * element);
        return;
    }
    for (int block = 0; block < blocks(); block++) {
        const uint8_t* weights = tile_data + weight_bytes(format) * block;
        const uint8_t* scales =
            tile_data + weight_bytes(format) * blocks() + scale_bytes(format) * block;
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
