// Rows are sorted by expert, so that the weights of each used expert are read once. A row adds up
// its experts in their order, whatever the other rows are.
#include "experts.h"

#include "ranks.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace quire {
namespace {

// Rows that an expert processes together; bounds its buffers.
constexpr int64_t kRowsAtOnce = 512;

struct Buffers {
  float* scores;           // [rows, count], of the router or of the shared expert's gate
  float* weights;          // [rows, top_k]
  int32_t* chosen;         // [rows, top_k]
  int32_t* open;           // [rows, groups], whether the token may use a group's experts
  float* rows;             // [kRowsAtOnce, hidden], the inputs of an expert
  float *gated, *inner;    // [kRowsAtOnce, 2 inner], [kRowsAtOnce, inner]
  float* out;              // [kRowsAtOnce, hidden], the outputs of the expert
  float* pairs;            // [kRowsAtOnce * top_k, hidden], the outputs of all experts, if ranks
                           // share them
  float* all;              // [kRowsAtOnce, hidden], the rows of all ranks, if each has its own
};

// The score by which an expert is chosen.
float choice_score(const Experts& e, const float* scores, int64_t i) {
  return e.choice_bias ? scores[i] + e.choice_bias[i] : scores[i];
}

// The score by which a group is chosen: its best one, or the sum of its two best.
float group_score(const Experts& e, const float* scores, int64_t group) {
  const int64_t size = e.count / e.groups;
  float best = -INFINITY, second = -INFINITY;
  for (int64_t i = group * size; i < (group + 1) * size; i++) {
    const float score = choice_score(e, scores, i);
    second = std::max(second, std::min(best, score));
    best = std::max(best, score);
  }
  return e.group_best > 1 ? best + second : best;
}

// Marks the groups that a token may use; of equal ones the first.
void open_groups(const Experts& e, const float* scores, int32_t* open) {
  const bool all = e.top_groups == e.groups;
  std::fill(open, open + e.groups, all);
  if (all) return;
  for (int64_t n = 0; n < e.top_groups; n++) {
    int64_t best = -1;
    float most = 0;
    for (int64_t group = 0; group < e.groups; group++) {
      if (open[group]) continue;
      const float score = group_score(e, scores, group);
      if (best < 0 || score > most) best = group, most = score;
    }
    open[best] = 1;
  }
}

// The expert with the highest score in the `open` groups that isn't taken; of equal ones the first.
int32_t best_of(const Experts& e, const float* scores, const int32_t* open, const int32_t* taken,
                int64_t num_taken) {
  const int64_t size = e.count / e.groups;
  int32_t best = -1;
  for (int64_t group = 0; group < e.groups; group++) {
    if (!open[group]) continue;
    for (int64_t i = group * size; i < (group + 1) * size; i++) {
      bool free = true;
      for (int64_t j = 0; j < num_taken; j++) free = free && taken[j] != i;
      if (free && (best < 0 || choice_score(e, scores, i) > choice_score(e, scores, best))) {
        best = static_cast<int32_t>(i);
      }
    }
  }
  return best;
}

// Added to a sum of sigmoids, so that it isn't 0.
constexpr float kLeast = 1e-20f;

void softmax(float* x, int64_t count) {
  float top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < count; i++) top = std::max(top, x[i]);
  for (int64_t i = 0; i < count; i++) sum += x[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < count; i++) x[i] /= sum;
}

void route_row(const Experts& e, float* scores, int32_t* open, int32_t* chosen, float* weights) {
  for (int64_t i = 0; e.sigmoid && i < e.count; i++) scores[i] = 1 / (1 + std::exp(-scores[i]));
  if (!e.sigmoid && e.softmax_first) softmax(scores, e.count);
  open_groups(e, scores, open);
  float sum = 0;
  for (int64_t i = 0; i < e.top_k; i++) {
    chosen[i] = best_of(e, scores, open, chosen, i);
    sum += weights[i] = scores[chosen[i]];
  }
  const bool over_chosen = !e.sigmoid && !e.softmax_first;
  if (over_chosen) softmax(weights, e.top_k);
  const float by = over_chosen || !e.renormalize ? 1 : sum + kLeast;
  for (int64_t i = 0; i < e.top_k; i++) weights[i] = weights[i] / by * e.scale;
}

