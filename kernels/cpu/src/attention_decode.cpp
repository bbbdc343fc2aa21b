// One query of one sequence over a chunk of its KV, under one or more KV heads, all the query heads
// of each together.
//
// Two passes over the chunk: scores, then the weighted sum of values. The cache is read where it
// lies and in the order in which it lies, block by block and head by head within a block, while what
// comes some way later is being fetched. Keys are turned in registers, so that a lane is a token and
// a score one chain along the head, as in tiles of queries; up to four query heads share them.
#include <utility>

#include "attention.h"

namespace quire {
namespace {

constexpr int kHeads = 4;  // query heads in registers at a time
constexpr int64_t kBytesAhead = 8192;

// A run of tokens that lie in one block and tile, under the item's first head. Those of the next
// head begin `block_size` rows later.
struct Span {
  int64_t row;    // of its first token in the caches
  int64_t count;  // tokens
  int64_t at;     // its first token's place in the chunk's tiles
};

// An item's tokens, as they lie in the caches, and what of them to fetch when.
class Spans {
 public:
  // `room` for the spans, and for W keys.
  Spans(const AttentionArgs& a, const Item& item, Span* room, float* copy)
      : spans_(room), copy_(copy), heads_(item.heads) {
    row_bytes_ = a.head_size * static_cast<int64_t>(size_of(a.cache_dtype));
    head_bytes_ = a.block_size * row_bytes_;
    ahead_ = std::max<int64_t>(1, kBytesAhead / head_bytes_);
    keys_ = static_cast<const char*>(a.key_cache);
    values_ = static_cast<const char*>(a.value_cache);
    end_ = keys_ + a.num_blocks * a.kv_heads * head_bytes_;
    const int32_t* table = a.block_tables + item.seq * a.table_stride;
    const int64_t low = item.from / kTile * kTile;
    for (int64_t token = item.from; token < item.to;) {
      const int64_t block = table[token / a.block_size], offset = token % a.block_size;
      const int64_t row = (block * a.kv_heads + item.head) * a.block_size + offset;
      const int64_t whole = std::min(a.block_size - offset, kTile - token % kTile);
      const int64_t count = std::min(whole, item.to - token);
      spans_[count_++] = Span{row, count, token - low};
      token += count;
    }
  }
  int64_t count() const { return count_; }
  const Span& operator[](int64_t i) const { return spans_[i]; }
  const char* keys(int64_t i, int64_t head) const { return at(keys_, i, head); }
  const char* values(int64_t i, int64_t head) const { return at(values_, i, head); }

  // Fetches what nothing is read beside.
  void begin() const {
    for (int64_t i = 0; i < std::min(ahead_, count_ * heads_); i++) {
      fetch(at(keys_, i / heads_, i % heads_), 0, spans_[i / heads_].count);
    }
  }
  // Where to fetch from while a head's part of span i of the keys (or of the values) is read; or null.
  const char* beside(int64_t i, int64_t head, bool values) const {
    int64_t later = i, of = head + ahead_;
    for (; of >= heads_; of -= heads_) later++;
    if (later < count_) return at(values ? values_ : keys_, later, of);
    later -= count_;
    return values || later >= count_ ? nullptr : at(values_, later, of);
  }
  // `keys`, or a copy of `count` of its values where `wanted` would lead beyond the cache.
  template <class T>
  const T* whole_run(const T* keys, int64_t count, int64_t wanted) const {
    if (reinterpret_cast<const char*>(keys + wanted) <= end_) return keys;
    std::memcpy(copy_, keys, count * sizeof(T));
    return reinterpret_cast<const T*>(copy_);
  }
  // Fetches the tokens [from, from + count) at p.
  QUIRE_INLINE void fetch(const char* p, int64_t from, int64_t count) const {
    if (!p) return;
    p += from * row_bytes_;
    for (int64_t i = 0; i < count * row_bytes_; i += 64) __builtin_prefetch(p + i);
  }

 private:
  const char* at(const char* cache, int64_t i, int64_t head) const {
    return cache + spans_[i].row * row_bytes_ + head * head_bytes_;
  }

