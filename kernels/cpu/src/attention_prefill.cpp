// A tile of queries of one sequence over its KV, all the query heads of a KV head together.
//
// The rows of a tile are (query, head) pairs. Keys are transposed and values copied into panels,
// kTile tokens at a time, and both products run in the register-blocked microkernel. Tiles of KV
// begin at multiples of kTile, so a query's result does not depend on how a prompt was cut up.
#include "attention.h"
#include "micro.h"

namespace quire {
namespace {

constexpr int64_t kRows = W == 16 ? 112 : W == 8 ? 96 : 64;
static_assert(kTile == kDepth, "scores are the A of the second product");

struct Tile {
  const Attention& a;
  int64_t seq, head, group;
  int64_t from;   // position of the first query
  int64_t rows;   // queries x group
  int64_t seen;   // the first token that any of the queries sees
  int64_t depth;  // blocks of kDepth in a head
  int64_t panels; // panels of NR columns in a head
  int64_t ldo;    // panels * NR
  float *q, *scores, *keys, *values, *out, *top, *weight, *decay;

  int64_t position(int64_t row) const { return from + row / group; }
};

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

int64_t most_rows(const Attention& a) { return tile_queries(a) * a.group(); }

size_t lay_out(const Attention& a, Tile* tile, char* base) {
  const int64_t rows = most_rows(a), ldo = round_up(a.head_size, NR);
  const int64_t depth = (a.head_size + kDepth - 1) / kDepth;
  Layout layout;
  const size_t at[] = {
      layout.add(depth * rows * LDA * sizeof(float)), layout.add(rows * LDA * sizeof(float)),
      layout.add(kTile * a.padded() * sizeof(float)), layout.add(kTile * ldo * sizeof(float)),
      layout.add(rows * ldo * sizeof(float)),         layout.add(rows * sizeof(float)),
      layout.add(rows * sizeof(float)),               layout.add(rows * sizeof(float)),
  };
  if (tile) {
    float** parts[] = {&tile->q,   &tile->scores, &tile->keys,   &tile->values,
                       &tile->out, &tile->top,    &tile->weight, &tile->decay};
    for (int i = 0; i < 8; i++) *parts[i] = reinterpret_cast<float*>(base + at[i]);
    tile->depth = depth, tile->ldo = ldo, tile->panels = ldo / NR;
  }
  return layout.total();
}

// Queries, scaled, as [depth][row][LDA].
void load_queries(const Tile& t, int64_t first_token) {
  const Attention& a = t.a;
  for (int64_t r = 0; r < t.rows; r++) {
    const int64_t token = first_token + r / t.group, head = t.head * t.group + r % t.group;
    for (int64_t block = 0; block < t.depth; block++) {
      const int64_t d = block * kDepth, n = std::min<int64_t>(kDepth, a.head_size - d);
      float* row = t.q + (block * most_rows(a) + r) * LDA;
      read_row(row, a.q, token * a.q_stride + head * a.head_size + d, n, a.dtype);
      for_lanes(n, [&](int64_t i, int lanes) {
        vstore_some(row + i, vload_some(row + i, lanes) * vset(a.scale), lanes);
      });
    }
  }
}

// Where a token of the tile's KV lies in the caches; -1 when no query of the tile sees it. Blocks
// that have left the window may be anyone's by now, so they aren't looked at.
int64_t row_of(const Tile& t, int64_t token, int64_t end) {
  return token < t.seen || token >= end ? -1 : t.a.row(t.seq, t.head, token);
}

// `count` keys from token `begin` on, as panels of NR tokens: [panel][d][token].
template <class T>
void load_keys(const Tile& t, int64_t begin, int64_t count) {
  const Attention& a = t.a;
  const T* cache = static_cast<const T*>(a.key_cache);
  const int64_t size = a.head_size, padded = a.padded();
  for (int64_t j = 0; j < round_up(count, W); j += W) {
    const T* rows[W];
    vf scales[W];
    for (int i = 0; i < W; i++) {
      const int64_t row = row_of(t, begin + j + i, begin + count);
      rows[i] = row < 0 ? nullptr : cache + row * size;
      scales[i] = vset(row < 0 || !a.key_scales ? 1.0f : a.key_scales[row]);
    }
    float* to = t.keys + j / NR * padded * NR + j % NR;
    for_lanes(size, [&](int64_t d, int n) {
      vf block[W];
      for (int i = 0; i < W; i++) {
        block[i] = rows[i] ? vload_some(rows[i] + d, n) : vset(0.0f);
        if (a.key_scales) block[i] = block[i] * scales[i];
      }
      vtranspose(block);
      for (int i = 0; i < n; i++) vstore(to + (d + i) * NR, block[i]);
    });
  }
}

// Values as panels of NR columns: [panel][token][column]. Gives whether all of them are finite.
template <class T>
bool load_values(const Tile& t, int64_t begin, int64_t count) {
  const Attention& a = t.a;
  const T* cache = static_cast<const T*>(a.value_cache);
  vf off = vset(0.0f);
  for (int64_t j = 0; j < count; j++) {
    const int64_t row = row_of(t, begin + j, begin + count);
    const T* from = cache + (row < 0 ? 0 : row) * a.head_size;
    const vf scale = vset(row >= 0 && a.value_scales ? a.value_scales[row] : 1.0f);
    for (int64_t d = 0; d < t.ldo; d += W) {
      const int64_t left = row < 0 ? 0 : a.head_size - d;
      vf x = left <= 0 ? vset(0.0f) : left >= W ? vload(from + d) : vload_n(from + d, int(left));
      if (a.value_scales) x = x * scale;
      vstore(t.values + d / NR * kTile * NR + j * NR + d % NR, x);
      off = vfma(x, vset(0.0f), off);
    }
  }
  return vsum(off) == 0.0f;
}

// Columns of the tile that some of the rows [r, r + rows) see, as [low, high).
void seen_columns(const Tile& t, int64_t r, int64_t rows, int64_t begin, int64_t count,
                  int64_t* low, int64_t* high) {
  *low = std::max<int64_t>(0, t.a.first_seen(t.position(r)) - begin);
  *high = std::max<int64_t>(0, std::min(count, t.position(r + rows - 1) + 1 - begin));
}

void multiply_keys(const Tile& t, int64_t begin, int64_t count) {
  const int64_t size = t.a.head_size, padded = t.a.padded();
  for (int64_t j = 0; j < count; j += NR) {
    for (int64_t r = 0; r < t.rows; r += MR) {
      const int64_t rows = std::min<int64_t>(MR, t.rows - r);
      int64_t low, high;
      seen_columns(t, r, rows, begin, count, &low, &high);
      if (j + NR <= low || j >= high) continue;
      const Micro micro = micro_f32_for(static_cast<int>(rows));
      for (int64_t block = 0; block < t.depth; block++) {
        const int64_t d = block * kDepth;
        micro(t.q + (block * most_rows(t.a) + r) * LDA, t.keys + j / NR * padded * NR + d * NR,
              std::min<int64_t>(kDepth, size - d), t.scores + r * LDA + j, LDA,
              block ? Old::kKeep : Old::kDrop, nullptr);
      }
    }
  }
}

// Scores -> weights of one row; weights outside of what the row sees become 0.
void weigh_row(const Tile& t, int64_t r, int64_t begin, int64_t count) {
  const int64_t position = t.position(r);
  const int64_t low = std::max<int64_t>(0, t.a.first_seen(position) - begin);
  const int64_t high = std::min(count, position + 1 - begin);
  float* row = t.scores + r * LDA;
  if (low >= high) {
    std::fill(row, row + count, 0.0f);
    t.decay[r] = 1.0f;
    return;
  }
  std::fill(row, row + low, 0.0f);
  std::fill(row + high, row + count, 0.0f);
  const float seen = finish_scores(t.a, t.head * t.group + r % t.group, row + low, high - low,
                                   begin + low - position);
  const float top = std::max(t.top[r], seen);
  t.decay[r] = std::exp(t.top[r] - top);
  t.top[r] = top;
  t.weight[r] = t.weight[r] * t.decay[r] + weigh_scores(row + low, high - low, top);
}

// `together` rows share a product, in which those that don't see a value weigh it 0: one at a time
// where some value is NaN or infinite, which 0 doesn't hide.
void multiply_values(const Tile& t, int64_t begin, int64_t count, bool first, int64_t together) {
  for (int64_t r = 0; r < t.rows; r += together) {
    const int64_t rows = std::min<int64_t>(together, t.rows - r);
    int64_t low, high;
    seen_columns(t, r, rows, begin, count, &low, &high);
    const Micro micro = micro_f32_for(static_cast<int>(rows));
    for (int64_t p = 0; p < t.panels; p++) {
      micro(t.scores + r * LDA + low, t.values + (p * kTile + low) * NR,
            std::max<int64_t>(0, high - low), t.out + r * t.ldo + p * NR, t.ldo,
            first ? Old::kDrop : Old::kScale, t.decay + r);
    }
  }
}

void store(const Tile& t, int64_t first_token) {
  const Attention& a = t.a;
  for (int64_t r = 0; r < t.rows; r++) {
    const int64_t token = first_token + r / t.group, head = t.head * t.group + r % t.group;
    float scale = 1.0f / t.weight[r];
    if (a.sinks) {
      const float top = std::max(t.top[r], a.sinks[head]);
      const float decay = std::exp(t.top[r] - top);
      scale = decay / (t.weight[r] * decay + std::exp(a.sinks[head] - top));
    }
    float* row = t.out + r * t.ldo;
    for (int64_t d = 0; d < t.ldo; d += W) vstore(row + d, vload(row + d) * vset(scale));
    write_row(a.out, (token * a.q_heads + head) * a.head_size, row, a.head_size, a.dtype);
  }
}

}  // namespace

int64_t tile_queries(const Attention& a) { return std::max<int64_t>(1, kRows / a.group()); }

size_t prefill_scratch(const Attention& a) { return lay_out(a, nullptr, nullptr); }

void prefill_item(const Attention& a, const Item& item, char* scratch) {
  const int64_t offset = a.seq_lens[item.seq] - a.queries(item.seq);
  const int64_t count = item.to - item.from, first_token = a.starts[item.seq] + item.from;
  Tile t{a, item.seq, item.head, a.group(), offset + item.from, count * a.group(),
         a.first_seen(offset + item.from), 0, 0, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  lay_out(a, &t, scratch);
  load_queries(t, first_token);
  std::fill(t.top, t.top + t.rows, -INFINITY);
  std::fill(t.weight, t.weight + t.rows, 0.0f);
  const int64_t end = t.from + count, low = t.seen / kTile * kTile;
  for (int64_t begin = low; begin < end; begin += kTile) {
    const int64_t tokens = std::min(kTile, end - begin);
    const int finite = with_cache(a.cache_dtype, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      load_keys<T>(t, begin, tokens);
      return load_values<T>(t, begin, tokens) ? 1 : 0;
    });
    multiply_keys(t, begin, tokens);
    for (int64_t r = 0; r < t.rows; r++) weigh_row(t, r, begin, tokens);
    multiply_values(t, begin, tokens, begin == low, finite ? MR : 1);
  }
  store(t, first_token);
}

}  // namespace quire
