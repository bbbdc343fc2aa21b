// A tile of queries of one sequence over its KV, all the query heads of a KV head together.
//
// The rows of a tile are (query, head) pairs. Keys are transposed and values copied into panels,
// kTile tokens at a time, and both products run in the register-blocked microkernel.
#include "attention.h"
#include "micro.h"

namespace quire {
namespace {

constexpr int64_t kRows = W == 16 ? 112 : W == 8 ? 96 : 64;
static_assert(kTile == kDepth, "scores are the A of the second product");

// Columns of a tile of KV, as [low, high).
struct Range {
  int64_t low, high;
};

struct Tile {
  const AttentionArgs& a;
  int64_t seq, head, group;
  int64_t from;   // position of the first query
  int64_t rows;   // queries x group
  int64_t seen;   // the first token that any of the queries sees
  int64_t depth;  // blocks of kDepth in a head
  int64_t panels; // panels of NR columns in a head
  int64_t ldo;    // panels * NR
  float *q, *scores, *keys, *values, *out;
  float *top, *weight;         // of each row, so far
  float *tile_top, *tile_weight;  // of the KV at hand
  float *old_by, *new_by;
  float *key_scales, *value_scales;  // of the KV at hand, int8 caches only
  Range* ranges;    // what of the KV at hand the rows [0, MR), [MR, 2 MR), ... see, all together
  int64_t* places;  // where its tokens lie in the caches; -1 where no query sees one

  int64_t position(int64_t row) const { return from + row / group; }
  // Columns, of `count` tokens from `begin` on, that some of the queries from `first` to `last` see.
  Range seen_by(int64_t first, int64_t last, int64_t begin, int64_t count) const {
    return {std::max<int64_t>(0, a.first_seen(first) - begin),
            std::max<int64_t>(0, std::min(count, last + 1 - begin))};
  }
};

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

int64_t most_rows(const AttentionArgs& a) { return tile_queries(a) * a.group(); }

// Where the tile's buffers lie; for all tiles of the call alike.
Layout lay_out(Tile* tile) {
  const int64_t rows = most_rows(tile->a);
  tile->depth = (tile->a.head_size + kDepth - 1) / kDepth;
  tile->ldo = round_up(tile->a.head_size, NR);
  tile->panels = tile->ldo / NR;
  Layout layout;
  layout.add(&tile->q, tile->depth * rows * LDA);
  layout.add(&tile->scores, rows * LDA);
  layout.add(&tile->keys, kTile * tile->a.padded());
  layout.add(&tile->values, kTile * tile->ldo);
  layout.add(&tile->out, rows * tile->ldo);
  layout.add(&tile->top, rows);
  layout.add(&tile->weight, rows);
  layout.add(&tile->tile_top, rows);
  layout.add(&tile->tile_weight, rows);
  layout.add(&tile->old_by, rows);
  layout.add(&tile->new_by, rows);
  layout.add(&tile->key_scales, kTile);
  layout.add(&tile->value_scales, kTile);
  layout.add(&tile->ranges, (rows + MR - 1) / MR);
  layout.add(&tile->places, kTile);
  return layout;
}

// Queries, scaled, as [depth][row][LDA].
template <class T>
void load_queries(const Tile& t, int64_t first_token) {
  const AttentionArgs& a = t.a;
  const int64_t size = a.head_size, block_rows = most_rows(a) * LDA;
  const T* token = static_cast<const T*>(a.q) + first_token * a.q_stride + t.head * t.group * size;
  const vf scale = vset(a.scale);
  float* row = t.q;
  for (int64_t r = 0; r < t.rows; token += a.q_stride) {
    const T* q = token;
    for (const int64_t end = r + t.group; r < end; r++, q += size, row += LDA) {
      for (int64_t block = 0, d = 0; d < size; block++, d += kDepth) {
        float* to = row + block * block_rows;
        for_lanes(std::min<int64_t>(kDepth, size - d), [&](int64_t i, int lanes) {
          vstore_some(to + i, vload_some(q + d + i, lanes) * scale, lanes);
        });
      }
    }
  }
}

// Finds the KV of `count` tokens from `begin` on. Blocks that have left the window may be anyone's
// by now, so they aren't looked at.
void find_places(const Tile& t, int64_t begin, int64_t count) {
  const AttentionArgs& a = t.a;
  const int64_t first = std::max<int64_t>(0, t.seen - begin);
  std::fill(t.places, t.places + std::min(first, kTile), int64_t{-1});
  for (int64_t i = first; i < count;) {
    const int64_t left = a.block_size - (begin + i) % a.block_size;
    int64_t place = a.row(t.seq, t.head, begin + i);
    for (const int64_t end = std::min(count, i + left); i < end; i++) t.places[i] = place++;
  }
  std::fill(t.places + count, t.places + kTile, int64_t{-1});
}

// The scales of its int8 keys and values; 1 where no query sees one.
void find_scales(const Tile& t) {
  if (!t.a.key_scales) return;
  for (int64_t i = 0; i < kTile; i++) {
    const int64_t place = t.places[i];
    t.key_scales[i] = place < 0 ? 1.0f : t.a.key_scales[place];
    t.value_scales[i] = place < 0 ? 1.0f : t.a.value_scales[place];
  }
}

// What each MR rows see of it.
void find_ranges(const Tile& t, int64_t begin, int64_t count) {
  for (int64_t r = 0; r < t.rows; r += MR) {
    const int64_t last = std::min<int64_t>(r + MR, t.rows) - 1;
    t.ranges[r / MR] = t.seen_by(t.position(r), t.position(last), begin, count);
  }
}

// `count` keys as panels of NR tokens: [panel][d][token].
template <class T>
void load_keys(const Tile& t, int64_t count) {
  const AttentionArgs& a = t.a;
  const T* cache = static_cast<const T*>(a.key_cache);
  const int64_t size = a.head_size, padded = a.padded();
  for (int64_t j = 0; j < round_up(count, W); j += W) {
    const T* rows[W];
    for (int i = 0; i < W; i++) {
      const int64_t row = t.places[j + i];
      rows[i] = row < 0 ? nullptr : cache + row * size;
    }
    float* to = t.keys + j / NR * padded * NR + j % NR;
    for_lanes(size, [&](int64_t d, int n) {
      vf block[W];
      for (int i = 0; i < W; i++) block[i] = rows[i] ? vload_some(rows[i] + d, n) : vset(0.0f);
      vtranspose(block);
      for (int i = 0; i < n; i++) vstore(to + (d + i) * NR, block[i]);
    });
  }
}

// Values as panels of NR columns: [panel][token][column]. Gives whether all of them are finite, and
// what they are multiplied by.
template <class T>
bool load_values(const Tile& t, int64_t count) {
  const AttentionArgs& a = t.a;
  const T* cache = static_cast<const T*>(a.value_cache);
  vf off[2] = {vset(0.0f), vset(0.0f)};
  for (int64_t j = 0; j < count; j++) {
    const int64_t row = t.places[j];
    const T* from = cache + (row < 0 ? 0 : row) * a.head_size;
    for (int64_t panel = 0; panel < t.ldo; panel += NR) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const int64_t d = panel + half * W, left = row < 0 ? 0 : a.head_size - d;
        const vf x = left <= 0   ? vset(0.0f)
                     : left >= W ? vload(from + d)
                                 : vload_n(from + d, static_cast<int>(left));
        vstore(t.values + panel * kTile + j * NR + half * W, x);
        off[half] = vfma(x, vset(0.0f), off[half]);
      }
    }
  }
  return vsum(off[0] + off[1]) == 0.0f && (!a.value_scales || all_finite(t.value_scales, kTile));
}

