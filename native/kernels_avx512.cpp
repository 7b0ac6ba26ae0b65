#define DE_AVX512
#include "kernels.inc"

namespace deepenough {
const Kernels kAvx512{"avx512", quantise, products, rms_norm, largest, silu_times, attend};
}  // namespace deepenough
