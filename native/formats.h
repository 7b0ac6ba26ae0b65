// Weight matrices as they are stored, repacked once into tiles of 16 rows.
//
// A tile holds 16 rows side by side, so that a vector register has a row in every lane and no
// product ends in a sum over lanes.
//
//   F32, F16, BF16   [column][16 rows]
//   Q8_0             [block][8 groups][16 rows][4 columns] signed bytes, then [block][16] fp16 scale
//   Q4_0, Q4_1       [block][4 groups][16 rows][4 columns] two nibbles a byte, then [block][16] fp16
//                    scale and, for Q4_1, [block][16] fp16 minimum
//
// A block has 32 columns. Low nibbles of group g hold columns 4g to 4g + 3, high ones 16 more. A
// quantised weight is `scale * q` (Q8_0), `scale * (q - 8)` (Q4_0), `scale * q + minimum` (Q4_1), as
// in GGUF files; of these the bytes are rearranged, never rounded.
//
// Files of several instruction sets include this: it has data alone, no function that two of them
// could share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deepenough {

constexpr int kTile = 16, kBlock = 32, kDigits = 3;

enum Format : int { F32 = 0, F16 = 1, BF16 = 2, Q8_0 = 3, Q4_0 = 4, Q4_1 = 5, kFormats = 6 };

// A packed matrix; see matrix.h for who owns it.
struct Tiles {
    Format format;
    int rows, cols;
    size_t tile_bytes;
    const uint8_t* data;
};

}  // namespace deepenough