void multiply_keys(const Tile& t, int64_t count) {
  const int64_t size = t.a.head_size, padded = t.a.padded();
  for (int64_t j = 0; j < count; j += NR) {
    for (int64_t r = 0; r < t.rows; r += MR) {
      const int64_t rows = std::min<int64_t>(MR, t.rows - r);
      const Range& seen = t.ranges[r / MR];
      if (j + NR <= seen.low || j >= seen.high) continue;
      const Micro micro = micro_f32_for(static_cast<int>(rows));
      for (int64_t block = 0; block < t.depth; block++) {
        const int64_t d = block * kDepth;
        micro(t.q + (block * most_rows(t.a) + r) * LDA, t.keys + j / NR * padded * NR + d * NR,
              std::min<int64_t>(kDepth, size - d), t.scores + r * LDA + j, LDA,
              block ? Old::kKeep : Old::kDrop, nullptr, nullptr);
      }
    }
  }
}

// Scores -> weights of one row that sees the columns `own`; what is beyond, as far as the rows beside
// it see it, gets the weight 0.
void weigh_row(const Tile& t, int64_t r, const Range& own, int64_t begin, int64_t position) {
  const AttentionArgs& a = t.a;
  const Range& all = t.ranges[r / MR];
  float* row = t.scores + r * LDA;
  if (own.low >= own.high) {
    t.tile_top[r] = kNoTop;
    t.tile_weight[r] = 0.0f;
    if (all.low < all.high) std::fill(row + all.low, row + all.high, 0.0f);
    return;
  }
  const Lanes seen{own.low, own.high};
  if (a.key_scales) scale_tile(row, seen, t.key_scales);
  finish_scores(a, t.head * t.group + r % t.group, row + own.low, own.high - own.low,
                begin + own.low, position);
  weigh_tile(row, seen, t.tile_top + r, t.tile_weight + r);
  if (a.value_scales) scale_tile(row, seen, t.value_scales);
  if (all.low < seen.from()) std::fill(row + all.low, row + seen.from(), 0.0f);
  if (all.high > seen.to()) std::fill(row + seen.to(), row + all.high, 0.0f);
}

