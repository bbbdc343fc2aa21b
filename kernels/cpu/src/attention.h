// Paged attention: the arguments of a call, and its two kernels.
//
// One kernel computes a decoding query, the other tiles of a prompt's queries. Both give a query's
// result with the same bits, whatever else is computed, because both use the same order of
// operations. KV is divided into tiles at multiples of kTile from the sequence's start. In a tile
//   - a score is one chain of fused additions along the head;
//   - weights are e^(score - the tile's maximum), summed per lane of a vector, where lane i has the
//     tokens i, i + W, ... of the tile, and then over the lanes;
//   - the weighted sum of values is one chain along the tokens.
// Tiles are merged in order, two at a time: see merge_weights().
//
// Products are float32, or pairs of bfloat16 that are summed in float32 (see in_pairs()). A pair
// has two values of a head, or the tokens at an even position and the next one. Weights are rounded
// after they are summed; a token of a pair that isn't seen has weight 0, and its values are
// replaced by zeros.
#pragma once

#include <limits>

#include "micro.h"
#include "ranks.h"
#include "runtime.h"

namespace quire {

// Tokens of KV per tile.
constexpr int64_t kTile = 128;
// Tokens of KV, in whole tiles, per item of decode work.
constexpr int64_t kChunk = 2 * kTile;

inline bool Sparse::shows(int64_t head, int64_t query, int64_t key) const {
  return query / block - key / block < local || (key / block + head * head_step + 1) % stride == 0;
}
inline bool AttentionArgs::in_pairs() const {
  const bool exact = cache_dtype == kBF16 || cache_dtype >= kI8;  // representable in bfloat16
  return round_inputs && exact && block_size % 2 == 0;
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
inline int64_t AttentionArgs::table_size() const {
  return ranks ? block_size * static_cast<RankGroup*>(ranks)->size() : block_size;
}
inline bool AttentionArgs::has(int64_t token) const {
  if (!ranks) return true;
  const RankGroup& group = *static_cast<RankGroup*>(ranks);
  return token / block_size % group.size() == group.rank();
}
inline int64_t AttentionArgs::row(int64_t seq, int64_t head, int64_t token) const {
  const int64_t block = block_tables[seq * table_stride + token / table_size()];
  return (block * kv_heads + head) * block_size + token % block_size;
}

// A work item: the queries [from, to) of a sequence under one KV head, or, for decode, the single
// query under KV heads [head, head + heads) over the KV tokens [from, to).
struct Item {
  int32_t seq, head, heads;
  bool decodes;
  int64_t from, to;
  int64_t partial;  // decode: index of the first tile's partial results
};

// A tile's partial results: for each query head the weighted sum, the maximum, the weight.
inline int64_t head_partial_size(const AttentionArgs& a) { return a.padded() + 16; }
inline int64_t partial_size(const AttentionArgs& a) { return a.q_heads * head_partial_size(a); }

size_t decode_scratch(const AttentionArgs& a);
// Writes partial results for each head and tile. `partials`: those of the first tile.
void decode_item(const AttentionArgs& a, const Item& item, char* scratch, float* partials);
// Merges partial results of `count` tiles for one sequence and KV head into `out`.
void merge_partials(const AttentionArgs& a, int64_t seq, int64_t head, const float* partials,
                    int64_t count, float* scratch);

size_t prefill_scratch(const AttentionArgs& a);
// Number of queries of one sequence in a tile.
int64_t tile_queries(const AttentionArgs& a);
void prefill_item(const AttentionArgs& a, const Item& item, char* scratch);

// Calls f(the products' format, a null pointer of the cache's type).
template <class Fn>
void with_formats(const AttentionArgs& a, Fn&& f) {
  const auto of_bytes = [&](auto format) {
    if (a.cache_dtype == kI8) f(format, static_cast<const int8_t*>(nullptr));
    if (a.cache_dtype == kE4M3) f(format, static_cast<const e4m3*>(nullptr));
    if (a.cache_dtype == kE5M2) f(format, static_cast<const e5m2*>(nullptr));
  };
#ifdef QUIRE_BF16_DOT
  if (a.in_pairs()) {
    if (a.cache_dtype == kBF16) f(Pairs{}, static_cast<const bf16*>(nullptr));
    return of_bytes(Pairs{});
  }
#endif
  if (a.cache_dtype >= kI8) return of_bytes(Floats{});
  with_float(a.cache_dtype, [&](auto* tag) {
    f(Floats{}, tag);
    return 0;
  });
}

// Hides keys, of which the first is at position `first`, in blocks that the query at `position`
// doesn't see.
inline void hide_blocks(const Sparse& sparse, int64_t q_head, float* scores, int64_t first,
                        int64_t count, int64_t position) {
  for (int64_t i = 0; i < count;) {
    const int64_t end = std::min(count, i + sparse.block - (first + i) % sparse.block);
    if (!sparse.shows(q_head, position, first + i)) std::fill(scores + i, scores + end, -INFINITY);
    i = end;
  }
}

// Turns `count` raw scores of one query at `position` into logits in place: hides blocks, then adds
// the distance bias, or applies the soft cap and ALiBi. `first` is the first key's position.
inline void finish_scores(const AttentionArgs& a, int64_t q_head, float* scores, int64_t count,
                          int64_t first, int64_t position) {
  if (a.sparse.block) hide_blocks(a.sparse, q_head, scores, first, count, position);
  const int64_t distance = first - position;
  if (a.distance_bias) {
    const float* bias = a.distance_bias + q_head * a.num_distances;
    for (int64_t i = 0; i < count; i++)
      scores[i] += bias[std::clamp<int64_t>(-distance - i, 0, a.num_distances - 1)];
    return;
  }
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

// The maximum before any key was seen: finite, because -infinity - -infinity is NaN.
constexpr float kNoTop = -std::numeric_limits<float>::max();

// The columns [low, high) of a tile, and the whole vectors that contain them.
struct Lanes {
  int64_t low, high;
  bool empty() const { return low >= high; }
  int64_t from() const { return low / W * W; }
  int64_t to() const { return (high + W - 1) / W * W; }
};

// Turns one query's scores of the keys `seen` of the tile at token `begin` into logits, and sets
// the other keys in their vectors to -infinity. Returns the maximum. `scales`: of the tile's keys,
// or null.
QUIRE_INLINE float finish_tile(const AttentionArgs& a, int64_t q_head, int64_t position,
                               int64_t begin, Lanes seen, const float* scales, float* row) {
  const int64_t from = seen.from(), to = seen.to();
  if (scales) {
    for (int64_t i = from; i < to; i += W) vstore(row + i, vload(row + i) * vload(scales + i));
  }
  finish_scores(a, q_head, row + seen.low, seen.high - seen.low, begin + seen.low, position);
  if (from < seen.low) std::fill(row + from, row + seen.low, -INFINITY);
  if (to > seen.high) {
    vstore(row + to - W, vfill(vload(row + to - W), static_cast<int>(seen.high % W), -INFINITY));
  }
  vf tops = vset(-INFINITY), more = tops;
  int64_t i = from;
  for (; i + 2 * W <= to; i += 2 * W) {
    tops = vmax(tops, vload(row + i));
    more = vmax(more, vload(row + i + W));
  }
  if (i < to) tops = vmax(tops, vload(row + i));
  const float top = vmaximum(vmax(tops, more));
  return top == -INFINITY ? kNoTop : top;  // no key of the tile is seen
}

// Turns logits into weights e^(logit - top), times `scales` (of the tile's values, or null), in the
// products' format, and 0 for the other keys in the vectors of `all`. Returns the sum of the
// weights before scaling and rounding.
template <class F>
QUIRE_INLINE float weigh_tile(Lanes seen, Lanes all, float top, const float* scales, float* row) {
  // Pairs fill the row's first half: each vector is read before it is overwritten.
  using Value = typename F::Value;
  Value* weights = reinterpret_cast<Value*>(row);
  vf sum = vset(0.0f);
  for (int64_t i = seen.from(); i < seen.to(); i += W) {
    const vf x = vexp(vload(row + i) - vset(top));
    sum = sum + x;
    vstore(weights + i, scales ? x * vload(scales + i) : x);
  }
  const int64_t before = seen.low - all.from(), after = all.to() - seen.high;
  if (before) std::memset(weights + all.from(), 0, before * sizeof(Value));
  if (after) std::memset(weights + seen.high, 0, after * sizeof(Value));
  return vsum(sum);
}

// W merges of earlier sums with a tile's: the factors of the earlier and of the tile's sum of
// values, the latter for a fused addition.
QUIRE_INLINE void merge_factors(vf top, vf tile_top, vf* old_by, vf* new_by) {
  const vf most = vmax(top, tile_top);
  *old_by = vexp(top - most);
  *new_by = vexp(tile_top - most);
}
QUIRE_INLINE vf merge_weights(vf weight, vf old_by, vf tile_weight, vf new_by) {
  return vfma(weight, old_by, tile_weight * new_by);
}

// The final factor of the sum of values of query head `head`.
inline float inverse_weight(const AttentionArgs& a, int64_t head, float top, float weight) {
  if (!a.sinks) return 1.0f / weight;
  const float most = std::max(top, a.sinks[head]), decay = std::exp(top - most);
  return decay / (weight * decay + std::exp(a.sinks[head] - most));
}

}  // namespace quire
