// A tile of queries of one sequence over its KV, with all query heads of a KV head.
//
// The rows of a tile are (query, head) pairs. kTile tokens of KV at a time are copied into panels,
// keys transposed. Then MR rows at a time go through both products and the softmax between them, so
// that scores and weights stay in the L1 cache.
#include "attention.h"

namespace quire {
namespace {

// Rows of a tile: enough to make the copies cheap.
constexpr int64_t kRows = 224;
static_assert(kTile <= kDepth, "weights are the A of the second product");
static_assert(MR <= W, "MR rows are merged as one vector");

struct Tile {
  const AttentionArgs& a;
  int64_t seq, head, group;
  int64_t from;    // position of the first query
  int64_t rows;    // queries x group
  const int32_t* ends;  // `visible_ends` from the first query on; or null
  int64_t ldo;     // columns of a row's sum of values, in whole panels of NR
  float *q, *scores, *keys, *values, *out;
  float *top, *weight;               // of each row, so far
  float *key_scales, *value_scales;  // of the current KV, 1 if no query sees it; or null
  int64_t* slots;  // indices of its tokens in the caches; -1 if no query sees them

  int64_t position(int64_t row) const { return from + row / group; }
  // One past the last token that a row's query sees. It doesn't decrease from row to row.
  int64_t end_seen(int64_t row) const { return ends ? ends[row / group] : position(row) + 1; }
  // Columns, of `count` tokens from `begin` on, that some rows of [row, row + rows) see.
  Lanes seen_by(int64_t row, int64_t rows, int64_t begin, int64_t count) const {
    return {std::max<int64_t>(0, a.first_seen(position(row)) - begin),
            std::max<int64_t>(0, std::min(count, end_seen(row + rows - 1) - begin))};
  }
};

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

int64_t max_rows(const AttentionArgs& a) { return tile_queries(a) * a.group(); }

// Distance between the queries' blocks of kDepth units.
int64_t query_block(const AttentionArgs& a) { return max_rows(a) * LDA; }

// The tile's buffers, equal for all tiles of the call.
Layout lay_out(Tile* tile) {
  const int64_t rows = max_rows(tile->a), size = tile->a.head_size;
  tile->ldo = round_up(size, NR);
  Layout layout;
  layout.add(&tile->q, round_up(size, kDepth) / kDepth * rows * LDA);
  layout.add(&tile->scores, MR * LDA);
  layout.add(&tile->keys, kTile * size);
  layout.add(&tile->values, kTile * tile->ldo);
  layout.add(&tile->out, rows * tile->ldo);
  layout.add(&tile->top, rows + W);
  layout.add(&tile->weight, rows + W);
  if (tile->a.key_scales) layout.add(&tile->key_scales, kTile);
  if (tile->a.value_scales) layout.add(&tile->value_scales, kTile);
  layout.add(&tile->slots, kTile);
  return layout;
}

// Queries, scaled, as [block][row][LDA] units.
template <class F>
void load_queries(const Tile& t, int64_t first_token) {
  using Value = typename F::Value;
  const AttentionArgs& a = t.a;
  const int64_t size = a.head_size;
  constexpr int64_t kBlockValues = kDepth * F::kValues;
  with_float(a.dtype, [&](auto* tag) {
    const auto* first = static_cast<decltype(tag)>(const_cast<void*>(a.q));
    for (int64_t r = 0; r < t.rows; r++) {
      const int64_t head = t.head * t.group + r % t.group;
      const auto* q = first + (first_token + r / t.group) * a.q_stride + head * size;
      for (int64_t d = 0; d < size; d += kBlockValues) {
        float* units = t.q + d / kBlockValues * query_block(a) + r * LDA;
        Value* to = reinterpret_cast<Value*>(units);
        const int64_t count = std::min(kBlockValues, size - d);
        units[units_of<F>(count) - 1] = 0.0f;
        for_lanes(count, [&](int64_t i, int n) {
          vstore_some(to + i, vload_some(q + d + i, n) * vset(a.scale), n);
        });
      }
    }
    return 0;
  });
}

// Finds the KV of `count` tokens from `begin` on. No query sees the first `unseen`, whose blocks
// may belong to another sequence by now, so they aren't read.
void find_slots(const Tile& t, int64_t begin, int64_t count, int64_t unseen) {
  const AttentionArgs& a = t.a;
  std::fill(t.slots, t.slots + kTile, int64_t{-1});
  for (int64_t i = unseen; i < count;) {
    int64_t slot = a.row(t.seq, t.head, begin + i);
    const int64_t end = std::min(count, i + a.block_size - (begin + i) % a.block_size);
    for (; i < end; i++) t.slots[i] = slot++;
  }
  if (!a.key_scales) return;
  if (a.cache_dtype != kI8) {
    std::fill(t.key_scales, t.key_scales + kTile, a.key_scales[t.head]);
    std::fill(t.value_scales, t.value_scales + kTile, a.value_scales[t.head]);
    return;
  }
  for (int64_t i = 0; i < kTile; i++) {
    t.key_scales[i] = t.slots[i] < 0 ? 1.0f : a.key_scales[t.slots[i]];
    t.value_scales[i] = t.slots[i] < 0 ? 1.0f : a.value_scales[t.slots[i]];
  }
}

// `count` keys as panels of NR tokens: [panel][unit][token].
template <class F, class T>
void load_keys(const Tile& t, int64_t count) {
  const AttentionArgs& a = t.a;
  const T* cache = static_cast<const T*>(a.key_cache);
  const int64_t size = a.head_size;
  for (int64_t j = 0; j < count; j += W) {
    float* to = t.keys + j / NR * units_of<F>(size) * NR + j % NR;
    for_lanes(size, [&](int64_t d, int n) {
      vf block[W];
      for (int i = 0; i < W; i++) {
        const int64_t slot = t.slots[j + i];
        block[i] = slot < 0 ? vset(0.0f) : vload_some(cache + slot * size + d, n);
      }
      vtranspose(block);
      for (int i = 0; i < n; i += F::kValues, to += NR) {
        vstore(to, F::join(block[i], block[i + F::kValues - 1]));
      }
    });
  }
}

// The values of the tokens `seen` as panels of NR columns: [panel][unit][column], with zeros in the
// rest of their units. Returns whether all of them and their scales are finite.
template <class F, class T>
bool load_values(const Tile& t, const Lanes& seen) {
  const AttentionArgs& a = t.a;
  const T* cache = static_cast<const T*>(a.value_cache);
  constexpr int64_t kLast = F::kValues - 1;
  const auto load = [&](int64_t token, int64_t d) __attribute__((always_inline)) {
    const int64_t left = a.head_size - d;
    if (token < seen.low || token >= seen.high || left <= 0) return vset(0.0f);
    return vload_some(cache + t.slots[token] * a.head_size + d, static_cast<int>(std::min<int64_t>(left, W)));
  };
  vf off = vset(0.0f);
  for (int64_t unit = seen.low / F::kValues; unit < units_of<F>(seen.high); unit++) {
    for (int64_t d = 0; d < t.ldo; d += W) {
      const vf x = load(unit * F::kValues, d), y = load(unit * F::kValues + kLast, d);
      float* panel = t.values + d / NR * NR * units_of<F>(kTile);
      vstore(panel + unit * NR + d % NR, F::join(x, y));
      off = vfma(x, vset(0.0f), vfma(y, vset(0.0f), off));
    }
  }
  return vsum(off) == 0.0f && (!a.value_scales || all_finite(t.value_scales, kTile));
}

// Scores of the rows [r, r + rows) and the keys that some of them see.
template <class F>
void multiply_keys(const Tile& t, int64_t r, int64_t rows, const Lanes& seen) {
  const int64_t units = units_of<F>(t.a.head_size);
  const Micro multiply = micro_for<F>(rows);
  for (int64_t j = seen.low / NR * NR; j < seen.high; j += NR) {
    multiply(t.q + r * LDA, query_block(t.a), t.keys + j * units, units, t.scores + j, LDA, nullptr,
             nullptr);
  }
}

// The factors of the old and the new sum of values of MR rows.
struct Factors {
  float old_by[W], new_by[W];
};

// Scores of the rows -> weights; merges their maxima and sums into the earlier ones.
template <class F>
Factors weigh_rows(const Tile& t, int64_t r, int64_t rows, const Lanes& all, int64_t begin,
                   int64_t count) {
  Lanes seen[MR];
  float tops[W] = {}, weights[W] = {};
  // All maxima precede the first weight, so that no row waits for its own.
  for (int64_t i = 0; i < rows; i++) {
    seen[i] = t.seen_by(r + i, 1, begin, count);
    tops[i] = seen[i].empty() ? kNoTop
                           : finish_tile(t.a, t.head * t.group + (r + i) % t.group, t.position(r + i),
                                         begin, seen[i], t.key_scales, t.scores + i * LDA);
  }
  for (int64_t i = 0; i < rows; i++) {
    float* row = t.scores + i * LDA;
    if (seen[i].empty()) std::memset(row, 0, LDA * sizeof(float));
    else weights[i] = weigh_tile<F>(seen[i], all, tops[i], t.value_scales, row);
  }
  const vf top = vload(t.top + r), tile_top = vload(tops);
  vf old_by, new_by;
  merge_factors(top, tile_top, &old_by, &new_by);
  const vf weight = merge_weights(vload(t.weight + r), old_by, vload(weights), new_by);
  vstore_some(t.weight + r, weight, static_cast<int>(rows));
  vstore_some(t.top + r, vmax(top, tile_top), static_cast<int>(rows));
  Factors factors;
  vstore(factors.old_by, old_by), vstore(factors.new_by, new_by);
  return factors;
}

// Adds the values `seen`, weighted by the rows [r + first, r + first + rows).
template <class F>
void multiply_values(const Tile& t, int64_t r, int64_t first, int64_t rows, const Lanes& seen,
                     const Factors& factors) {
  const int64_t low = seen.low / F::kValues, units = units_of<F>(seen.high) - low;
  const Micro multiply = micro_for<F>(rows);
  for (int64_t d = 0; d < t.ldo; d += NR) {
    multiply(t.scores + first * LDA + low, 0, t.values + d * units_of<F>(kTile) + low * NR, units,
             t.out + (r + first) * t.ldo + d, t.ldo, factors.old_by + first,
             factors.new_by + first);
  }
}

template <class F, class T>
void attend(const Tile& t, int64_t begin, int64_t count) {
  const Lanes in_tile = t.seen_by(0, t.rows, begin, count);
  find_slots(t, begin, count, in_tile.low);
  load_keys<F, T>(t, count);
  const bool finite = load_values<F, T>(t, in_tile);
  for (int64_t r = 0; r < t.rows; r += MR) {
    const int64_t rows = std::min<int64_t>(MR, t.rows - r);
    const Lanes seen = t.seen_by(r, rows, begin, count);
    if (seen.empty()) continue;
    multiply_keys<F>(t, r, rows, seen);
    const Factors factors = weigh_rows<F>(t, r, rows, seen, begin, count);
    if (finite) {
      multiply_values<F>(t, r, 0, rows, seen, factors);
      continue;
    }
    // A weight of 0 wouldn't hide NaN and infinity from rows that don't see them.
    for (int64_t i = 0; i < rows; i++) {
      const Lanes row_seen = t.seen_by(r + i, 1, begin, count);
      if (row_seen.empty()) continue;
      load_values<F, T>(t, row_seen);
      multiply_values<F>(t, r, i, 1, row_seen, factors);
    }
  }
}

void store(const Tile& t, int64_t first_token) {
  const AttentionArgs& a = t.a;
  const int64_t size = a.head_size;
  for (int64_t r = 0; r < t.rows; r++) {
    const int64_t head = t.head * t.group + r % t.group;
    float* row = t.out + r * t.ldo;
    const vf scale = vset(inverse_weight(a, head, t.top[r], t.weight[r]));
    for (int64_t d = 0; d < size; d += W) vstore(row + d, vload(row + d) * scale);
    const int64_t token = first_token + r / t.group;
    write_row(a.out, (token * a.q_heads + head) * size, row, size, a.dtype);
  }
}

}  // namespace

int64_t tile_queries(const AttentionArgs& a) { return std::max<int64_t>(1, kRows / a.group()); }

size_t prefill_scratch(const AttentionArgs& a) {
  Tile tile{a};
  return lay_out(&tile).total();
}

void prefill_item(const AttentionArgs& a, const Item& item, char* scratch) {
  const int64_t offset = a.seq_lens[item.seq] - a.queries(item.seq);
  const int64_t count = item.to - item.from, first_token = a.starts[item.seq] + item.from;
  const int32_t* ends = a.visible_ends ? a.visible_ends + first_token : nullptr;
  Tile t{a, item.seq, item.head, a.group(), offset + item.from, count * a.group(), ends};
  lay_out(&t).place(scratch);
  std::fill(t.out, t.out + t.rows * t.ldo, 0.0f);
  std::fill(t.top, t.top + t.rows + W, kNoTop);
  std::fill(t.weight, t.weight + t.rows + W, 0.0f);
  const int64_t end = t.end_seen(t.rows - 1), low = a.first_seen(t.from) / kTile * kTile;
  with_formats(a, [&](auto format, auto* cache) {
    using F = decltype(format);
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(cache)>>;
    load_queries<F>(t, first_token);
    for (int64_t begin = low; begin < end; begin += kTile) {
      attend<F, T>(t, begin, std::min(kTile, end - begin));
    }
  });
  store(t, first_token);
}

}  // namespace quire
