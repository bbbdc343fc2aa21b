// Attention's register-blocked product: C [rows, NR] = A [rows, k] * B [k, NR], where k counts
// units of 32 bits. The products' format defines the contents and the product of units.
#pragma once

#include <utility>

#include "vec.h"

namespace quire {

// float32 products and sums.
struct Floats {
  using Value = float;
  static constexpr int kValues = 1;  // in a unit
  QUIRE_INLINE static vf join(vf only, vf) { return only; }
  QUIRE_INLINE static vf add(vf sum, vf a, vf b) { return vfma(a, b, sum); }
};

#ifdef QUIRE_BF16_DOT
// bfloat16 products, float32 sums.
struct Pairs {
  using Value = bf16;
  static constexpr int kValues = 2;
  // A unit of two values that are exact in bf16.
  QUIRE_INLINE static vf join(vf first, vf second) { return vpair(first, second); }
  QUIRE_INLINE static vf add(vf sum, vf a, vf b) {
    add_pairs(sum, _mm512_castps_si512(a), _mm512_castps_si512(b));
    return sum;
  }
};
#endif

template <class F>
constexpr int64_t units_of(int64_t values) {
  return (values + F::kValues - 1) / F::kValues;
}

// As many rows as leave registers for B and for A's broadcast.
constexpr int MR = W == 16 ? 14 : W == 8 ? 6 : 4;

// A's rows are stored in blocks of kDepth units. The distance between rows is one cache line more,
// so that the rows of a block fall into different sets of the L1 cache and each address is a
// constant offset.
constexpr int kDepth = 128;
constexpr int LDA = kDepth + 16;

// `a_block`: from a block of A to the next one. With `old_by` computes C = old_by[row] * C +
// new_by[row] * A B instead.
using Micro = void (*)(const float* a, int64_t a_block, const float* b, int64_t k, float* c,
                       int64_t ldc, const float* old_by, const float* new_by);

template <class F, int ROWS>
void micro(const float* a, int64_t a_block, const float* b, int64_t k, float* c, int64_t ldc,
           const float* old_by, const float* new_by) {
  vf acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = vset(0.0f);
  for (; k > 0; k -= kDepth, a += a_block) {
    const float* row = a;
    for (int64_t i = std::min<int64_t>(k, kDepth); i > 0; i--, row++, b += NR) {
      const vf b0 = vload(b), b1 = vload(b + W);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const vf x = vset(row[r * LDA]);
        acc[r][0] = F::add(acc[r][0], x, b0);
        acc[r][1] = F::add(acc[r][1], x, b1);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    float* to = c + r * ldc;
    if (old_by) {
      const vf old_factor = vset(old_by[r]), new_factor = vset(new_by[r]);
      acc[r][0] = vfma(acc[r][0], new_factor, vload(to) * old_factor);
      acc[r][1] = vfma(acc[r][1], new_factor, vload(to + W) * old_factor);
    }
    vstore(to, acc[r][0]);
    vstore(to + W, acc[r][1]);
  }
}

template <class F, size_t... I>
Micro micro_for(int64_t rows, std::index_sequence<I...>) {
  static constexpr Micro table[] = {micro<F, I + 1>...};
  return table[rows - 1];
}
// For up to MR rows.
template <class F>
Micro micro_for(int64_t rows) {
  return micro_for<F>(rows, std::make_index_sequence<MR>{});
}

}  // namespace quire
