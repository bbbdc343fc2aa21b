#include "linear_float.h"

namespace quire {

Kernel kernel_f32() { return float_kernel<Floats<1>>(); }

}  // namespace quire