// run_mlp of a gated MLP, where `adapt_up` and `adapt_down` add to the complete products.
template <class Up, class Down>
int run_adapted(const Mlp& w, float* out, const float* x, int64_t rows, const Buffers& b, Up&& adapt_up,
                Down&& adapt_down, int threads) {
  int wrong = linear(*w.gate_up, b.gated, x, w.gate_up->k, rows, kF32, threads);
  if (wrong) return wrong;
  adapt_up(b.gated, w.gate_up->n, x, w.gate_up->k);
  gate_and_mul(b.inner, b.gated, rows, w.inner, w.act, threads);
  wrong = linear(*w.down, out, b.inner, w.inner, rows, kF32, threads);
  if (wrong) return wrong;
  adapt_down(out, w.down->n, b.inner, w.inner);
  return kOk;
}

int run_shared_mlp(const Mlp& w, float* out, const float* x, int64_t low, int64_t rows,
                   const Buffers& b, const LayerAdapters& adapters, int threads) {
  if (!adapters.count) return run_mlp(w, out, x, rows, b.inner, b.gated, threads);
  const auto add = [&](const LoraLinear* LoraLayer::* slot) {
    return [&, slot](float* y, int64_t n, const float* of, int64_t k) {
      adapt(adapters, slot, y, n, of, k, low, rows, threads);
    };
  };
  return run_adapted(w, out, x, rows, b, add(&LoraLayer::shared_up), add(&LoraLayer::shared_down),
                     threads);
}

// out = the output of the expert of all tokens, or zeros.
int run_shared(const Experts& e, float* out, const float* x, int64_t rows, const Buffers& b,
               const LayerAdapters& adapters, int threads) {
  if (!e.shared_down) {
    std::fill(out, out + rows * e.hidden, 0.0f);
    return kOk;
  }
  const Mlp mlp{e.shared_gate_up, e.shared_down, e.shared_inner, true, e.act};
  int wrong = kOk;
  for (int64_t row = 0; row < rows && !wrong; row += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, rows - row), at = row * e.hidden;
    wrong = run_shared_mlp(mlp, out + at, x + at, row, count, b, adapters, threads);
  }
  if (wrong || !e.shared_gate) return wrong;
  wrong = linear(*e.shared_gate, b.scores, x, e.hidden, rows, kF32, threads);
  if (wrong) return wrong;
  adapt(adapters, &LoraLayer::shared_gate, b.scores, 1, x, e.hidden, 0, rows, threads);
  for (int64_t row = 0; row < rows; row++) {
    const vf by = vset(1.0f / (1.0f + std::exp(-b.scores[row])));
    float* to = out + row * e.hidden;
    for_lanes(e.hidden, [&](int64_t i, int n) {
      vstore_some(to + i, vload_some(to + i, n) * by, n);
    });
  }
  return wrong;
}

struct Hit {
  int64_t row;
  float weight;
};

// The adapters of an expert's rows, for its two products.
struct HitUses {
  std::vector<int64_t> places;
  std::vector<LoraUse> ups, downs;

  // `group_of`: the group of each row of x, -1 for none.
  HitUses(const LayerAdapters& adapters, const std::vector<int32_t>& group_of, int64_t index,
          const Hit* hits, int64_t count) {
    std::vector<std::pair<int32_t, int64_t>> found;
    for (int64_t i = 0; i < count; i++)
      if (const int32_t group = group_of[hits[i].row]; group >= 0) found.emplace_back(group, i);
    std::stable_sort(found.begin(), found.end(),
                     [](const auto& one, const auto& other) { return one.first < other.first; });
    for (const auto& [group, place] : found) places.push_back(place);
    for (size_t from = 0, to; from < found.size(); from = to) {
      for (to = from; to < found.size() && found[to].first == found[from].first;) to++;
      const LoraLayer& layer = adapters.groups[found[from].first].layers[adapters.layer];
      const int64_t* of = places.data() + from;
      const int64_t some = static_cast<int64_t>(to - from);
      if (layer.expert_ups && layer.expert_ups[index]) ups.push_back({layer.expert_ups[index], of, some});
      if (layer.expert_downs && layer.expert_downs[index])
        downs.push_back({layer.expert_downs[index], of, some});
    }
  }
};

