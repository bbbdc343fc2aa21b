// Paged attention: checks a call, divides it into items and runs them.
#include <vector>

#include "ops.h"

namespace quire {
namespace {

// The items of a call, long ones first, and the merges of decode's partial results.
struct Plan {
  std::vector<Item> items;
  std::vector<Item> merges;  // from, to: the first tile's partial results, and one past the last
  int64_t tiles = 0;         // with partial results; of all ranks, in the order of tokens
};

RankGroup* ranks_of(const AttentionArgs& a) { return static_cast<RankGroup*>(a.ranks); }
int64_t num_ranks(const AttentionArgs& a) { return a.ranks ? ranks_of(a)->size() : 1; }

void plan_prefill(const AttentionArgs& a, int64_t s, Plan* plan) {
  const int64_t queries = a.queries(s), tile = tile_queries(a);
  const int32_t seq = static_cast<int32_t>(s);
  for (int64_t from = (queries - 1) / tile * tile; from >= 0; from -= tile) {
    if (!a.wants(a.starts[s] + from, a.starts[s] + std::min(queries, from + tile))) continue;
    for (int32_t head = 0; head < a.kv_heads; head++) {
      plan->items.push_back({seq, head, 1, false, from, std::min(queries, from + tile), 0});
    }
  }
}

// Where the item ends that begins with a token, at the latest.
int64_t end_of_item(const AttentionArgs& a, int64_t token) {
  const int64_t end = (token / kChunk + 1) * kChunk;
  return a.ranks ? std::min(end, (token / a.block_size + 1) * a.block_size) : end;
}

// Number of pieces of `size` tokens of KV that a decoding sequence's query sees.
int64_t pieces_of(const AttentionArgs& a, int64_t s, int64_t size) {
  const int64_t length = a.seq_lens[s], begin = a.first_seen(length - 1);
  return (length - 1) / size - begin / size + 1;
}

// Number of items of a decoding sequence for each KV head or group of KV heads, of all ranks.
int64_t parts_of(const AttentionArgs& a, int64_t s) { return pieces_of(a, s, kChunk); }

// At most `heads` KV heads share an item: they are adjacent in a block. With ranks, this one has
// items for its own tokens, and partial results of whole blocks.
void plan_decode(const AttentionArgs& a, int64_t s, int64_t heads, Plan* plan) {
  const int64_t length = a.seq_lens[s], begin = a.first_seen(length - 1);
  const int64_t unit = a.ranks ? a.table_size() : kTile, origin = begin / unit * unit;
  const int64_t own = plan->tiles / num_ranks(a);
  const int32_t seq = static_cast<int32_t>(s);
  for (int64_t from = begin, to; from < length; from = to) {
    to = std::min(length, end_of_item(a, from));
    if (!a.has(from)) continue;
    const int64_t before = from - origin;
    const int64_t here = a.ranks ? before / unit * a.block_size + before % a.block_size : before;
    for (int64_t head = 0; head < a.kv_heads; head += heads) {
      const int64_t count = std::min(heads, a.kv_heads - head);
      plan->items.push_back({seq, static_cast<int32_t>(head), static_cast<int32_t>(count), true,
                             from, to, own + here / kTile});
    }
  }
  const int64_t first = plan->tiles + (begin - origin) / kTile;
  const int64_t end = plan->tiles + (length - 1 - origin) / kTile + 1;
  for (int32_t head = 0; head < a.kv_heads; head++)
    plan->merges.push_back({seq, head, 1, true, first, end, 0});
  plan->tiles += pieces_of(a, s, unit) * (unit / kTile);
}

// Items per thread: enough that threads end at nearly the same time. More items have fewer heads each,
// and an item with all heads of its blocks reads memory in order: with eight items per thread a
// sequence of 1,500 tokens took 1.3 to 2.5 times as long.
constexpr int64_t kItemsEach = 2;

Plan make_plan(const AttentionArgs& a, int threads) {
  Plan plan;
  int64_t parts = 0;
  for (int64_t s = 0; s < a.num_seqs; s++) {
    if (a.queries(s) > 1 && !a.ranks) plan_prefill(a, s, &plan);
    if (a.queries(s) == 1) parts += parts_of(a, s);
  }
  const int64_t fair = parts * a.kv_heads / (kItemsEach * threads * num_ranks(a));
  const int64_t heads = std::max<int64_t>(1, std::min(fair, a.kv_heads));
  for (int64_t s = 0; s < a.num_seqs; s++) {
    if (a.queries(s) == 1) plan_decode(a, s, heads, &plan);
  }
  return plan;
}

// Approximate number of multiply-adds of the call.
int64_t cost(const AttentionArgs& a) {
  int64_t seen = 0;
  for (int64_t s = 0; s < a.num_seqs; s++) seen += a.queries(s) * a.seq_lens[s];
  return seen * a.q_heads * a.head_size * 2;
}

// Gathers the ranks' partial results of `tiles` tiles, so that they are in the order of tokens.
int gather_partials(const AttentionArgs& a, int64_t tiles, const float* own, float* out,
                    int threads) {
  const int64_t part = a.block_size / kTile * partial_size(a);  // of a rank's tokens of a block
  std::vector<int64_t> starts;
  for (int rank = 0; rank <= num_ranks(a); rank++) starts.push_back(rank * part);
  return gather_columns(*ranks_of(a), out, own, part, tiles * kTile / a.table_size(), starts,
                        threads);
}

// Gathers the ranks' parts of a sequence's blocks [first, first + count) from a cache with
// `row_bytes` per token and head: out [count, kv_heads, table_size].
int gather_blocks(const AttentionArgs& a, int64_t s, int64_t first, int64_t count,
                  const void* cache, int64_t row_bytes, float* out, int threads) {
  const int64_t part = a.block_size * row_bytes;
  std::vector<int64_t> starts;
  for (int rank = 0; rank <= ranks_of(a)->size(); rank++)
    starts.push_back(rank * part / static_cast<int64_t>(sizeof(float)));
  const int32_t* table = a.block_tables + s * a.table_stride + first;
  return gather_rows(
      *ranks_of(a), out,
      [&](int64_t i) {
        const int64_t block = table[i / a.kv_heads] * a.kv_heads + i % a.kv_heads;
        return reinterpret_cast<const float*>(static_cast<const char*>(cache) + block * part);
      },
      count * a.kv_heads, starts, threads);
}

// Attention of all queries; with ranks only of those that are their sequence's only one.
int attend(const AttentionArgs& a, int threads) {
  const int team = worth(threads, cost(a), 65536);
  const Plan plan = make_plan(a, team);
  const size_t each = (std::max(decode_scratch(a), prefill_scratch(a)) + 127) / 64 * 64;
  float *partials, *gathered;
  char* scratch;
  Layout layout;
  layout.add(&partials, plan.tiles / num_ranks(a) * partial_size(a));
  layout.add(&gathered, a.ranks ? plan.tiles * partial_size(a) : 0);
  layout.add(&scratch, team * each);
  layout.take(Scratch::kAttention);
  deal(team, static_cast<int64_t>(plan.items.size()), [&](int64_t i, int slot) {
    const Item& item = plan.items[i];
    char* own = scratch + slot * each;
    if (item.decodes) {
      decode_item(a, item, own, partials + item.partial * partial_size(a));
    } else {
      prefill_item(a, item, own);
    }
  });
  if (a.ranks) {
    if (const int wrong = gather_partials(a, plan.tiles, partials, gathered, threads)) return wrong;
    partials = gathered;
  }
  deal(team, static_cast<int64_t>(plan.merges.size()), [&](int64_t i, int slot) {
    const Item& m = plan.merges[i];
    float* own = reinterpret_cast<float*>(scratch + slot * each);
    merge_partials(a, m.seq, m.head, partials + m.from * partial_size(a), m.to - m.from, own);
  });
  return kOk;
}

// Attends from several queries of a sequence, of whose tokens each rank has some: gathers them.
int attend_gathered(const AttentionArgs& a, int64_t s, int threads) {
  const int64_t size = a.table_size(), length = a.seq_lens[s];
  const int64_t first = a.first_seen(length - a.queries(s)) / size;
  const int64_t count = (length - 1) / size + 1 - first;
  const int64_t rows = count * a.kv_heads * size;
  const int64_t row_bytes = a.head_size * static_cast<int64_t>(size_of(a.cache_dtype));
  const bool latents = a.key_cache == a.value_cache, scaled = a.cache_dtype == kI8;
  float *keys, *values, *key_scales, *value_scales;
  int32_t* table;
  Layout layout;
  // Kernels may read a vector past the end.
  layout.add(&keys, rows * row_bytes / 4 + W);
  layout.add(&values, latents ? 0 : rows * row_bytes / 4 + W);
  layout.add(&key_scales, scaled ? rows : 0);
  layout.add(&value_scales, scaled && !latents ? rows : 0);
  layout.add(&table, first + count);
  layout.take(Scratch::kContext);
  const auto gather = [&](const void* cache, int64_t bytes, float* out) {
    return gather_blocks(a, s, first, count, cache, bytes, out, threads);
  };
  int wrong = gather(a.key_cache, row_bytes, keys);
  if (!wrong && !latents) wrong = gather(a.value_cache, row_bytes, values);
  if (!wrong && scaled) wrong = gather(a.key_scales, sizeof(float), key_scales);
  if (!wrong && scaled && !latents) wrong = gather(a.value_scales, sizeof(float), value_scales);
  if (wrong) return wrong;
  for (int64_t i = 0; i < first + count; i++) table[i] = static_cast<int32_t>(std::max<int64_t>(0, i - first));
  AttentionArgs one = a;
  one.ranks = nullptr, one.num_seqs = 1;
  one.seq_lens = a.seq_lens + s, one.starts = a.starts + s;
  one.key_cache = keys, one.value_cache = latents ? keys : values;
  if (scaled) one.key_scales = key_scales, one.value_scales = latents ? key_scales : value_scales;
  one.num_blocks = count, one.block_size = size;
  one.block_tables = table, one.table_stride = first + count;
  return attend(one, threads);
}

}  // namespace

int check_attention(const AttentionArgs& a) {
  int64_t before = 0;
  for (int64_t s = 0; s < a.num_seqs; s++) {
    const int64_t length = a.seq_lens[s], queries = a.starts[s + 1] - a.starts[s];
    if (a.starts[s] != before || queries < 0 || queries > length) return kBadSequence;
    before += queries;
    const int64_t size = a.table_size(), blocks = (length + size - 1) / size;
    if (blocks > a.table_stride) return kBadSequence;
    const int64_t seen = queries ? a.first_seen(length - queries) / size : blocks;
    for (int64_t i = seen; i < blocks; i++) {
      const int32_t block = a.block_tables[s * a.table_stride + i];
      if (block < 0 || block >= a.num_blocks) return kBadBlock;
    }
    if (!a.visible_ends) continue;
    int64_t end = 0;  // of a sequence; they must not decrease
    for (int64_t i = 0; i < queries; i++) {
      const int64_t last = end, position = length - queries + i;
      end = a.visible_ends[a.starts[s] + i];
      if (end < last || end <= position || end > length) return kBadSequence;
    }
  }
  return before == a.tokens ? kOk : kBadSequence;
}

int paged_attention(const AttentionArgs& a, int threads) {
  if (const int wrong = check_attention(a)) return wrong;
  for (int64_t s = 0; a.ranks && s < a.num_seqs; s++) {
    if (a.queries(s) < 2 || !a.wants(a.starts[s], a.starts[s + 1])) continue;
    if (const int wrong = attend_gathered(a, s, threads)) return wrong;
  }
  return attend(a, threads);
}

}  // namespace quire

extern "C" int quire_paged_attention(const AttentionArgs* args, int threads) {
  return guarded([&] { return paged_attention(*args, threads); });
}
