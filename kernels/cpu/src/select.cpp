// Selection of the tokens that a query attends to (DeepSeek Sparse Attention, arXiv 2512.02556).
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "runtime.h"

namespace quire {
namespace {

constexpr int64_t kHeads = 8;  // heads whose sums are in registers

// scores[j] = sum over heads of factor * relu(scale * query . key j), for the keys [first,
// first + n). A product is one chain of additions along the head, and heads are added in order: a
// score depends on nothing else.
void score_keys(const SelectTokens& s, int64_t row, int64_t first, int n, float* scores) {
  const float *queries = s.queries + row * s.heads * s.size, *factors = s.factors + row * s.heads;
  vf sum = vset(0.0f);
  for (int64_t h = 0; h < s.heads; h += kHeads) {
    const int64_t heads = std::min(kHeads, s.heads - h);
    vf products[kHeads];
    for (int64_t i = 0; i < kHeads; i++) products[i] = vset(0.0f);
    for (int64_t d = 0; d < s.size; d++) {
      const vf key = vload_some(s.keys + d * s.num_keys + first, n);
      const float* query = queries + h * s.size + d;
      for (int64_t i = 0; i < heads; i++)
        products[i] = vfma(vset(query[i * s.size]), key, products[i]);
    }
    for (int64_t i = 0; i < heads; i++)
      sum = vfma(vset(factors[h + i]), vmax(vset(0.0f), products[i] * vset(s.scale)), sum);
  }
  vstore_some(scores + first, sum, n);
}

void select(const SelectTokens& s, int64_t row, float* scores, int64_t* order) {
  const int64_t visible = s.visible[row];
  for_lanes(visible, [&](int64_t first, int n) { score_keys(s, row, first, n, scores); });
  for (int64_t j = 0; j < visible; j++)
    if (std::isnan(scores[j])) scores[j] = -INFINITY;
  std::iota(order, order + visible, 0);
  std::nth_element(order, order + s.top_k - 1, order + visible, [&](int64_t a, int64_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  });
  std::sort(order, order + s.top_k);
  std::copy(order, order + s.top_k, s.out + row * s.top_k);
}

int select_tokens(const SelectTokens& s, int threads) {
  for (int64_t row = 0; row < s.rows; row++)
    if (s.visible[row] < s.top_k || s.visible[row] > s.num_keys) return kBadRow;
  float* scores;
  int64_t* order;
  const int team = worth(threads, s.rows * s.heads * s.size * s.num_keys, 65536);
  Layout layout;
  layout.add(&scores, team * s.num_keys);
  layout.add(&order, team * s.num_keys);
  layout.take(Scratch::kStates);
  deal(team, s.rows, [&](int64_t row, int slot) {
    select(s, row, scores + slot * s.num_keys, order + slot * s.num_keys);
  });
  return kOk;
}

}  // namespace
}  // namespace quire

extern "C" int quire_select_tokens(const SelectTokens* s, int threads) {
  return guarded([&] { return select_tokens(*s, threads); });
}