  Span* spans_;
  float* copy_;
  int64_t count_ = 0, heads_, row_bytes_, head_bytes_, ahead_;
  const char *keys_, *values_, *end_;  // end_: of the keys
};

// Values of a key that lie in 32 bits, a unit: what is turned as one.
template <class T>
constexpr int kUnitValues = 4 / sizeof(T);

// acc[h] = the chain of q[h]'s values times those of `unit`'s lanes.
template <class T, int HEADS, int... I>
QUIRE_INLINE void add_unit(const float* q, int64_t q_ld, vf unit, vf (&acc)[HEADS],
                           std::integer_sequence<int, I...>) {
  const auto add = [&](int i, vf key) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) acc[h] = vfma(vset(q[h * q_ld + i]), key, acc[h]);
  };
  (add(I, vunit<T, I>(unit)), ...);
}

// scores[h][t] = q[h] . k[t] for HEADS heads and `count` tokens, W at most; of W keys all is read.
template <class T, int HEADS>
QUIRE_INLINE void score_run(const float* q, int64_t q_ld, const T* k, int64_t size, int count,
                            float* scores) {
  constexpr int64_t kStep = 4 * kUnitValues<T>;
  vf acc[HEADS];
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; h++) acc[h] = vset(0.0f);
  int64_t d = 0;
  for (; d + kStep <= size; d += kStep) {
    vf units[4];
    vload_turned(k + d, size, units);
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++) {
      add_unit<T, HEADS>(q + d + u * kUnitValues<T>, q_ld, units[u], acc,
                         std::make_integer_sequence<int, kUnitValues<T>>{});
    }
  }
  for (; d < size; d++) {
    float key[W];
    for (int i = 0; i < W; i++) key[i] = to_float(k[i * size + d]);
    for (int h = 0; h < HEADS; h++) acc[h] = vfma(vset(q[h * q_ld + d]), vload(key), acc[h]);
  }
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; h++) vstore_some(scores + h * kChunk, acc[h], count);
}

// Calls f(first head, std::integral_constant<int, heads>) for up to four heads at a time.
template <class F>
QUIRE_INLINE void over_heads(int64_t group, F&& f) {
  int64_t h = 0;
  for (; group - h > kHeads; h += group - h == kHeads + 1 ? kHeads - 1 : kHeads) {
    if (group - h == kHeads + 1) {
      f(h, std::integral_constant<int, kHeads - 1>{});
    } else {
      f(h, std::integral_constant<int, kHeads>{});
    }
  }
  if (group - h == 4) f(h, std::integral_constant<int, 4>{});
  if (group - h == 3) f(h, std::integral_constant<int, 3>{});
  if (group - h == 2) f(h, std::integral_constant<int, 2>{});
  if (group - h == 1) f(h, std::integral_constant<int, 1>{});
}

// scores[h][t] of one span and KV head.
template <class T, int HEADS>
void score_span(const AttentionArgs& a, const Spans& spans, const char* next, const float* q,
                const char* keys, int64_t count, float* scores) {
  const int64_t ld = a.padded(), size = a.head_size;
  const T* k = reinterpret_cast<const T*>(keys);
  for (int64_t t = 0; t < count; t += W, k += W * size) {
    const int n = static_cast<int>(std::min<int64_t>(W, count - t));
    spans.fetch(next, t, n);
    const T* run = spans.whole_run(k, n * size, W * size);
    score_run<T, HEADS>(q, ld, run, size, n, scores + t);
  }
}

// sums[h][0 .. COLS * W) += sum over the span of weight[h][t] * v[t]; `n` lanes of the last vector.
template <class T, int HEADS, int COLS>
void sum_columns(const AttentionArgs& a, const Spans& spans, const char* next, const T* v,
                 const float* weights, int64_t count, int n, float* sums) {
  const int64_t size = a.head_size, ld = a.padded() + 16;
  vf acc[HEADS][COLS];
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) acc[h][c] = vload(sums + h * ld + c * W);
  for (int64_t t = 0; t < count; t++, v += size) {
    spans.fetch(next, t, 1);
    vf by[HEADS];
#pragma GCC unroll 16
    for (int h = 0; h < HEADS; h++) by[h] = vset(weights[h * kChunk + t]);
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) {
      const vf x = c + 1 < COLS ? vload(v + c * W) : vload_some(v + c * W, n);
#pragma GCC unroll 16
      for (int h = 0; h < HEADS; h++) acc[h][c] = vfma(by[h], x, acc[h][c]);
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) vstore(sums + h * ld + c * W, acc[h][c]);
}

