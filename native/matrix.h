// Weight matrices: packed once from how they are stored (formats.h says into what).
#pragma once

#include <memory>

#include "formats.h"

namespace deepenough {

inline bool is_quantised(Format format) { return format >= Q8_0; }

struct Free {
    void operator()(void* memory) const;
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

// Memory aligned to cache lines, on huge pages where the system gives them.
void* allocate(size_t bytes);
template <class T>
Buffer<T> make_buffer(size_t count) {
    return Buffer<T>(static_cast<T*>(allocate(count * sizeof(T))));
}

struct Matrix : Tiles {
    Buffer<uint8_t> owned;

    Matrix() : Tiles{F32, 0, 0, 0, nullptr} {}
    int tiles() const { return (rows + kTile - 1) / kTile; }
    int blocks() const { return cols / kBlock; }
    size_t bytes() const { return tile_bytes * tiles(); }

    // Pack rows that are stored one after the other in a format, in the order given (or as they
    // are); returns false if the columns do not fill blocks.
    bool pack(Format format, const uint8_t* stored, int rows, int cols, const int* order);
    // Write one row as floats, exactly as stored.
    void row(int index, float* out) const;
};

size_t stored_row_bytes(Format format, int cols);
float half_to_float(uint16_t half);

}  // namespace deepenough
