// One query of one sequence over a chunk of its KV, all the query heads of a KV head together.
//
// Two passes over the chunk: scores, then the weighted sum of values. The cache is read where it
// lies, four tokens by up to four heads in registers, while blocks further on are being fetched.
#include "attention.h"

namespace quire {
namespace {

constexpr int kHeads = 4;   // heads in registers at a time
constexpr int kTokens = 4;  // tokens in registers at a time
constexpr int kCols = W == 16 ? 4 : 2;

struct Span {
  int64_t row;    // of its first token in the caches
  int64_t count;  // tokens
  int64_t at;     // its first token's place in the chunk
  int64_t block;  // its block's place in the chunk
};

// Calls body(span) for each run of tokens that lie in one block.
template <class F>
QUIRE_INLINE void over_blocks(const Attention& a, const Item& item, F&& body) {
  int64_t block = 0;
  for (int64_t token = item.from; token < item.to; block++) {
    const int64_t left = a.block_size - token % a.block_size;
    const int64_t count = std::min(left, item.to - token);
    body(Span{a.row(item.seq, item.head, token), count, token - item.from, block});
    token += count;
  }
}

// Fetches a chunk's blocks from memory some time before they are read: first those of the keys, then
// those of the values. Blocks lie anywhere, so the hardware can't guess which comes next.
template <class T>
class Fetcher {
 public:
  Fetcher(const Attention& a, const Item& item) : a_(a), item_(item) {
    first_ = item.from / a.block_size;
    blocks_ = (item.to + a.block_size - 1) / a.block_size - first_;
    row_bytes_ = a.head_size * static_cast<int64_t>(sizeof(T));
    ahead_ = std::max<int64_t>(1, kBytesAhead / (a.block_size * row_bytes_));
    for (int64_t i = 0; i < std::min(ahead_, blocks_); i++) fetch(at(i), a.block_size);
  }

  // Where to fetch from while block `block` of the keys (or of the values) is read; or null.
  const char* beside(int64_t block, bool values) const {
    return at(block + ahead_ + (values ? blocks_ : 0));
  }
  // Fetches `count` tokens.
  QUIRE_INLINE void fetch(const char* p, int64_t count) const {
    if (!p) return;
    for (int64_t i = 0; i < count * row_bytes_; i += 64) __builtin_prefetch(p + i);
  }
  int64_t row_bytes() const { return row_bytes_; }

 private:
  static constexpr int64_t kBytesAhead = 8192;

  const char* at(int64_t block) const {
    const bool values = block >= blocks_;
    const int64_t of = values ? block - blocks_ : block;
    if (of >= blocks_) return nullptr;
    const void* cache = values ? a_.value_cache : a_.key_cache;
    const int64_t row = a_.row(item_.seq, item_.head, (first_ + of) * a_.block_size);
    return static_cast<const char*>(cache) + row * row_bytes_;
  }