template <class T, int HEADS>
void sum_span(const AttentionArgs& a, const Spans& spans, const char* next, const char* values,
              const float* weights, int64_t count, float* sums) {
  constexpr int kCols = W == 16 ? (HEADS > 2 ? 4 : 8) : HEADS > 3 ? 2 : 4;
  const T* v = reinterpret_cast<const T*>(values);
  const int64_t size = a.head_size;
  int64_t d = 0;
  for (; d + kCols * W <= size; d += kCols * W, next = nullptr)
    sum_columns<T, HEADS, kCols>(a, spans, next, v + d, weights, count, W, sums + d);
  for (; d + kCols / 2 * W <= size; d += kCols / 2 * W, next = nullptr)
    sum_columns<T, HEADS, kCols / 2>(a, spans, next, v + d, weights, count, W, sums + d);
  for (; d < size; d += W, next = nullptr) {
    const int n = static_cast<int>(std::min<int64_t>(W, size - d));
    sum_columns<T, HEADS, 1>(a, spans, next, v + d, weights, count, n, sums + d);
  }
}

// scores[h][t] *= scale of token t: what makes int8 keys or values whole again.
void apply_scales(const AttentionArgs& a, const Item& item, const Spans& spans, const float* scales,
                  float* scores) {
  for (int64_t i = 0; i < spans.count(); i++) {
    const Span& span = spans[i];
    for (int64_t h = 0; h < item.heads * a.group(); h++) {
      const float* of = scales + span.row + h / a.group() * a.block_size;
      float* row = scores + h * kChunk + span.at;
      for_lanes(span.count, [&](int64_t t, int n) {
        vstore_some(row + t, vload_some(row + t, n) * vload_some(of + t, n), n);
      });
    }
  }
}

// Calls f(span, KV head, where to fetch from, first query head, constant number of them); what is
// to be fetched is named once for each span and KV head.
template <class F>
QUIRE_INLINE void over_spans(const AttentionArgs& a, const Item& item, const Spans& spans, bool values,
                             F&& f) {
  const int64_t group = a.group();
  for (int64_t i = 0; i < spans.count(); i++) {
    for (int64_t head = 0; head < item.heads; head++) {
      const char* next = spans.beside(i, head, values);
      over_heads(group, [&](int64_t h, auto heads) {
        f(i, head, h == 0 ? next : nullptr, head * group + h, heads);
      });
    }
  }
}

// The item's queries, scaled, in rows of padded() values.
void load_queries(const AttentionArgs& a, const Item& item, float* q) {
  const int64_t ld = a.padded(), first = item.head * a.group();
  for (int64_t h = 0; h < item.heads * a.group(); h++, q += ld) {
    vstore(q + ld - W, vset(0.0f));
    const int64_t at = a.starts[item.seq] * a.q_stride + (first + h) * a.head_size;
    read_row(q, a.q, at, a.head_size, a.dtype);
    for (int64_t i = 0; i < ld; i += W) vstore(q + i, vload(q + i) * vset(a.scale));
  }
}

// Calls f(tile's number, the columns of it that the query sees) for the item's tiles.
template <class F>
QUIRE_INLINE void over_tiles(const Item& item, F&& f) {
  const int64_t low = item.from / kTile * kTile;
  for (int64_t tile = 0, begin = low; begin < item.to; tile++, begin += kTile) {
    f(tile, Lanes{std::max<int64_t>(0, item.from - begin), std::min(kTile, item.to - begin)});
  }
}

// Scores -> weights, with their maxima and sums in the partial results.
void weigh(const AttentionArgs& a, const Item& item, float* scores, float* partials) {
  const int64_t ld = a.padded(), group = a.group(), low = item.from / kTile * kTile;
  const int64_t position = a.seq_lens[item.seq] - 1, stride = item.stride * partial_size(a);
  for (int64_t h = 0; h < item.heads * group; h++) {
    float* own = partials + h / group * stride + h % group * (ld + 16);
    over_tiles(item, [&](int64_t tile, const Lanes& seen) {
      float* row = scores + h * kChunk + tile * kTile;
      float* partial = own + tile * partial_size(a);
      finish_scores(a, item.head * group + h, row + seen.low, seen.high - seen.low,
                    low + tile * kTile + seen.low, position);
      weigh_tile(row, seen, partial + ld, partial + ld + 1);
      std::fill(partial, partial + ld, 0.0f);
    });
  }
}