int run_hit_mlp(const Mlp& w, float* out, const float* x, int64_t rows, const Buffers& b,
                const HitUses& uses, int threads) {
  if (uses.ups.empty() && uses.downs.empty())
    return run_mlp(w, out, x, rows, b.inner, b.gated, threads);
  const auto add = [&](const std::vector<LoraUse>& some) {
    return [&](float* y, int64_t n, const float* of, int64_t k) {
      if (!some.empty())
        add_lora(y, n, of, k, some.data(), static_cast<int64_t>(some.size()), 0, threads);
    };
  };
  return run_adapted(w, out, x, rows, b, add(uses.ups), add(uses.downs), threads);
}

// to [count, hidden] = an expert's outputs for the rows in `hits`.
int run_hits(const Experts& e, int64_t index, const Hit* hits, int64_t count, float* to,
             const float* x, const Buffers& b, const HitUses& uses, int threads) {
  const float* rows = x + hits[0].row * e.hidden;
  if (count > 1) {
    for (int64_t i = 0; i < count; i++) {
      std::memcpy(b.rows + i * e.hidden, x + hits[i].row * e.hidden, e.hidden * sizeof(float));
    }
    rows = b.rows;
  }
  const Mlp mlp{e.gate_up[index], e.down[index], e.inner, true, e.act};
  return run_hit_mlp(mlp, to, rows, count, b, uses, threads);
}

// Adds an expert's weighted outputs to the rows in `hits`.
void add_hits(const Experts& e, const Hit* hits, int64_t count, float* out, const float* said,
              int threads) {
  deal_ranges(worth(threads, count * e.hidden, 16384), count, 1, [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; i++) {
      float* to = out + hits[i].row * e.hidden;
      const float* from = said + i * e.hidden;
      const vf by = vset(hits[i].weight);
      for_lanes(e.hidden, [&](int64_t j, int n) {
        vstore_some(to + j, vload_some(to + j, n) + vload_some(from + j, n) * by, n);
      });
    }
  });
}

// The adapter group of each row, -1 for none.
std::vector<int32_t> groups_of(const LayerAdapters& adapters, int64_t rows) {
  std::vector<int32_t> found(rows, -1);
  for (int64_t g = 0; g < adapters.count; g++)
    for (int64_t i = 0; i < adapters.groups[g].count; i++)
      found[adapters.groups[g].rows[i]] = static_cast<int32_t>(g);
  return found;
}

using Hits = std::vector<std::vector<Hit>>;

// Rows whose experts belong to several ranks. Each rank runs its own experts and receives the
// others' outputs for all rows, so that it can add up in the order of experts. Ranks with the same
// expert divide its rows. pairs [rows * top_k, hidden]. `out` are the rows [low, high) of x.
int run_shared_out(const Experts& e, const Hits& hits, float* out, int64_t low, int64_t high,
                   const float* x, const Buffers& b, float* pairs, int threads) {
  RankGroup& group = *static_cast<RankGroup*>(e.ranks);
  const int64_t per_round = group.slot_floats() / e.hidden;
  if (per_round < 1) return kNoMemory;
  std::vector<int64_t> first(e.count + 1, 0);  // index of each expert's first pair
  std::vector<std::vector<int64_t>> dealt(group.size());  // each rank's pairs
  for (int64_t i = 0; i < e.count; i++) {
    const int64_t all = static_cast<int64_t>(hits[i].size());
    first[i + 1] = first[i] + all;
    e.loads[i] += all;
    const int32_t* owners = e.owners + i * e.copies;
    const int64_t num_owners = std::find(owners, owners + e.copies, -1) - owners;
    for (int64_t copy = 0; copy < num_owners; copy++) {
      const int64_t from = all * copy / num_owners, to = all * (copy + 1) / num_owners;
      for (int64_t j = from; j < to; j++) dealt[owners[copy]].push_back(first[i] + j);
      for (int64_t j = from; owners[copy] == group.rank() && j < to; j += kRowsAtOnce) {
        const HitUses none({}, {}, i, nullptr, 0);
        if (const int wrong = run_hits(e, i, hits[i].data() + j, std::min(kRowsAtOnce, to - j),
                                       pairs + (first[i] + j) * e.hidden, x, b, none, threads))
          return wrong;
      }
    }
  }
  int64_t most = 0;
  for (const auto& of_rank : dealt) most = std::max(most, static_cast<int64_t>(of_rank.size()));
  for (int64_t done = 0; done < most; done += per_round) {
    const auto copy = [&](int rank, auto&& one) {
      const int64_t end = std::min(done + per_round, static_cast<int64_t>(dealt[rank].size()));
      for (int64_t j = done; j < end; j++)
        one(pairs + dealt[rank][j] * e.hidden, group.slot(rank) + (j - done) * e.hidden);
    };
    const size_t bytes = e.hidden * sizeof(float);
    copy(group.rank(), [&](float* pair, float* place) { std::memcpy(place, pair, bytes); });
    const int64_t widest = std::min(per_round, most - done) * e.hidden;
    if (const int wrong = group.arrive(widest)) return wrong;
    for (int r = 0; r < group.size(); r++) {
      if (r == group.rank()) continue;
      copy(r, [&](float* pair, float* place) { std::memcpy(pair, place, bytes); });
    }
    group.advance();
  }
  for (int64_t i = 0; i < e.count; i++) {
    const auto begins = [](const Hit& hit, int64_t row) { return hit.row < row; };
    const auto from = std::lower_bound(hits[i].begin(), hits[i].end(), low, begins);
    std::vector<Hit> local(from, std::lower_bound(from, hits[i].end(), high, begins));
    for (Hit& hit : local) hit.row -= low;
    const float* said = pairs + (first[i] + (from - hits[i].begin())) * e.hidden;
    if (!local.empty())
      add_hits(e, local.data(), static_cast<int64_t>(local.size()), out, said, threads);
  }
  return kOk;
}

