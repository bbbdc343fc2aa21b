// One query of one sequence over a chunk of its KV, under one or more KV heads, with all query
// heads of each.
//
// There are two passes over the chunk: scores, then the weighted sum of values. The cache is read
// in its own order, block by block and head by head within a block, while later parts are
// prefetched. Keys are transposed in registers, so that each lane is a token and a score is one
// chain along the head, as in tiles of queries; up to four query heads share them.
#include <utility>

#include "attention.h"

namespace quire {
namespace {

constexpr int kHeads = 4;  // query heads in registers at a time
constexpr int64_t kBytesAhead = 8192;

// A run of tokens within one block and tile, under the item's first head. Those of the next head
// begin `block_size` rows later.
struct Span {
  int64_t row;    // index of its first token in the caches
  int64_t count;  // tokens
  int64_t at;     // index of its first token in the chunk's tiles
};

// An item's tokens in the order of the caches, and the schedule of prefetches.
class Spans {
 public:
  // `spans`: memory for them; `copy`: for W keys.
  Spans(const AttentionArgs& a, const Item& item, Span* spans, float* copy)
      : spans_(spans), copy_(copy), heads_(item.heads) {
    row_bytes_ = a.head_size * static_cast<int64_t>(size_of(a.cache_dtype));
    head_bytes_ = a.block_size * row_bytes_;
    ahead_ = std::max<int64_t>(1, kBytesAhead / head_bytes_);
    keys_ = static_cast<const char*>(a.key_cache);
    values_ = static_cast<const char*>(a.value_cache);
    end_ = keys_ + a.num_blocks * a.kv_heads * head_bytes_;
    const int32_t* table = a.block_tables + item.seq * a.table_stride;
    const int64_t low = item.from / kTile * kTile;
    for (int64_t token = item.from; token < item.to;) {
      const int64_t block = table[token / a.table_size()], offset = token % a.block_size;
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

  // Prefetches the first parts, before anything is read.
  void begin() const {
    for (int64_t i = 0; i < std::min(ahead_, count_ * heads_); i++) {
      fetch(at(keys_, i / heads_, i % heads_), 0, spans_[i / heads_].count);
    }
  }
  // The address to prefetch from while a head's part of span i of the keys (or of the values) is
  // read; or null.
  const char* beside(int64_t i, int64_t head, bool values) const {
    int64_t later = i, of = head + ahead_;
    for (; of >= heads_; of -= heads_) later++;
    if (later < count_) return at(values ? values_ : keys_, later, of);
    later -= count_;
    return values || later >= count_ ? nullptr : at(values_, later, of);
  }
  // `keys`, or a copy of `count` of its values if `wanted` would exceed the cache.
  template <class T>
  const T* whole_run(const T* keys, int64_t count, int64_t wanted) const {
    if (reinterpret_cast<const char*>(keys + wanted) <= end_) return keys;
    std::memcpy(copy_, keys, count * sizeof(T));
    return reinterpret_cast<const T*>(copy_);
  }
  // Prefetches the tokens [from, from + count) at p.
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

// Values of a key in 32 bits, which are transposed together.
template <class T>
constexpr int kTurnedValues = 4 / sizeof(T);

// Unit I of the products' format, from 32 bits of each of W keys.
template <class F, class T, int I>
QUIRE_INLINE vf key_unit(vf turned) {
  if constexpr (F::kValues == kTurnedValues<T>) return turned;
  else return F::join(vunit<T, I * F::kValues>(turned), vunit<T, (I + 1) * F::kValues - 1>(turned));
}

// acc[h] += q[h]'s units times 32 bits of each of W keys.
template <class F, class T, int HEADS, int... I>
QUIRE_INLINE void add_turned(const float* q, int64_t q_ld, vf turned, vf (&acc)[HEADS],
                             std::integer_sequence<int, I...>) {
  const auto add = [&](int i, vf key) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) acc[h] = F::add(acc[h], vset(q[h * q_ld + i]), key);
  };
  (add(I, key_unit<F, T, I>(turned)), ...);
}

// Value d of W keys.
template <class T>
QUIRE_INLINE vf gather_value(const T* k, int64_t size, int64_t d) {
  float values[W];
  for (int i = 0; i < W; i++) values[i] = d < size ? to_float(k[i * size + d]) : 0.0f;
  return vload(values);
}

// scores[h][t] = q[h] . k[t] for HEADS heads and `count` tokens, at most W; all W keys are read.
template <class F, class T, int HEADS>
QUIRE_INLINE void score_run(const float* q, int64_t q_ld, const T* k, int64_t size, int count,
                            float* scores) {
  constexpr int kUnits = kTurnedValues<T> / F::kValues;
  vf acc[HEADS];
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; h++) acc[h] = vset(0.0f);
  int64_t d = 0;
  for (; d + 4 * kTurnedValues<T> <= size; d += 4 * kTurnedValues<T>) {
    vf turned[4];
    vload_turned(k + d, size, turned);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      add_turned<F, T, HEADS>(q + d / F::kValues + i * kUnits, q_ld, turned[i], acc,
                              std::make_integer_sequence<int, kUnits>{});
    }
  }
  for (; d < size; d += F::kValues) {
    const vf last = gather_value(k, size, d + F::kValues - 1);
    const vf key = F::join(gather_value(k, size, d), last);
    for (int h = 0; h < HEADS; h++) acc[h] = F::add(acc[h], vset(q[h * q_ld + d / F::kValues]), key);
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
template <class F, class T, int HEADS>
void score_span(const AttentionArgs& a, const Spans& spans, const char* next, const float* q,
                const char* keys, int64_t count, float* scores) {
  const int64_t ld = a.padded(), size = a.head_size;
  const T* k = reinterpret_cast<const T*>(keys);
  for (int64_t t = 0; t < count; t += W, k += W * size) {
    const int n = static_cast<int>(std::min<int64_t>(W, count - t));
    spans.fetch(next, t, n);
    const T* run = spans.whole_run(k, n * size, W * size);
    score_run<F, T, HEADS>(q, ld, run, size, n, scores + t);
  }
}

// A span's values and weights under one KV head, and where to prefetch from.
template <class T>
struct Weighted {
  const T* values;       // of the first unit's first token, which may precede the span
  int64_t first, count;  // tokens before the span, and including the span's
  const T* zeros;        // used for tokens outside of the span
  const float* weights;  // units
  const char* next;
};

// sums[h][0 .. COLS * W) += sum over the span of weight[h][t] * v[t], from column d on; `n` lanes
// of the last vector.
template <class F, class T, int HEADS, int COLS>
void sum_columns(const AttentionArgs& a, const Spans& spans, const Weighted<T>& span, int64_t d,
                 int n, float* sums) {
  const int64_t size = a.head_size, ld = a.padded() + 16;
  const float* weights = span.weights;
  vf acc[HEADS][COLS];
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) acc[h][c] = vload(sums + h * ld + d + c * W);
  for (int64_t t = 0; t < span.count; t += F::kValues, weights++) {
    if (d == 0) spans.fetch(span.next, t, F::kValues);
    const int64_t last = t + F::kValues - 1;
    const T* v = span.values + t * size + d;
    const T* v_last = span.values + last * size + d;
    if (F::kValues > 1 && t < span.first) v = span.zeros + d;
    if (F::kValues > 1 && last >= span.count) v_last = span.zeros + d;
    vf by[HEADS];
#pragma GCC unroll 16
    for (int h = 0; h < HEADS; h++) by[h] = vset(weights[h * kChunk]);
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) {
      const int lanes = c + 1 < COLS ? W : n;
      const vf x = F::join(vload_some(v + c * W, lanes), vload_some(v_last + c * W, lanes));
#pragma GCC unroll 16
      for (int h = 0; h < HEADS; h++) acc[h][c] = F::add(acc[h][c], by[h], x);
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) vstore(sums + h * ld + d + c * W, acc[h][c]);
}

template <class F, class T, int HEADS>
void sum_span(const AttentionArgs& a, const Spans& spans, const Weighted<T>& span, float* sums) {
  constexpr int kCols = W == 16 ? (HEADS > 2 ? 4 : 8) : HEADS > 3 ? 2 : 4;
  const int64_t size = a.head_size;
  int64_t d = 0;
  for (; d + kCols * W <= size; d += kCols * W)
    sum_columns<F, T, HEADS, kCols>(a, spans, span, d, W, sums);
  for (; d + kCols / 2 * W <= size; d += kCols / 2 * W)
    sum_columns<F, T, HEADS, kCols / 2>(a, spans, span, d, W, sums);
  for (; d < size; d += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, size - d));
    sum_columns<F, T, HEADS, 1>(a, spans, span, d, n, sums);
  }
}