template <class T>
void run(const AttentionArgs& a, const Item& item, const Spans& spans, float* q, float* scores,
         float* partials) {
  const int64_t ld = a.padded(), group = a.group(), stride = item.stride * partial_size(a);
  load_queries(a, item, q);
  spans.begin();
  over_spans(a, item, spans, false,
             [&](int64_t i, int64_t head, const char* next, int64_t h, auto heads) {
               score_span<T, heads>(a, spans, next, q + h * ld, spans.keys(i, head),
                                    spans[i].count, scores + h * kChunk + spans[i].at);
             });
  if (a.key_scales) apply_scales(a, item, spans, a.key_scales, scores);
  weigh(a, item, scores, partials);
  if (a.value_scales) apply_scales(a, item, spans, a.value_scales, scores);
  over_spans(a, item, spans, true,
             [&](int64_t i, int64_t head, const char* next, int64_t h, auto heads) {
               float* partial = partials + spans[i].at / kTile * partial_size(a) + head * stride;
               sum_span<T, heads>(a, spans, next, spans.values(i, head),
                                  scores + h * kChunk + spans[i].at, spans[i].count,
                                  partial + (h - head * group) * (ld + 16));
             });
}

// The partial results, W at most, of one query head: merges them into `sums`, `top` and `weight`.
void merge_some(const float* first, int64_t distance, int64_t count, int64_t ld, float* sums,
                float* top, vf* weight) {
  float before[W] = {}, tops[W] = {}, weights[W] = {}, old_by[W], new_by[W];
  for (int64_t i = 0; i < count; i++) {
    before[i] = *top;
    tops[i] = first[i * distance + ld];
    weights[i] = first[i * distance + ld + 1];
    *top = vmaximum(vmax(vset(*top), vset(tops[i])));
  }
  vf old_factors, new_factors;
  merge_factors(vload(before), vload(tops), &old_factors, &new_factors);
  vstore(old_by, old_factors);
  vstore(new_by, new_factors);
  for (int64_t i = 0; i < count; i++, first += distance) {
    const vf by = vset(old_by[i]), own = vset(new_by[i]);
    *weight = merge_weights(*weight, by, vset(weights[i]), own);
    for (int64_t d = 0; d < ld; d += W)
      vstore(sums + d, vfma(vload(first + d), own, vload(sums + d) * by));
  }
}

}  // namespace

size_t decode_scratch(const AttentionArgs& a) {
  return kChunk * sizeof(Span) + (a.q_heads * (a.padded() + kChunk) + W * a.padded()) * sizeof(float);
}

void decode_item(const AttentionArgs& a, const Item& item, char* scratch, float* partials) {
  float* copy = reinterpret_cast<float*>(scratch + kChunk * sizeof(Span));
  const Spans spans(a, item, reinterpret_cast<Span*>(scratch), copy);
  float* q = copy + W * a.padded();
  float* scores = q + item.heads * a.group() * a.padded();
  with_cache(a.cache_dtype, [&](auto* tag) {
    run<std::remove_pointer_t<decltype(tag)>>(a, item, spans, q, scores, partials);
    return 0;
  });
}

void merge_partials(const AttentionArgs& a, int64_t seq, int64_t head, const float* partials,
                    int64_t count, float* scratch) {
  const int64_t ld = a.padded(), group = a.group(), distance = partial_size(a);
  for (int64_t h = 0; h < group; h++, partials += ld + 16) {
    const int64_t q_head = head * group + h;
    float top = kNoTop;
    vf weight = vset(0.0f);
    std::fill(scratch, scratch + ld, 0.0f);
    for (int64_t i = 0; i < count; i += W) {
      merge_some(partials + i * distance, distance, std::min<int64_t>(W, count - i), ld, scratch,
                 &top, &weight);
    }
    float weights[W];
    vstore(weights, weight);
    const vf inverse = vset(inverse_weight(a, q_head, top, weights[0]));
    for (int64_t i = 0; i < ld; i += W) vstore(scratch + i, vload(scratch + i) * inverse);
    const int64_t at = (a.starts[seq] * a.q_heads + q_head) * a.head_size;
    write_row(a.out, at, scratch, a.head_size, a.dtype);
  }
}

}  // namespace quire
