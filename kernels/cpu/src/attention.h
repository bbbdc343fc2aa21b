// Paged attention: what one call works on, and the two kernels that share it.
//
// Both kernels, one for a decoding query and one for tiles of a prompt's, give a query's result with
// the same bits, whatever is computed beside it, for both follow one order. KV is cut into tiles at
// multiples of kTile from the sequence's start. In a tile
//   - a score is one chain of fused additions along the head;
//   - weights are e^(score - the tile's maximum), summed in the lanes of a vector, lane i the tokens
//     i, i + W, ... of the tile, and then the lanes;
//   - the weighted sum of values is one chain along the tokens.
// Tiles are merged from the first one on, two at a time: merge_weights() says how.
#pragma once

#include <limits>

#include "runtime.h"

namespace quire {

// Tokens of KV that are weighed together.
constexpr int64_t kTile = 128;
// Tokens of KV, whole tiles of them, that one piece of decode work covers.
constexpr int64_t kChunk = 2 * kTile;

inline bool Sparse::shows(int64_t head, int64_t query, int64_t key) const {
  return query / block - key / block < local || (key / block + head * head_step + 1) % stride == 0;
}
inline bool AttentionArgs::wants(int64_t from, int64_t to) const {
  bool found = num_rows < 0;
  for (int64_t i = 0; i < num_rows && !found; i++) found = rows[i] >= from && rows[i] < to;
  return found;
}
inline int64_t AttentionArgs::group() const { return q_heads / kv_heads; }
inline int64_t AttentionArgs::padded() const { return (head_size + W - 1) / W * W; }
inline int64_t AttentionArgs::queries(int64_t seq) const { return starts[seq + 1] - starts[seq]; }
inline int64_t AttentionArgs::first_seen(int64_t position) const {
  return window > 0 && position >= window ? position - window + 1 : 0;
}
inline int64_t AttentionArgs::row(int64_t seq, int64_t head, int64_t token) const {
  const int64_t block = block_tables[seq * table_stride + token / block_size];
  return (block * kv_heads + head) * block_size + token % block_size;
}

// A piece of work: the queries [from, to) of a sequence under one KV head, or, when it decodes,
// its single query under KV heads [head, head + heads) over the KV tokens [from, to).
struct Item {
  int32_t seq, head, heads;
  bool decodes;
  int64_t from, to;
  int64_t partial;  // decode: where the first head's first one goes, in units of partial_size
  int64_t stride;   // decode: from there to the next head's
};

// A partial result, of a tile: for each head of the group the weighted sum, the maximum, the weight.
inline int64_t partial_size(const AttentionArgs& a) { return a.group() * (a.padded() + 16); }

size_t decode_scratch(const AttentionArgs& a);
// Writes a partial result for each head and tile, the first at `partials`.
void decode_item(const AttentionArgs& a, const Item& item, char* scratch, float* partials);
// Merges the `count` partial results of one sequence and KV head into `out`.
void merge_partials(const AttentionArgs& a, int64_t seq, int64_t head, const float* partials,
                    int64_t count, float* scratch);

size_t prefill_scratch(const AttentionArgs& a);
// Queries of one sequence that a tile holds.
int64_t tile_queries(const AttentionArgs& a);
void prefill_item(const AttentionArgs& a, const Item& item, char* scratch);

// Calls f(T*) with a null pointer of the cache's type.
template <class F>
int with_cache(int dtype, F&& f) {
  if (dtype == kI8) return f(static_cast<int8_t*>(nullptr));
  return with_float(dtype, f);
}

// Hides the keys from position `first` on whose blocks the query at `position` doesn't see.
inline void hide_blocks(const Sparse& sparse, int64_t q_head, float* scores, int64_t first,
                        int64_t count, int64_t position) {
  for (int64_t i = 0; i < count;) {
    const int64_t end = std::min(count, i + sparse.block - (first + i) % sparse.block);
    if (!sparse.shows(q_head, position, first + i)) std::fill(scores + i, scores + end, -INFINITY);
    i = end;
  }
}

// Turns `count` raw scores of one query at `position` into logits in place: soft cap, then ALiBi, then
// what it doesn't see. `first` is the first key's position.
inline void finish_scores(const AttentionArgs& a, int64_t q_head, float* scores, int64_t count,
                          int64_t first, int64_t position) {
  if (a.sparse.block) hide_blocks(a.sparse, q_head, scores, first, count, position);
  const int64_t distance = first - position;
  if (a.soft_cap <= 0 && !a.alibi) return;
  const float slope = a.alibi ? a.alibi[q_head] : 0.0f;
  for_lanes(count, [&](int64_t i, int n) {
    vf x = vload_some(scores + i, n);
    if (a.soft_cap > 0) x = vset(a.soft_cap) * vtanh(x * vset(1.0f / a.soft_cap));
    if (a.alibi) {
      float ramp[W];
      for (int j = 0; j < W; j++) ramp[j] = slope * static_cast<float>(distance + i + j);
      x = x + vload(ramp);
    }
    vstore_some(scores + i, x, n);
  });
}

// The maximum of what has seen nothing: -infinity less itself would be NaN.
constexpr float kNoTop = -std::numeric_limits<float>::max();

// The columns [low, high) of a tile, not none of them, as whole vectors from the tile's first one on.
struct Lanes {
  int64_t low, high;
  int64_t from() const { return low / W * W; }
  int64_t to() const { return (high + W - 1) / W * W; }
};

// The logits `seen` of a tile -> e^(logit - their maximum), and 0 up to whole vectors. Gives the
// maximum and the weights' sum.
inline void weigh_tile(float* row, const Lanes& seen, float* top, float* weight) {
  const int64_t from = seen.from(), to = seen.to();
  const vf none = vset(-INFINITY);
  if (from < seen.low) std::fill(row + from, row + seen.low, -INFINITY);
  if (to > seen.high) {
    vstore(row + to - W, vfill(vload(row + to - W), static_cast<int>(seen.high % W), -INFINITY));
  }
  vf most = none, other = none;
  int64_t i = from;
  for (; i + 2 * W <= to; i += 2 * W) {
    most = vmax(most, vload(row + i));
    other = vmax(other, vload(row + i + W));
  }
  if (i < to) most = vmax(most, vload(row + i));
  *top = vmaximum(vmax(most, other));
  if (*top == -INFINITY) *top = kNoTop;  // nothing of the tile is seen
  vf sum = vset(0.0f);
  const vf shift = vset(*top);
  for (i = from; i < to; i += W) {
    const vf x = vexp(vload(row + i) - shift);
    vstore(row + i, x);
    sum = sum + x;
  }
  *weight = vsum(sum);
}

// row <- row * scales in the vectors of `seen`: what makes int8 keys or values whole.
inline void scale_tile(float* row, const Lanes& seen, const float* scales) {
  for (int64_t i = seen.from(); i < seen.to(); i += W) {
    vstore(row + i, vload(row + i) * vload(scales + i));
  }
}

// W merges, of sums so far and a tile's: what the old and the tile's sum of values are multiplied by
// before they are added, the latter in a fused addition.
QUIRE_INLINE void merge_factors(vf top, vf tile_top, vf* old_by, vf* new_by) {
  const vf most = vmax(top, tile_top);
  *old_by = vexp(top - most);
  *new_by = vexp(tile_top - most);
}
QUIRE_INLINE vf merge_weights(vf weight, vf old_by, vf tile_weight, vf new_by) {
  return vfma(weight, old_by, tile_weight * new_by);
}

// What the sum of values of query head `head` is multiplied by in the end.
inline float inverse_weight(const AttentionArgs& a, int64_t head, float top, float weight) {
  if (!a.sinks) return 1.0f / weight;
  const float most = std::max(top, a.sinks[head]), decay = std::exp(top - most);
  return decay / (weight * decay + std::exp(a.sinks[head] - most));
}

}  // namespace quire
