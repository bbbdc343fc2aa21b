// Paged attention: checks a call, divides it into items and runs them.
#include <vector>

#include "ops.h"

namespace quire {
namespace {

// The items of a call, long ones first, and the merges of decode's partial results.
struct Plan {
  std::vector<Item> items;
  std::vector<Item> merges;  // from, to: the first partial result, and one past the last
  int64_t partials = 0;
};

void plan_prefill(const AttentionArgs& a, int64_t s, Plan* plan) {
  const int64_t queries = a.queries(s), tile = tile_queries(a);
  const int32_t seq = static_cast<int32_t>(s);
  for (int64_t from = (queries - 1) / tile * tile; from >= 0; from -= tile) {
    if (!a.wants(a.starts[s] + from, a.starts[s] + std::min(queries, from + tile))) continue;
    for (int32_t head = 0; head < a.kv_heads; head++) {
      plan->items.push_back({seq, head, 1, false, from, std::min(queries, from + tile), 0, 0});
    }
  }
}

int64_t end_of_chunk(int64_t token) { return (token / kChunk + 1) * kChunk; }

// Number of pieces of `size` tokens of KV that a decoding sequence's query sees.
int64_t pieces_of(const AttentionArgs& a, int64_t s, int64_t size) {
  const int64_t length = a.seq_lens[s], begin = a.first_seen(length - 1);
  return (length - 1) / size - begin / size + 1;
}

// Number of items of a decoding sequence for each KV head or group of KV heads.
int64_t parts_of(const AttentionArgs& a, int64_t s) { return pieces_of(a, s, kChunk); }

// At most `heads` KV heads share an item: they are adjacent in a block.
void plan_decode(const AttentionArgs& a, int64_t s, int64_t heads, Plan* plan) {
  const int64_t length = a.seq_lens[s], tiles = pieces_of(a, s, kTile), parts = parts_of(a, s);
  const int32_t seq = static_cast<int32_t>(s);
  int64_t from = a.first_seen(length - 1);
  const int64_t first_tile = from / kTile;
  for (int64_t chunk = 0; chunk < parts; chunk++) {
    const int64_t to = chunk + 1 == parts ? length : end_of_chunk(from);
    for (int64_t head = 0; head < a.kv_heads; head += heads) {
      const int64_t count = std::min(heads, a.kv_heads - head);
      plan->items.push_back({seq, static_cast<int32_t>(head), static_cast<int32_t>(count), true,
                             from, to, plan->partials + head * tiles + from / kTile - first_tile,
                             tiles});
    }
    from = to;
  }
  for (int32_t head = 0; head < a.kv_heads; head++, plan->partials += tiles) {
    plan->merges.push_back({seq, head, 1, true, plan->partials, plan->partials + tiles, 0, 0});
  }
}

// Items per thread, so that the last one to finish isn't much later.
constexpr int64_t kItemsEach = 8;

Plan make_plan(const AttentionArgs& a, int threads) {
  Plan plan;
  int64_t parts = 0;
  for (int64_t s = 0; s < a.num_seqs; s++) {
    if (a.queries(s) > 1) plan_prefill(a, s, &plan);
    if (a.queries(s) == 1) parts += parts_of(a, s);
  }
  const int64_t fair = parts * a.kv_heads / (kItemsEach * threads);
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

}  // namespace

int check_attention(const AttentionArgs& a) {
  int64_t before = 0;
  for (int64_t s = 0; s < a.num_seqs; s++) {
    const int64_t length = a.seq_lens[s], queries = a.starts[s + 1] - a.starts[s];
    if (a.starts[s] != before || queries < 0 || queries > length) return kBadSequence;
    before += queries;
    const int64_t blocks = (length + a.block_size - 1) / a.block_size;
    if (blocks > a.table_stride) return kBadSequence;
    const int64_t seen = queries ? a.first_seen(length - queries) / a.block_size : blocks;
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
  const int team = worth(threads, cost(a), 65536);
  const Plan plan = make_plan(a, team);
  const size_t each = (std::max(decode_scratch(a), prefill_scratch(a)) + 127) / 64 * 64;
  float* partials;
  char* scratch;
  Layout layout;
  layout.add(&partials, plan.partials * partial_size(a));
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
  deal(team, static_cast<int64_t>(plan.merges.size()), [&](int64_t i, int slot) {
    const Item& m = plan.merges[i];
    float* own = reinterpret_cast<float*>(scratch + slot * each);
    merge_partials(a, m.seq, m.head, partials + m.from * partial_size(a), m.to - m.from, own);
  });
  return kOk;
}

}  // namespace quire

extern "C" int quire_paged_attention(const AttentionArgs* args, int threads) {
  return guarded([&] { return paged_attention(*args, threads); });
}