// Takes the tile's maxima and weights over into the rows' own.
void merge_tile(const Tile& t) {
  for_lanes(t.rows, [&](int64_t r, int n) {
    const vf top = vload_some(t.top + r, n), tile_top = vload_some(t.tile_top + r, n);
    vf old_by, new_by;
    merge_factors(top, tile_top, &old_by, &new_by);
    vstore_some(t.old_by + r, old_by, n);
    vstore_some(t.new_by + r, new_by, n);
    const vf weight = vload_some(t.weight + r, n), tile_weight = vload_some(t.tile_weight + r, n);
    vstore_some(t.weight + r, merge_weights(weight, old_by, tile_weight, new_by), n);
    vstore_some(t.top + r, vmax(top, tile_top), n);
  });
}

void weigh_rows(const Tile& t, int64_t begin, int64_t count) {
  for (int64_t r = 0, position = t.from; r < t.rows; position++) {
    const Range own = t.seen_by(position, position, begin, count);
    for (const int64_t end = r + t.group; r < end; r++) weigh_row(t, r, own, begin, position);
  }
  merge_tile(t);
}

// MR rows share a product, in which those that don't see a value weigh it 0: one at a time unless all
// values are `finite`, for 0 doesn't hide others.
void multiply_values(const Tile& t, int64_t begin, int64_t count, bool finite) {
  const int64_t together = finite ? MR : 1;
  for (int64_t r = 0; r < t.rows; r += together) {
    const int64_t rows = std::min<int64_t>(together, t.rows - r), position = t.position(r);
    const Range seen = finite ? t.ranges[r / MR] : t.seen_by(position, position, begin, count);
    const Micro micro = micro_f32_for(static_cast<int>(rows));
    for (int64_t p = 0; p < t.panels; p++) {
      micro(t.scores + r * LDA + seen.low, t.values + (p * kTile + seen.low) * NR,
            std::max<int64_t>(0, seen.high - seen.low), t.out + r * t.ldo + p * NR, t.ldo,
            Old::kMerge, t.old_by + r, t.new_by + r);
    }
  }
}

template <class T>
void store(const Tile& t, int64_t first_token) {
  const AttentionArgs& a = t.a;
  const int64_t size = a.head_size, first = t.head * t.group;
  T* token = static_cast<T*>(a.out) + (first_token * a.q_heads + first) * size;
  const float* row = t.out;
  for (int64_t r = 0; r < t.rows; token += a.q_heads * size) {
    for (int64_t h = 0; h < t.group; h++, r++, row += t.ldo) {
      const vf scale = vset(inverse_weight(a, first + h, t.top[r], t.weight[r]));
      for_lanes(size, [&](int64_t i, int lanes) {
        vstore_some(token + h * size + i, vload(row + i) * scale, lanes);
      });
    }
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
  Tile t{a, item.seq, item.head, a.group(), offset + item.from, count * a.group(),
         a.first_seen(offset + item.from)};
  lay_out(&t).place(scratch);
  const auto queries = [&](auto* tag) {
    load_queries<std::remove_pointer_t<decltype(tag)>>(t, first_token);
    return 0;
  };
  with_float(a.dtype, queries);
  std::fill(t.out, t.out + t.rows * t.ldo, 0.0f);
  std::fill(t.top, t.top + t.rows, kNoTop);
  std::fill(t.weight, t.weight + t.rows, 0.0f);
  const int64_t end = t.from + count, low = t.seen / kTile * kTile;
  for (int64_t begin = low; begin < end; begin += kTile) {
    const int64_t tokens = std::min(kTile, end - begin);
    find_places(t, begin, tokens);
    find_ranges(t, begin, tokens);
    find_scales(t);
    const bool finite = with_cache(a.cache_dtype, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      load_keys<T>(t, tokens);
      return load_values<T>(t, tokens) ? 1 : 0;
    });
    multiply_keys(t, tokens);
    weigh_rows(t, begin, tokens);
    multiply_values(t, begin, tokens, finite);
  }
  const auto results = [&](auto* tag) {
    store<std::remove_pointer_t<decltype(tag)>>(t, first_token);
    return 0;
  };
  with_float(a.dtype, results);
}

}  // namespace quire
