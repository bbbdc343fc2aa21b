#include "linear_float.h"

namespace quire {
namespace {

struct Weights {
  static constexpr int kStepUnits = 1;
  static constexpr int kStepBytes = NR * 2;

  template <int ROWS>
  QUIRE_INLINE static void step(vf (&acc)[ROWS][2], const uint32_t* a, const char* b) {
    const f16* values = reinterpret_cast<const f16*>(b);
    add_products(acc, a, 0, vload(values), vload(values + W));
  }
  static void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps,
                       int dtype, int64_t) {
    load_floats(to, x, offset, count, steps, dtype);
  }
  static void widen(float* to, const char* b, int64_t steps, int64_t, const uint8_t*) {
    const f16* values = reinterpret_cast<const f16*>(b);
    for (int64_t i = 0; i < steps * NR; i += W) vstore(to + i, vload(values + i));
  }
};

}  // namespace

Kernel kernel_f16() { return widened_kernel<Weights>(); }

}  // namespace quire
