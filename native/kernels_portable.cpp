#include "kernels.inc"

namespace deepenough {
const Kernels kPortable{"portable", quantise, products, rms_norm, largest, silu_times, attend};
}  // namespace deepenough
