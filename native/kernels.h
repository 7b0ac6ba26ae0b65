// The arithmetic of a pass, once for every instruction set.
//
// Products come in two arithmetics. `exact`: every block of 32 activations becomes 24-bit fixed point
// with a scale of its own, split into three signed 8-bit digits; products with stored integer weights
// are summed as integers, without rounding, and scaled once a block. `fp32`: stored weights become
// floats, exactly, and are multiplied and added in fp32. Weights stored as floats know only the latter.
#pragma once

#include "formats.h"

namespace deepenough {

// Rows of activations that a matrix is multiplied with.
struct Rows {
    int count, cols;
    const float* values;  // [count][cols]
    int8_t* digits;       // [count][block][digit][32], lowest first
    int32_t* sums;        // [count][block][digit], of the digits
    float* scales;        // [count][block]
    float* totals;        // [count][block], sum of the block's activations as rounded
};

// Queries that attend to the positions `begin` to `end` of one key-value head of one sequence.
// Keys lie as [position / 16][width][16 positions], values as [position][width].
struct Attention {
    int queries, width, begin, end;
    float scale;
    const float* query;  // [queries][width]
    const int* limits;   // [queries], first position that the query does not see
    const void *keys, *values;
    bool bf16;           // of keys and values
    float* scores;       // [4][kChunk], scratch
    // What the queries have found so far: largest score, sum of exp(score - largest), and the sum of
    // the values weighted with these. To begin with: -infinity, 0, 0.
    float *largest, *sum, *mixed;
};
constexpr int kChunk = 256;  // positions that are scored at once

struct Kernels {
    const char* name;
    void (*quantise)(const float* values, int cols, int8_t* digits, int32_t* sums, float* scales,
                     float* totals);
    // out[row * stride + 16 * (tile - first) + lane] (+)= product, for tiles `first` to `last`
    void (*products)(const Tiles&, bool exact, int first, int last, const Rows&, float* out,
                     size_t stride, bool add);
    void (*rms_norm)(const float* values, const float* weight, int count, float eps, float* out);
    float (*largest)(const float* values, int count);
    void (*silu_times)(const float* gate, const float* up, int count, float* out);
    void (*attend)(const Attention&);
};

extern const Kernels kPortable;
#ifdef __x86_64__
extern const Kernels kAvx2, kAvx512, kAvx512Vnni;
#endif

}  // namespace deepenough
