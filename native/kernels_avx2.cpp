#define DE_AVX2
#include "kernels.inc"

namespace deepenough {
const Kernels kAvx2{"avx2", quantise, products, rms_norm, largest, silu_times, attend};
}  // namespace deepenough