// Calls f(span, KV head, where to prefetch from, first query head, constant number of heads). Only
// the first call for a span and KV head gets an address to prefetch from.
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

// The item's queries, scaled, as units in rows of padded().
template <class F>
void load_queries(const AttentionArgs& a, const Item& item, float* q) {
  const int64_t ld = a.padded(), first = item.head * a.group();
  for (int64_t h = 0; h < item.heads * a.group(); h++, q += ld) {
    vstore(q + ld - W, vset(0.0f));
    const int64_t offset = a.starts[item.seq] * a.q_stride + (first + h) * a.head_size;
    read_row(q, a.q, offset, a.head_size, a.dtype);
    // Pairs fill the row's first half: each vector is read before it is overwritten.
    auto* values = reinterpret_cast<typename F::Value*>(q);
    for (int64_t i = 0; i < ld; i += W) vstore(values + i, vload(q + i) * vset(a.scale));
  }
}

// Calls f(tile's index, the columns of it that the query sees) for the item's tiles.
template <class F>
QUIRE_INLINE void over_tiles(const Item& item, F&& f) {
  const int64_t low = item.from / kTile * kTile;
  for (int64_t tile = 0, begin = low; begin < item.to; tile++, begin += kTile) {
    f(tile, Lanes{std::max<int64_t>(0, item.from - begin), std::min(kTile, item.to - begin)});
  }
}

