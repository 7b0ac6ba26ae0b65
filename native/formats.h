// Weight matrices as they are stored, repacked once into tiles of 16 rows, and bands of four tiles.
//
// A tile holds 16 rows side by side, so that a vector register has a row in every lane and no
// product ends in a sum over lanes. The tiles of a band are interleaved, so that memory is read in one
// stream from its beginning to its end.
//
//   F32, F16, BF16   [column][4 tiles][16 rows]
//   Q8_0             [block]{[4 tiles][8 groups][16 rows][4 columns] signed bytes, [4 tiles][16] fp16
//                    scale}
//   Q4_0, Q4_1       [block]{[4 tiles][4 groups][16 rows][4 columns] two nibbles a byte, [4 tiles]{[16]
//                    fp16 scale and, for Q4_1, [16] fp16 minimum}}
//
// A block has 32 columns. Low nibbles of group g hold columns 4g to 4g + 3, high ones 16 more. A
// quantised weight is `scale * q` (Q8_0), `scale * (q - 8)` (Q4_0), `scale * q + minimum` (Q4_1), as
// in GGUF files; of these the bytes are rearranged, never rounded.
//
// Files of several instruction sets include this: it has no function that two of them could share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deepenough {

constexpr int kTile = 16, kBand = 4, kBlock = 32, kDigits = 3;

enum Format : int { F32 = 0, F16 = 1, BF16 = 2, Q8_0 = 3, Q4_0 = 4, Q4_1 = 5, kFormats = 6 };

// Bytes of a tile in a block (of a column, if weights are floats): its weights, then its scales.
static constexpr size_t weight_bytes(Format format) {
    return format == F32 ? 64 : format <= BF16 ? 32 : format == Q8_0 ? 512 : 256;
}
static constexpr size_t scale_bytes(Format format) { return format < Q8_0 ? 0 : format == Q4_1 ? 64 : 32; }
static constexpr size_t record_bytes(Format format) {
    return kBand * (weight_bytes(format) + scale_bytes(format));
}

// A packed matrix; see matrix.h for who owns it.
struct Tiles {
    Format format;
    int rows, cols;
    size_t band_bytes;
    const uint8_t* data;
};

}  // namespace deepenough
