// bf16 weights, in pairs along k: widened to float32, or multiplied directly if the CPU can and x
// is bf16, too, or may be rounded to it.
#include "linear_float.h"

namespace quire {
namespace {

struct Widened {
  static constexpr int kStepUnits = 2;
  static constexpr int kStepBytes = NR * 4;

  template <int ROWS>
  QUIRE_INLINE static void step(vf (&acc)[ROWS][2], const uint32_t* a, const char* b) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(b);
    add_products(acc, a, 0, vload_even(pairs), vload_even(pairs + W));
    // Loaded again from L1: in registers, the pairs would displace sums.
    asm volatile("" ::: "memory");
    add_products(acc, a, 1, vload_odd(pairs), vload_odd(pairs + W));
  }
  static void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps,
                       int dtype, int64_t) {
    load_floats(to, x, offset, count, 2 * steps, dtype);
  }
  static void widen(float* to, const char* b, int64_t steps, int64_t, const uint8_t*) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(b);
    for (int64_t i = 0; i < steps; i++, pairs += NR, to += 2 * NR) {
      for (int j = 0; j < NR; j += W) {
        vstore(to + j, vload_even(pairs + j));
        vstore(to + NR + j, vload_odd(pairs + j));
      }
    }
  }
};

#ifdef QUIRE_BF16_DOT
struct Paired {
  static constexpr int kStepUnits = 1;
  static constexpr int kStepBytes = NR * 4;

  template <int ROWS>
  QUIRE_INLINE static void step(vf (&acc)[ROWS][2], const uint32_t* a, const char* b) {
    const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const __m512i x = _mm512_set1_epi32(int(a[r * kRowUnits]));
      add_pairs(acc[r][0], x, b0);
      add_pairs(acc[r][1], x, b1);
    }
  }
  static void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps,
                       int dtype, int64_t) {
    bf16* pairs = reinterpret_cast<bf16*>(to);
    to[steps - 1] = 0;
    if (dtype == kBF16) {
      std::memcpy(pairs, static_cast<const bf16*>(x) + offset, count * sizeof(bf16));
      return;
    }
    float values[2 * kBlockUnits];
    read_row(values, x, offset, count, dtype);
    write_row(pairs, 0, values, count, kBF16);
  }
};
#endif

}  // namespace

Kernel kernel_bf16(bool pairs) {
#ifdef QUIRE_BF16_DOT
  if (pairs) return float_kernel<Paired>();
#endif
  (void)pairs;
  return widened_kernel<Widened>();
}

}  // namespace quire