  const Attention& a_;
  const Item& item_;
  int64_t first_, blocks_, row_bytes_, ahead_;
};

// scores[h][t] = q[h] . k[t] for HEADS heads and TOKENS tokens.
template <class T, int HEADS, int TOKENS>
QUIRE_INLINE void score_tile(const float* q, int64_t q_ld, const T* k, int64_t size, float* scores) {
  vf acc[HEADS][TOKENS];
  for (int h = 0; h < HEADS; h++)
    for (int t = 0; t < TOKENS; t++) acc[h][t] = vset(0.0f);
  auto step = [&](int64_t d, int n) __attribute__((always_inline)) {
    vf key[TOKENS];
    for (int t = 0; t < TOKENS; t++) key[t] = vload_some(k + t * size + d, n);
    for (int h = 0; h < HEADS; h++) {
      const vf x = vload(q + h * q_ld + d);
      for (int t = 0; t < TOKENS; t++) acc[h][t] = vfma(x, key[t], acc[h][t]);
    }
  };
  int64_t d = 0;
  for (; d + W <= size; d += W) step(d, W);
  if (d < size) step(d, static_cast<int>(size - d));
  for (int h = 0; h < HEADS; h++) {
    if constexpr (TOKENS == 4) {
      vsum4(acc[h][0], acc[h][1], acc[h][2], acc[h][3], scores + h * kChunk);
    } else {
      for (int t = 0; t < TOKENS; t++) scores[h * kChunk + t] = vsum(acc[h][t]);
    }
  }
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

template <class T, int TOKENS>
void score_heads(const Attention& a, const float* q, const T* k, float* scores) {
  const int64_t ld = a.padded(), size = a.head_size;
  over_heads(a.group(), [&](int64_t h, auto heads) {
    score_tile<T, heads, TOKENS>(q + h * ld, ld, k, size, scores + h * kChunk);
  });
}

template <class T>
void score_chunk(const Attention& a, const Item& item, const Fetcher<T>& fetcher, const float* q,
                 float* scores) {
  const T* keys = static_cast<const T*>(a.key_cache);
  const int64_t size = a.head_size;
  over_blocks(a, item, [&](const Span& span) {
    const T* k = keys + span.row * size;
    const char* next = fetcher.beside(span.block, false);
    int64_t t = 0;
    for (; t + kTokens <= span.count; t += kTokens) {
      fetcher.fetch(next ? next + t * fetcher.row_bytes() : next, kTokens);
      score_heads<T, kTokens>(a, q, k + t * size, scores + span.at + t);
    }
    for (; t < span.count; t++) score_heads<T, 1>(a, q, k + t * size, scores + span.at + t);
  });
}

// sums[h][0 .. COLS * W) = sum over the chunk of weight[h][t] * v[t]; `n` lanes of the last vector.
template <class T, int HEADS, int COLS>
void sum_columns(const Attention& a, const Item& item, const float* weights, int64_t column, int n,
                 const Fetcher<T>* fetcher, float* sums, int64_t ld) {
  const T* values = static_cast<const T*>(a.value_cache);
  const int64_t size = a.head_size;
  vf acc[HEADS][COLS];
  for (int h = 0; h < HEADS; h++)
    for (int c = 0; c < COLS; c++) acc[h][c] = vset(0.0f);
  over_blocks(a, item, [&](const Span& span) {
    const T* v = values + span.row * size + column;
    const float* w = weights + span.at;
    const char* next = fetcher ? fetcher->beside(span.block, true) : nullptr;
    for (int64_t t = 0; t < span.count; t++, v += size, w++) {
      if (next) fetcher->fetch(next + t * fetcher->row_bytes(), 1);
      vf x[COLS];
      for (int c = 0; c < COLS - 1; c++) x[c] = vload(v + c * W);
      x[COLS - 1] = vload_some(v + (COLS - 1) * W, n);
      for (int h = 0; h < HEADS; h++) {
        const vf by = vset(w[h * kChunk]);
        for (int c = 0; c < COLS; c++) acc[h][c] = vfma(by, x[c], acc[h][c]);
      }
    }
  });
  for (int h = 0; h < HEADS; h++)
    for (int c = 0; c < COLS; c++) vstore(sums + h * ld + c * W, acc[h][c]);
}

template <class T, int COLS>
void sum_heads(const Attention& a, const Item& item, const Fetcher<T>& fetcher,
               const float* weights, int64_t column, int n, float* sums, int64_t ld) {
  over_heads(a.group(), [&](int64_t h, auto heads) {
    // Fetching once is enough: in the first pass over the values.
    sum_columns<T, heads, COLS>(a, item, weights + h * kChunk, column, n,
                                column + h == 0 ? &fetcher : nullptr, sums + h * ld + column, ld);
  });
}

template <class T>
void sum_chunk(const Attention& a, const Item& item, const Fetcher<T>& fetcher,
               const float* weights, float* sums, int64_t ld) {
  const int64_t size = a.head_size;
  int64_t d = 0;
  for (; d + kCols * W <= size; d += kCols * W)
    sum_heads<T, kCols>(a, item, fetcher, weights, d, W, sums, ld);
  for (; d + W <= size; d += W) sum_heads<T, 1>(a, item, fetcher, weights, d, W, sums, ld);
  if (d < size)
    sum_heads<T, 1>(a, item, fetcher, weights, d, static_cast<int>(size - d), sums, ld);
}

// scores[h][t] *= scale of token t: what makes int8 keys or values whole again.
void apply_scales(const Attention& a, const Item& item, const float* scales, float* scores) {
  over_blocks(a, item, [&](const Span& span) {
    for (int64_t h = 0; h < a.group(); h++) {
      float* row = scores + h * kChunk + span.at;
      for (int64_t t = 0; t < span.count; t++) row[t] *= scales[span.row + t];
    }
  });
}

template <class T>
void run(const Attention& a, const Item& item, float* q, float* scores, float* partial) {
  const int64_t ld = a.padded(), group = a.group(), count = item.to - item.from;
  const int64_t token = a.starts[item.seq], position = a.seq_lens[item.seq] - 1;
  for (int64_t h = 0; h < group; h++) {
    vstore(q + (h + 1) * ld - W, vset(0.0f));
    const int64_t at = token * a.q_stride + (item.head * group + h) * a.head_size;
    read_row(q + h * ld, a.q, at, a.head_size, a.dtype);
    for (int64_t i = 0; i < ld; i += W) vstore(q + h * ld + i, vload(q + h * ld + i) * vset(a.scale));
  }
  const Fetcher<T> fetcher(a, item);
  score_chunk<T>(a, item, fetcher, q, scores);
  if (a.key_scales) apply_scales(a, item, a.key_scales, scores);
  const int64_t sum_ld = ld + 16;
  for (int64_t h = 0; h < group; h++) {
    float* row = scores + h * kChunk;
    const float top =
        finish_scores(a, item.head * group + h, row, count, item.from - position);
    partial[h * sum_ld + ld] = top;
    partial[h * sum_ld + ld + 1] = weigh_scores(row, count, top);
  }
  if (a.value_scales) apply_scales(a, item, a.value_scales, scores);
  sum_chunk<T>(a, item, fetcher, scores, partial, sum_ld);
}

}  // namespace

size_t decode_scratch(const Attention& a) {
  return a.group() * (a.padded() + kChunk) * sizeof(float);
}

void decode_item(const Attention& a, const Item& item, char* scratch, float* partial) {
  float* q = reinterpret_cast<float*>(scratch);
  float* scores = q + a.group() * a.padded();
  with_cache(a.cache_dtype, [&](auto* tag) {
    run<std::remove_pointer_t<decltype(tag)>>(a, item, q, scores, partial);
    return 0;
  });
}

void merge_partials(const Attention& a, int64_t seq, int64_t head, const float* partials,
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