// The header of a slot if each rank has its own rows: how many it gathers now, and whether it has
// more.
struct LocalRows {
  int32_t count, more;
  static constexpr int64_t kFloats = 2;
};

// This rank's rows, whose experts belong to several ranks with their own rows. All ranks gather all
// rows and their chosen experts, round by round until no rank has more. A rank without rows takes
// part, since others may choose its experts. Of ranks with the same rows the first one shows them.
int run_local_rows(const Experts& e, float* out, const float* x, int64_t rows, const Buffers& b,
                 int threads) {
  RankGroup& group = *static_cast<RankGroup*>(e.ranks);
  const int64_t width = e.hidden + e.top_k, room = group.slot_floats() - LocalRows::kFloats;
  const int shows = group.rank() - group.rank() % e.row_ranks;  // the rank that shows these rows
  const int64_t most = std::min<int64_t>(kRowsAtOnce * e.row_ranks / group.size(), room / width);
  if (most < 1) return kNoMemory;
  bool more = true;
  for (int64_t row = 0; more; row += most) {
    const int64_t local = std::max<int64_t>(0, std::min(most, rows - row));
    const int64_t shown = shows == group.rank() ? local : 0;
    const LocalRows header{static_cast<int32_t>(shown), rows - row > most};
    float* to = group.slot();
    std::memcpy(to, &header, sizeof(header));
    to += LocalRows::kFloats;
    if (shown) {
      std::memcpy(to, x + row * e.hidden, shown * e.hidden * sizeof(float));
      std::memcpy(to + shown * e.hidden, b.chosen + row * e.top_k, shown * e.top_k * sizeof(int32_t));
    }
    if (const int wrong = group.arrive(LocalRows::kFloats + most * width)) return wrong;
    Hits hits(e.count);
    int64_t all = 0, low = 0;
    more = false;
    for (int r = 0; r < group.size(); r++) {
      const float* from = group.slot(r) + LocalRows::kFloats;
      LocalRows given;
      std::memcpy(&given, group.slot(r), sizeof(given));
      if (r == shows) low = all;
      if (given.count) std::memcpy(b.all + all * e.hidden, from, given.count * e.hidden * sizeof(float));
      for (int64_t i = 0; i < given.count * e.top_k; i++) {
        int32_t chosen;
        std::memcpy(&chosen, from + given.count * e.hidden + i, sizeof(chosen));
        const float weight = r == shows ? b.weights[row * e.top_k + i] : 0;
        hits[chosen].push_back({all + i / e.top_k, weight});
      }
      all += given.count;
      more = more || given.more;
    }
    group.advance();
    if (const int wrong = run_shared_out(e, hits, out + row * e.hidden, low, low + local, b.all, b,
                                         b.pairs, threads))
      return wrong;
  }
  return kOk;
}

