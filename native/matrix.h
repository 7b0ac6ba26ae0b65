// Weight matrices: packed once from how they are stored (formats.h says into what).
#pragma once

#include <memory>
#include <vector>

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

// Memory that is handed out in the order in which it will be read, and freed as a whole.
class Slabs {
public:
    uint8_t* take(size_t bytes);

private:
    std::vector<Buffer<uint8_t>> all_;
    size_t left_ = 0, used_ = 0;
};

struct Matrix : Tiles {
    Matrix() : Tiles{F32, 0, 0, 0, nullptr} {}
    int tiles() const { return (rows + kTile - 1) / kTile; }
    int bands() const { return (tiles() + kBand - 1) / kBand; }
    int blocks() const { return cols / kBlock; }
    size_t bytes() const { return band_bytes * bands(); }

    // Pack rows that are stored one after the other in a format, in the order given (or as they
    // are); returns false if the columns do not fill blocks.
    bool pack(Format format, const uint8_t* stored, int rows, int cols, const int* order, Slabs&);
    // Pack some rows of another matrix.
    void pack_rows(const Matrix& from, const int64_t* rows, int count, Slabs&);
    // Write one row as floats, exactly as stored.
    void row(int index, float* out) const;

private:
    void stored_row(int index, uint8_t* out) const;  // as it was packed
    // Call `copy(packed, place in the stored row, bytes)` for what neighbours in both forms of a row.
    template <class Copy>
    void each_part(int index, Copy copy) const;
};

size_t stored_row_bytes(Format format, int cols);
float half_to_float(uint16_t half);

}  // namespace deepenough
