// One query of one sequence over a chunk of its KV, under one or more KV heads, all the query heads
// of each together.
//
// Two passes over the chunk: scores, then the weighted sum of values. The cache is read where it
// lies and in the order in which it lies, block by block and head by head within a block; a few
// tokens by up to four query heads are in registers, while what comes some way later is being fetched.
#include "attention.h"

namespace quire {
namespace {

constexpr int kHeads = 4;                // query heads in registers at a time
constexpr int kSums = W == 16 ? 16 : 8;  // scores in registers at a time
constexpr int kSumsOfThree = 12;         // likewise, of three heads
constexpr int64_t kBytesAhead = 8192;

// A run of tokens that lie in one block, under the item's first head. Those of the next head begin
// `block_size` rows later.
struct Span {
  int64_t row;    // of its first token in the caches
  int64_t count;  // tokens
  int64_t at;     // its first token's place in the chunk
};

// An item's tokens, as they lie in the caches, and what of them to fetch when.
class Spans {
 public:
  Spans(const AttentionArgs& a, const Item& item, Span* room) : spans_(room), heads_(item.heads) {
    row_bytes_ = a.head_size * static_cast<int64_t>(size_of(a.cache_dtype));
    head_bytes_ = a.block_size * row_bytes_;
    ahead_ = std::max<int64_t>(1, kBytesAhead / head_bytes_);
    fetches_ = is_on(kPrefetch);
    keys_ = static_cast<const char*>(a.key_cache);
    values_ = static_cast<const char*>(a.value_cache);
    const int32_t* table = a.block_tables + item.seq * a.table_stride;
    int64_t block = item.from / a.block_size, offset = item.from % a.block_size;
    for (int64_t token = item.from; token < item.to; block++, offset = 0) {
      const int64_t row = (table[block] * a.kv_heads + item.head) * a.block_size + offset;
      const int64_t count = std::min(a.block_size - offset, item.to - token);
      spans_[count_++] = Span{row, count, token - item.from};
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
  // Fetches the tokens [from, from + count) at p.
  QUIRE_INLINE void fetch(const char* p, int64_t from, int64_t count) const {
    if (!p || !fetches_) return;
    p += from * row_bytes_;
    for (int64_t i = 0; i < count * row_bytes_; i += 64) __builtin_prefetch(p + i);
  }

 private:
  const char* at(const char* cache, int64_t i, int64_t head) const {
    return cache + spans_[i].row * row_bytes_ + head * head_bytes_;
  }

  Span* spans_;
  int64_t count_ = 0, heads_, row_bytes_, head_bytes_, ahead_;
  const char *keys_, *values_;
  bool fetches_;
};

// out[i] = sum of the lanes of x[i].
template <int N>
QUIRE_INLINE void sum_lanes(const vf (&x)[N], float* out) {
#if defined(QUIRE_AVX512)
  if constexpr (N == 16) {
    vstore(out, vsum16(x));
    return;
  }
#endif
  constexpr int kFours = N / 4 * 4;
#pragma GCC unroll 4
  for (int i = 0; i < kFours; i += 4) vsum4(x[i], x[i + 1], x[i + 2], x[i + 3], out + i);
  for (int i = kFours; i < N; i++) out[i] = vsum(x[i]);
}

// scores[h][t] = q[h] . k[t] for HEADS heads and TOKENS tokens.
template <class T, int HEADS, int TOKENS>
QUIRE_INLINE void score_tile(const float* q, int64_t q_ld, const T* k, int64_t size, float* scores) {
  vf acc[HEADS * TOKENS];
#pragma GCC unroll 16
  for (int i = 0; i < HEADS * TOKENS; i++) acc[i] = vset(0.0f);
  auto step = [&](int64_t d, int n) __attribute__((always_inline)) {
    vf x[HEADS];
#pragma GCC unroll 16
    for (int h = 0; h < HEADS; h++) x[h] = vload(q + h * q_ld + d);
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; t++) {
      const vf key = vload_some(k + t * size + d, n);
#pragma GCC unroll 16
      for (int h = 0; h < HEADS; h++) acc[h * TOKENS + t] = vfma(x[h], key, acc[h * TOKENS + t]);
    }
  };
  int64_t d = 0;
  for (; d + W <= size; d += W) step(d, W);
  if (d < size) step(d, static_cast<int>(size - d));
  float sums[HEADS * TOKENS];
  sum_lanes(acc, sums);
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; h++)
    std::memcpy(scores + h * kChunk, sums + h * TOKENS, TOKENS * sizeof(float));
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
  constexpr int kTokens = HEADS == 3 ? kSumsOfThree / 3 : kSums / HEADS;
  const int64_t ld = a.padded(), size = a.head_size;
  const T* k = reinterpret_cast<const T*>(keys);
  int64_t t = 0;
  for (; t + kTokens <= count; t += kTokens) {
    spans.fetch(next, t, kTokens);
    score_tile<T, HEADS, kTokens>(q, ld, k + t * size, size, scores + t);
  }
  spans.fetch(next, t, count - t);
  for (; t < count; t++) score_tile<T, HEADS, 1>(q, ld, k + t * size, size, scores + t);
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

template <class T>
void run(const AttentionArgs& a, const Item& item, const Spans& spans, float* q, float* scores,
         float* partials) {
  const int64_t ld = a.padded(), sum_ld = ld + 16, group = a.group(), count = item.to - item.from;
  const int64_t position = a.seq_lens[item.seq] - 1, stride = item.stride * partial_size(a);
  load_queries(a, item, q);
  spans.begin();
  over_spans(a, item, spans, false,
             [&](int64_t i, int64_t head, const char* next, int64_t h, auto heads) {
               score_span<T, heads>(a, spans, next, q + h * ld, spans.keys(i, head),
                                    spans[i].count, scores + h * kChunk + spans[i].at);
             });
  if (a.key_scales) apply_scales(a, item, spans, a.key_scales, scores);
  for (int64_t h = 0; h < item.heads * group; h++) {
    float* row = scores + h * kChunk;
    float* partial = partials + h / group * stride + h % group * sum_ld;
    const float top =
        finish_scores(a, item.head * group + h, row, count, item.from - position);
    partial[ld] = top;
    partial[ld + 1] = weigh_scores(row, count, top);
    std::fill(partial, partial + ld, 0.0f);
  }
  if (a.value_scales) apply_scales(a, item, spans, a.value_scales, scores);
  over_spans(a, item, spans, true,
             [&](int64_t i, int64_t head, const char* next, int64_t h, auto heads) {
               sum_span<T, heads>(a, spans, next, spans.values(i, head),
                                  scores + h * kChunk + spans[i].at, spans[i].count,
                                  partials + head * stride + (h - head * group) * sum_ld);
             });
}

}  // namespace

size_t decode_scratch(const AttentionArgs& a) {
  return kChunk * sizeof(Span) + a.q_heads * (a.padded() + kChunk) * sizeof(float);
}

void decode_item(const AttentionArgs& a, const Item& item, char* scratch, float* partials) {
  const Spans spans(a, item, reinterpret_cast<Span*>(scratch));
  float* q = reinterpret_cast<float*>(scratch + kChunk * sizeof(Span));
  float* scores = q + item.heads * a.group() * a.padded();
  with_cache(a.cache_dtype, [&](auto* tag) {
    run<std::remove_pointer_t<decltype(tag)>>(a, item, spans, q, scores, partials);
    return 0;
  });
}

void merge_partials(const AttentionArgs& a, int64_t seq, int64_t head, const float* partials,
                    int64_t count, float* scratch) {
  const int64_t ld = a.padded(), sum_ld = ld + 16, group = a.group();
  for (int64_t h = 0; h < group; h++) {
    const int64_t q_head = head * group + h;
    const float* first = partials + h * sum_ld;
    float top = a.sinks ? a.sinks[q_head] : -INFINITY;
    for (int64_t c = 0; c < count; c++) top = std::max(top, first[c * group * sum_ld + ld]);
    float weight = a.sinks ? std::exp(a.sinks[q_head] - top) : 0.0f;
    for (int64_t i = 0; i < ld; i += W) vstore(scratch + i, vset(0.0f));
    for (int64_t c = 0; c < count; c++) {
      const float* part = first + c * group * sum_ld;
      const float by = std::exp(part[ld] - top);
      weight += by * part[ld + 1];
      for (int64_t i = 0; i < ld; i += W)
        vstore(scratch + i, vfma(vset(by), vload(part + i), vload(scratch + i)));
    }
    const vf inverse = vset(1.0f / weight);
    for (int64_t i = 0; i < ld; i += W) vstore(scratch + i, vload(scratch + i) * inverse);
    const int64_t at = (a.starts[seq] * a.q_heads + q_head) * a.head_size;
    write_row(a.out, at, scratch, a.head_size, a.dtype);
  }
}

}  // namespace quire
