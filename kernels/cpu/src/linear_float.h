// The microkernel for floating-point weights; a format defines one step.
#pragma once

#include <algorithm>
#include <utility>

#include "linear.h"

namespace quire {

constexpr int kFloatTile = W == 16 ? 14 : W == 8 ? 6 : 4;

template <class F, int ROWS>
void float_micro(const MicroCall& call) {
  vf acc[ROWS][2];
  load_sums(call, acc);
  const char *b = call.b, *ahead = call.ahead;
  const int64_t ahead_step = call.ahead_step;
  const uint32_t* block = call.a;
  for (int64_t left = call.steps; left > 0; left -= call.block_steps) {
    const int64_t steps = left < call.block_steps ? left : call.block_steps;
    const uint32_t* a = block;
    for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 4
      for (int line = 0; line < F::kStepBytes; line += 64) __builtin_prefetch(ahead + line);
      F::template step<ROWS>(acc, a, b);
      a += F::kStepUnits;
      b += F::kStepBytes;
      ahead += ahead_step;
    }
    block += call.block_stride;
  }
  store_sums(call, acc);
}

// acc[r] += x[r] * b for one k; the `unit` of each row is x as a float.
template <int ROWS>
QUIRE_INLINE void add_products(vf (&acc)[ROWS][2], const uint32_t* a, int unit, vf b0, vf b1) {
  const float* x = reinterpret_cast<const float*>(a) + unit;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    const vf by = vset(x[r * kRowUnits]);
    acc[r][0] = vfma(by, b0, acc[r][0]);
    acc[r][1] = vfma(by, b1, acc[r][1]);
  }
}

// x as floats, one per unit, and zeros up to the last step.
inline void load_floats(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t units,
                        int dtype) {
  float* row = reinterpret_cast<float*>(to);
  read_row(row, x, offset, count, dtype);
  for (int64_t i = count; i < units; i++) row[i] = 0.0f;
}

// Weights as floats, UNITS k per step.
template <int UNITS>
struct Floats {
  static constexpr int kStepUnits = UNITS;
  static constexpr int kStepBytes = UNITS * NR * 4;

  template <int ROWS>
  QUIRE_INLINE static void step(vf (&acc)[ROWS][2], const uint32_t* a, const char* b) {
    const float* values = reinterpret_cast<const float*>(b);
#pragma GCC unroll 2
    for (int unit = 0; unit < UNITS; unit++, values += NR)
      add_products(acc, a, unit, vload(values), vload(values + W));
  }
  static void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps,
                       int dtype, int64_t) {
    load_floats(to, x, offset, count, UNITS * steps, dtype);
  }
};

template <class F, size_t... I>
Kernel float_kernel(std::index_sequence<I...>) {
  return Kernel{kFloatTile, F::kStepUnits, {float_micro<F, I + 1>...}, F::load_row};
}
template <class F>
Kernel float_kernel() {
  return float_kernel<F>(std::make_index_sequence<kFloatTile>{});
}

// The kernel for 16-bit weights F. Several tiles of rows share weights that were widened once; their
// sums are those of one tile to the bit.
template <class F>
Kernel widened_kernel() {
  Kernel kernel = float_kernel<F>();
  const Kernel wide = float_kernel<Floats<F::kStepUnits>>();
  std::copy(wide.micro, wide.micro + kFloatTile, kernel.widened);
  kernel.widen = F::widen;
  kernel.wide_bytes = F::kStepUnits * NR * 4;
  return kernel;
}

}  // namespace quire
