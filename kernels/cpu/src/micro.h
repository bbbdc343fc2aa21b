// The register-blocked float32 product of attention: C [rows, NR] (+)= A [rows, k] * B [k, NR].
#pragma once

#include <utility>

#include "vec.h"

namespace quire {

// As many rows as leave registers for B and for A's broadcast.
constexpr int MR = W == 16 ? 14 : W == 8 ? 6 : 4;

// Row-major A has a fixed distance between rows: 128 values and a cache line, so that the rows of
// one tile fall into different sets of the L1 cache and each address is a constant offset.
constexpr int kDepth = 128;
constexpr int LDA = kDepth + 16;

// What becomes of C's old values: not read, kept in the sum, or merged with a sum of its own:
// C = old_by[row] * C + new_by[row] * A B.
enum class Old { kDrop, kKeep, kMerge };

using Micro = void (*)(const float* a, const float* b, int64_t k, float* c, int64_t ldc, Old old,
                       const float* old_by, const float* new_by);

template <int ROWS>
void micro_f32(const float* a, const float* b, int64_t k, float* c, int64_t ldc, Old old,
               const float* old_by, const float* new_by) {
  vf acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    const bool kept = old == Old::kKeep;
    acc[r][0] = kept ? vload(c + r * ldc) : vset(0.0f);
    acc[r][1] = kept ? vload(c + r * ldc + W) : vset(0.0f);
  }
  for (int64_t i = 0; i < k; i++, a++, b += NR) {
    const vf b0 = vload(b), b1 = vload(b + W);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const vf x = vset(a[r * LDA]);
      acc[r][0] = vfma(x, b0, acc[r][0]);
      acc[r][1] = vfma(x, b1, acc[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    float* to = c + r * ldc;
    if (old == Old::kMerge) {
      const vf by = vset(old_by[r]), own = vset(new_by[r]);
      acc[r][0] = vfma(acc[r][0], own, vload(to) * by);
      acc[r][1] = vfma(acc[r][1], own, vload(to + W) * by);
    }
    vstore(to, acc[r][0]);
    vstore(to + W, acc[r][1]);
  }
}

template <size_t... I>
constexpr Micro micro_of(int rows, std::index_sequence<I...>) {
  constexpr Micro table[] = {micro_f32<I + 1>...};
  return table[rows - 1];
}

inline Micro micro_f32_for(int rows) { return micro_of(rows, std::make_index_sequence<MR>{}); }

}  // namespace quire
