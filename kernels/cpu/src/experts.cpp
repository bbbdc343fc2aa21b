// Rows are sorted by expert, so that the weights of each expert that is hit are read once; a row's
// sum goes through its experts in their order, whatever other rows there are.
#include "experts.h"

#include <vector>

namespace quire {
namespace {

// Rows that go through an expert together; bounds its buffers.
constexpr int64_t kRowsAtOnce = 512;

struct Buffers {
  float* scores;           // [rows, count], of the router or of the gate of the shared expert
  float* weights;          // [rows, top_k]
  int32_t* chosen;         // [rows, top_k]
  float* rows;             // [kRowsAtOnce, hidden], those that an expert is to see
  float *gated, *inner;    // [kRowsAtOnce, 2 inner], [kRowsAtOnce, inner]
  float* out;              // [kRowsAtOnce, hidden], what the expert says of them
};

// The expert with the highest score that isn't taken yet; of equal ones the first.
int32_t best_of(const float* scores, int64_t count, const int32_t* taken, int64_t num_taken) {
  int32_t best = -1;
  for (int32_t i = 0; i < count; i++) {
    bool free = true;
    for (int64_t j = 0; j < num_taken; j++) free = free && taken[j] != i;
    if (free && (best < 0 || scores[i] > scores[best])) best = i;
  }
  return best;
}

void softmax(float* x, int64_t count) {
  float top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < count; i++) top = std::max(top, x[i]);
  for (int64_t i = 0; i < count; i++) sum += x[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < count; i++) x[i] /= sum;
}

void route_row(const Experts& e, float* scores, int32_t* chosen, float* weights) {
  if (e.softmax_first) softmax(scores, e.count);
  float sum = 0;
  for (int64_t i = 0; i < e.top_k; i++) {
    chosen[i] = best_of(scores, e.count, chosen, i);
    sum += weights[i] = scores[chosen[i]];
  }
  if (!e.softmax_first) softmax(weights, e.top_k);
  if (!e.softmax_first || !e.renormalize) return;
  for (int64_t i = 0; i < e.top_k; i++) weights[i] /= sum;
}

// out = what the expert of all tokens says, or zeros.
int run_shared(const Experts& e, float* out, const float* x, int64_t rows, const Buffers& b,
               int threads) {
  if (!e.shared_down) {
    std::fill(out, out + rows * e.hidden, 0.0f);
    return kOk;
  }
  const Mlp mlp{e.shared_gate_up, e.shared_down, e.shared_inner, true, e.act};
  int wrong = kOk;
  for (int64_t row = 0; row < rows && !wrong; row += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, rows - row), at = row * e.hidden;
    wrong = run_mlp(mlp, out + at, x + at, count, b.inner, b.gated, threads);
  }
  if (wrong || !e.shared_gate) return wrong;
  wrong = linear(*e.shared_gate, b.scores, x, e.hidden, rows, kF32, threads);
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

// Adds what an expert says of the rows in `hits`.
int run_hits(const Experts& e, int64_t index, const Hit* hits, int64_t count, float* out,
             const float* x, const Buffers& b, int threads) {
  const float* rows = x + hits[0].row * e.hidden;
  if (count > 1) {
    for (int64_t i = 0; i < count; i++) {
      std::memcpy(b.rows + i * e.hidden, x + hits[i].row * e.hidden, e.hidden * sizeof(float));
    }
    rows = b.rows;
  }
  const Mlp mlp{e.gate_up[index], e.down[index], e.inner, true, e.act};
  if (const int wrong = run_mlp(mlp, b.out, rows, count, b.inner, b.gated, threads)) return wrong;
  deal_ranges(worth(threads, count * e.hidden, 16384), count, 1, [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; i++) {
      float* to = out + hits[i].row * e.hidden;
      const float* from = b.out + i * e.hidden;
      const vf by = vset(hits[i].weight);
      for_lanes(e.hidden, [&](int64_t j, int n) {
        vstore_some(to + j, vload_some(to + j, n) + vload_some(from + j, n) * by, n);
      });
    }
  });
  return kOk;
}

int run_chosen(const Experts& e, float* out, const float* x, int64_t rows, const Buffers& b,
               int threads) {
  std::vector<std::vector<Hit>> hits(e.count);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = row * e.top_k; i < (row + 1) * e.top_k; i++) {
      hits[b.chosen[i]].push_back({row, b.weights[i]});
    }
  }
  for (int64_t index = 0; index < e.count; index++) {
    const int64_t all = static_cast<int64_t>(hits[index].size());
    for (int64_t from = 0; from < all; from += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, all - from);
      if (const int wrong = run_hits(e, index, hits[index].data() + from, count, out, x, b, threads))
        return wrong;
    }
  }
  return kOk;
}

}  // namespace

int run_experts(const Experts& e, float* out, const float* x, int64_t rows, int threads) {
  const int64_t most = std::min(rows, kRowsAtOnce), inner = std::max(e.inner, e.shared_inner);
  Buffers b;
  Layout layout;
  layout.add(&b.scores, rows * std::max<int64_t>(e.count, 1));
  layout.add(&b.weights, rows * e.top_k);
  layout.add(&b.chosen, rows * e.top_k);
  layout.add(&b.rows, most * e.hidden);
  layout.add(&b.gated, most * 2 * inner);
  layout.add(&b.inner, most * inner);
  layout.add(&b.out, most * e.hidden);
  layout.take(Scratch::kExperts);
  int wrong = run_shared(e, out, x, rows, b, threads);
  if (!wrong) wrong = linear(*e.router, b.scores, x, e.hidden, rows, kF32, threads);
  if (wrong) return wrong;
  deal_ranges(worth(threads, rows * e.count * e.top_k, 16384), rows, 1,
              [&](int64_t low, int64_t high) {
                for (int64_t row = low; row < high; row++) {
                  route_row(e, b.scores + row * e.count, b.chosen + row * e.top_k,
                            b.weights + row * e.top_k);
                }
              });
  return run_chosen(e, out, x, rows, b, threads);
}

}  // namespace quire

using namespace quire;

// out, x [rows, hidden] float32.
extern "C" int quire_run_experts(const void* experts, float* out, const float* x, int64_t rows,
                                 int threads) {
  return guarded(
      [&] { return run_experts(*static_cast<const Experts*>(experts), out, x, rows, threads); });
}