int run_chosen(const Experts& e, float* out, const float* x, int64_t rows, const Buffers& b,
               const LayerAdapters& adapters, int threads) {
  const std::vector<int32_t> group_of = groups_of(adapters, rows);
  const auto hits_of = [&](int64_t low, int64_t high) {
    Hits hits(e.count);
    for (int64_t row = low; row < high; row++) {
      for (int64_t i = row * e.top_k; i < (row + 1) * e.top_k; i++) {
        hits[b.chosen[i]].push_back({row, b.weights[i]});
      }
    }
    return hits;
  };
  if (e.ranks && e.row_ranks) return run_local_rows(e, out, x, rows, b, threads);
  for (int64_t row = 0; e.ranks && row < rows; row += kRowsAtOnce) {
    const int64_t end = std::min(rows, row + kRowsAtOnce), at = row * e.hidden;
    if (const int wrong = run_shared_out(e, hits_of(row, end), out + at, row, end, x, b, b.pairs,
                                         threads))
      return wrong;
  }
  if (e.ranks) return kOk;
  const Hits hits = hits_of(0, rows);
  for (int64_t index = 0; index < e.count; index++) {
    const int64_t all = static_cast<int64_t>(hits[index].size());
    for (int64_t from = 0; from < all; from += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, all - from);
      const Hit* some = hits[index].data() + from;
      const HitUses uses(adapters, group_of, index, some, count);
      if (const int wrong = run_hits(e, index, some, count, b.out, x, b, uses, threads))
        return wrong;
      add_hits(e, some, count, out, b.out, threads);
    }
  }
  return kOk;
}

}  // namespace

int run_experts(const Experts& e, float* out, const float* x, int64_t rows,
                const LayerAdapters& adapters, int threads) {
  const bool local_rows = e.ranks && e.row_ranks;  // then others' rows use the experts here as
                                                    // well
  const int64_t most = local_rows ? kRowsAtOnce : std::min(rows, kRowsAtOnce);
  const int64_t inner = std::max(e.inner, e.shared_inner);
  Buffers b;
  Layout layout;
  layout.add(&b.scores, rows * std::max<int64_t>(e.count, 1));
  layout.add(&b.weights, rows * e.top_k);
  layout.add(&b.chosen, rows * e.top_k);
  layout.add(&b.open, rows * e.groups);
  layout.add(&b.rows, most * e.hidden);
  layout.add(&b.gated, most * 2 * inner);
  layout.add(&b.inner, most * inner);
  layout.add(&b.out, most * e.hidden);
  layout.add(&b.pairs, e.ranks ? most * e.top_k * e.hidden : 0);
  layout.add(&b.all, local_rows ? most * e.hidden : 0);
  layout.take(Scratch::kExperts);
  int wrong = run_shared(e, out, x, rows, b, adapters, threads);
  if (!wrong) wrong = linear(*e.router, b.scores, x, e.hidden, rows, kF32, threads);
  if (wrong) return wrong;
  adapt(adapters, &LoraLayer::router, b.scores, e.count, x, e.hidden, 0, rows, threads);
  deal_ranges(worth(threads, rows * e.count * e.top_k, 16384), rows, 1,
              [&](int64_t low, int64_t high) {
                for (int64_t row = low; row < high; row++) {
                  route_row(e, b.scores + row * e.count, b.open + row * e.groups,
                            b.chosen + row * e.top_k, b.weights + row * e.top_k);
                }
              });
  return run_chosen(e, out, x, rows, b, adapters, threads);
}

}  // namespace quire

// out, x [rows, hidden] float32. Rows of `groups`, whose tables are of one layer, are in [0, rows).
extern "C" int quire_run_experts(const void* experts, float* out, const float* x, int64_t rows,
                                 const LoraGroup* groups, int64_t num_groups, int threads) {
  for (int64_t g = 0; g < num_groups; g++)
    for (int64_t i = 0; i < groups[g].count; i++)
      if (groups[g].rows[i] < 0 || groups[g].rows[i] >= rows) return kBadRow;
  return guarded([&] {
    const LayerAdapters adapters{groups, num_groups, 0};
    return run_experts(*static_cast<const Experts*>(experts), out, x, rows, adapters, threads);
  });
}
