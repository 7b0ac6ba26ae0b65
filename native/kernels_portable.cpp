#include "kernels.inc"

namespace deepenough {
const Kernels kPortable{"portable", quantise, products, rms_norm, silu_times, attend};
}  // namespace deepenough
