#define DE_AVX512
#define DE_VNNI
#include "kernels.inc"

namespace deepenough {
const Kernels kAvx512Vnni{"avx512vnni", quantise, products, rms_norm, largest, silu_times, attend};
}  // namespace deepenough
