// Paged attention: what one call works on, and the two kernels that share it.
#pragma once

#include "runtime.h"

namespace quire {

// Tokens of KV that one piece of decode work covers. The split is the same whatever the batch and
// the number of threads are, so a sequence's result never depends on its neighbours.
constexpr int64_t kChunk = 256;
// Tokens of KV that a tile of queries meets at a time.
constexpr int64_t kTile = 128;

// kernels/attention/args.py says what each is.
struct AttentionArgs {
  const void* q;
  void* out;         // [tokens, q_heads, head_size], dense
  int64_t q_stride;  // elements from token to token
  int64_t tokens, q_heads, kv_heads, head_size;
  const void *key_cache, *value_cache;     // [num_blocks, kv_heads, block_size, head_size]
  const float *key_scales, *value_scales;  // [num_blocks, kv_heads, block_size], int8 caches only
  int64_t num_blocks, block_size;
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t table_stride;
  const int32_t *seq_lens, *starts;
  int64_t num_seqs;
  const float *alibi, *sinks;  // [q_heads] or null
  int64_t window;              // 0: none
  float scale, soft_cap;       // soft_cap 0: none
  int32_t dtype, cache_dtype;
  const int64_t* rows;  // of the tokens whose results are wanted, in any order
  int64_t num_rows;     // -1: all

  // Whether any token of [from, to) is wanted; the others' results may be left undone.
  bool wants(int64_t from, int64_t to) const {
    bool found = num_rows < 0;
    for (int64_t i = 0; i < num_rows && !found; i++) found = rows[i] >= from && rows[i] < to;
    return found;
  }
  int64_t group() const { return q_heads / kv_heads; }
  int64_t padded() const { return (head_size + W - 1) / W * W; }
  int64_t queries(int64_t seq) const { return starts[seq + 1] - starts[seq]; }
  // The first token that a query at `position` sees.
  int64_t first_seen(int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
  // Index of a token's row of head_size values in either cache.
  int64_t row(int64_t seq, int64_t head, int64_t token) const {
    const int64_t block = block_tables[seq * table_stride + token / block_size];
    return (block * kv_heads + head) * block_size + token % block_size;
  }
};

// A piece of work: the queries [from, to) of a sequence under one KV head, or, when it decodes,
// its single query under KV heads [head, head + heads) over the KV tokens [from, to).
struct Item {
  int32_t seq, head, heads;
  bool decodes;
  int64_t from, to;
  int64_t partial;  // decode: where the first head's partial result goes, in units of partial_size
  int64_t stride;   // decode: from there to the next head's
};

// A partial result: for each head of the group the unnormalised sum, the maximum, the weight.
inline int64_t partial_size(const AttentionArgs& a) { return a.group() * (a.padded() + 16); }

size_t decode_scratch(const AttentionArgs& a);
// Writes a partial result for each head, the first at `partials`.
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

// Turns `count` raw scores of one query into logits in place, gives their maximum.
// `distance` is the first key's position less the query's.
inline float finish_scores(const AttentionArgs& a, int64_t q_head, float* scores, int64_t count,
                           int64_t distance) {
  vf top = vset(-INFINITY);
  const float slope = a.alibi ? a.alibi[q_head] : 0.0f;
  for_lanes(count, [&](int64_t i, int n) {
    vf x = vload_some(scores + i, n);
    if (a.soft_cap > 0) x = vset(a.soft_cap) * vtanh(x * vset(1.0f / a.soft_cap));
    if (a.alibi) {
      float ramp[W];
      for (int j = 0; j < W; j++) ramp[j] = slope * static_cast<float>(distance + i + j);
      x = x + vload(ramp);
    }
    if (a.soft_cap > 0 || a.alibi) vstore_some(scores + i, x, n);
    top = vmax(top, n == W ? x : vfill(x, n, -INFINITY));
  });
  return vmaximum(top);
}

// scores <- e^(scores - top); gives their sum.
inline float weigh_scores(float* scores, int64_t count, float top) {
  vf sum = vset(0.0f);
  const vf shift = vset(top);
  for_lanes(count, [&](int64_t i, int n) {
    const vf x = vexp(vload_some(scores + i, n) - shift);
    vstore_some(scores + i, x, n);
    sum = sum + (n == W ? x : vfill(x, n, 0.0f));
  });
  return vsum(sum);
}

}  // namespace quire