// The scales of keys or values under the item's KV head `head`: for int8 one per token in the
// cache, for 8-bit floats one for the head.
void gather_scales(const AttentionArgs& a, const Item& item, const Spans& spans, int64_t head,
                   const float* cache, float* scales) {
  std::fill(scales, scales + kChunk, a.cache_dtype == kI8 ? 1.0f : cache[item.head + head]);
  if (a.cache_dtype != kI8) return;
  for (int64_t i = 0; i < spans.count(); i++) {
    const float* from = cache + spans[i].row + head * a.block_size;
    std::copy(from, from + spans[i].count, scales + spans[i].at);
  }
}

// Scores -> weights, with their maxima and sums in the partial results.
template <class F>
void weigh(const AttentionArgs& a, const Item& item, const Spans& spans, float* scores,
           float* partials) {
  const int64_t ld = a.padded(), group = a.group(), low = item.from / kTile * kTile;
  const int64_t position = a.seq_lens[item.seq] - 1;
  float key_scales[kChunk], value_scales[kChunk];
  for (int64_t h = 0; h < item.heads * group; h++) {
    if (a.key_scales && h % group == 0) {
      gather_scales(a, item, spans, h / group, a.key_scales, key_scales);
      gather_scales(a, item, spans, h / group, a.value_scales, value_scales);
    }
    float* head_partials = partials + (item.head * group + h) * head_partial_size(a);
    over_tiles(item, [&](int64_t tile, const Lanes& seen) {
      const int64_t in_chunk = tile * kTile;
      float* row = scores + h * kChunk + in_chunk;
      float* partial = head_partials + tile * partial_size(a);
      partial[ld] = finish_tile(a, item.head * group + h, position, low + in_chunk, seen,
                                a.key_scales ? key_scales + in_chunk : nullptr, row);
      partial[ld + 1] = weigh_tile<F>(seen, seen, partial[ld],
                                      a.value_scales ? value_scales + in_chunk : nullptr, row);
      std::fill(partial, partial + ld, 0.0f);
    });
  }
}

template <class F, class T>
void run(const AttentionArgs& a, const Item& item, const Spans& spans, const float* zeros, float* q,
         float* scores, float* partials) {
  const int64_t ld = a.padded(), first_head = item.head * a.group();
  load_queries<F>(a, item, q);
  spans.begin();
  over_spans(a, item, spans, false,
             [&](int64_t i, int64_t head, const char* next, int64_t h, auto heads) {
               score_span<F, T, heads>(a, spans, next, q + h * ld, spans.keys(i, head),
                                       spans[i].count, scores + h * kChunk + spans[i].at);
             });
  weigh<F>(a, item, spans, scores, partials);
  over_spans(a, item, spans, true,
             [&](int64_t i, int64_t head, const char* next, int64_t h, auto heads) {
               const int64_t tile = spans[i].at / kTile, in_tile = spans[i].at % kTile;
               const int64_t first = in_tile % F::kValues;
               const T* values = reinterpret_cast<const T*>(spans.values(i, head));
               const Weighted<T> span{values - first * a.head_size, first, first + spans[i].count,
                                      reinterpret_cast<const T*>(zeros),
                                      scores + h * kChunk + tile * kTile + in_tile / F::kValues,
                                      next};
               float* partial = partials + tile * partial_size(a);
               sum_span<F, T, heads>(a, spans, span,
                                     partial + (first_head + h) * head_partial_size(a));
             });
}

// Merges the partial results of one query head, at most W, into `sums`, `top` and `weight`.
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
  return kChunk * sizeof(Span) +
         (a.q_heads * (a.padded() + kChunk) + (W + 1) * a.padded()) * sizeof(float);
}

void decode_item(const AttentionArgs& a, const Item& item, char* scratch, float* partials) {
  float* copy = reinterpret_cast<float*>(scratch + kChunk * sizeof(Span));
  const Spans spans(a, item, reinterpret_cast<Span*>(scratch), copy);
  float* zeros = copy + W * a.padded();
  float* q = zeros + a.padded();
  float* scores = q + item.heads * a.group() * a.padded();
  std::fill(zeros, q, 0.0f);
  with_formats(a, [&](auto format, auto* cache) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(cache)>>;
    run<decltype(format), T>(a, item, spans, zeros, q, scores, partials);
  });
}

void merge_partials(const AttentionArgs& a, int64_t seq, int64_t head, const float* partials,
                    int64_t count, float* scratch) {
  const int64_t ld = a.padded(), group = a.group(), distance = partial_size(a);
  partials += head * group * head_partial_size(a);
  for (int64_t h = 0; h < group; h++, partials += head_partial_size(a)) {
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
