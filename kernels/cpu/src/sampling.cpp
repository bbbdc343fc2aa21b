// Choosing a token from a row of logits, without sorting the row.
//
// Tokens are ordered by (logit downwards, id upwards). min-p keeps those at least min_p times as
// likely as the likeliest, top-k the first k, top-p the shortest prefix that holds top_p of what the
// two left; the token is then drawn by inverse CDF over what is kept, in the order of ids.
//
// Filters look at the largest logits first, and at more of them while the answer lies beyond.
#include <vector>

#include "runtime.h"

namespace quire {
namespace {

constexpr int64_t kBroken = -1;
constexpr int64_t kBlock = 64;       // logits whose maximum is kept
constexpr int64_t kFirst = 256;      // logits to look at first
constexpr int64_t kDrawBlock = 256;  // weights added up before the draw looks closer

struct Candidate {
  float logit;
  int32_t id;
};

struct Row {
  const float* logits;
  int64_t vocab;
  float top;
  double temperature, top_p, min_p, uniform;
  int64_t top_k;

  double weight(float logit) const {
    return std::exp((static_cast<double>(logit) - static_cast<double>(top)) / temperature);
  }
};

float maximum(const float* x, int64_t count) {
  vf top = vset(-INFINITY);
  for_lanes(count, [&](int64_t i, int n) {
    const vf y = vload_some(x + i, n);
    top = vmax(top, n == W ? y : vfill(y, n, -INFINITY));
  });
  return vmaximum(top);
}

// The first index of the maximum `top`.
int64_t first_of(const float* x, int64_t count, float top) {
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t end = std::min(count, i + kBlock);
    if (maximum(x + i, end - i) != top) continue;
    while (x[i] != top) i++;
    return i;
  }
  return kBroken;
}

bool holds_nan(const float* x, int64_t count) {
  auto unequal = vset(0.0f) != vset(0.0f);
  for_lanes(count, [&](int64_t i, int n) {
    const vf y = vload_some(x + i, n);
    unequal |= y != y;
  });
  bool found = false;
  for (int i = 0; i < W; i++) found |= unequal[i] != 0;
  return found;
}

// Every token with at least the logit `low`, in order.
void gather(const Row& row, float low, std::vector<Candidate>* out) {
  out->clear();
  for (int64_t i = 0; i < row.vocab; i += kBlock) {
    const int64_t end = std::min(row.vocab, i + kBlock);
    if (!(maximum(row.logits + i, end - i) >= low)) continue;
    for (int64_t j = i; j < end; j++) {
      if (row.logits[j] >= low) out->push_back({row.logits[j], static_cast<int32_t>(j)});
    }
  }
  std::sort(out->begin(), out->end(), [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  });
}

// A logit that at least `count` tokens reach: the count-th largest of the blocks' maxima.
float low_for(const Row& row, int64_t count, std::vector<float>* maxima) {
  maxima->clear();
  for (int64_t i = 0; i < row.vocab; i += kBlock) {
    maxima->push_back(maximum(row.logits + i, std::min(kBlock, row.vocab - i)));
  }
  if (count >= static_cast<int64_t>(maxima->size())) return -INFINITY;
  std::nth_element(maxima->begin(), maxima->begin() + count, maxima->end(), std::greater<float>());
  return (*maxima)[count];
}

// The weight of all tokens that min-p leaves.
double whole_mass(const Row& row) {
  const vf top = vset(row.top), scale = vset(static_cast<float>(1.0 / row.temperature));
  const vf least = vset(static_cast<float>(row.min_p));
  double total = 0;
  for (int64_t i = 0; i < row.vocab; i += kDrawBlock) {
    const int64_t count = std::min(kDrawBlock, row.vocab - i);
    vf sum = vset(0.0f);
    for_lanes(count, [&](int64_t j, int n) {
      const vf w = vexp((vload_some(row.logits + i + j, n) - top) * scale);
      const vf kept = vzero_below(w, w, least);
      sum = sum + (n == W ? kept : vfill(kept, n, 0.0f));
    });
    total += static_cast<double>(vsum(sum));
  }
  return total;
}

double below(double total, double uniform) {
  return std::min(uniform * total, std::nextafter(total, 0.0));
}

// Draws one of the kept tokens.
int64_t draw(const Row& row, std::vector<Candidate>* kept) {
  std::sort(kept->begin(), kept->end(),
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  double total = 0;
  for (const Candidate& c : *kept) total += row.weight(c.logit);
  const double target = below(total, row.uniform);
  double sum = 0;
  int64_t chosen = kBroken;
  for (const Candidate& c : *kept) {
    const double weight = row.weight(c.logit);
    sum += weight;
    if (weight > 0) chosen = c.id;
    if (sum > target) break;
  }
  return chosen;
}

// Draws from all tokens: first a block, then a token in it.
int64_t draw_freely(const Row& row, std::vector<float>* sums) {
  const vf top = vset(row.top), scale = vset(static_cast<float>(1.0 / row.temperature));
  sums->clear();
  double total = 0;
  for (int64_t i = 0; i < row.vocab; i += kDrawBlock) {
    vf sum = vset(0.0f);
    for_lanes(std::min(kDrawBlock, row.vocab - i), [&](int64_t j, int n) {
      const vf w = vexp((vload_some(row.logits + i + j, n) - top) * scale);
      sum = sum + (n == W ? w : vfill(w, n, 0.0f));
    });
    sums->push_back(vsum(sum));
    total += static_cast<double>(sums->back());
  }
  const double target = below(total, row.uniform);
  double before = 0;
  size_t block = 0;
  while (block + 1 < sums->size() && before + static_cast<double>((*sums)[block]) <= target) {
    before += static_cast<double>((*sums)[block++]);
  }
  int64_t chosen = kBroken;
  const int64_t from = static_cast<int64_t>(block) * kDrawBlock;
  for (int64_t i = from; i < std::min(row.vocab, from + kDrawBlock); i++) {
    const double weight = row.weight(row.logits[i]);
    before += weight;
    if (weight > 0) chosen = i;
    if (before > target && chosen == i) break;
  }
  return chosen;
}

// How many of the first candidates the filters keep; -1 when that takes more candidates.
// `complete`: no tokens are left beyond them.
int64_t kept_of(const Row& row, const std::vector<Candidate>& found, bool complete) {
  const int64_t size = static_cast<int64_t>(found.size());
  int64_t count = std::min(size, row.top_k);
  double mass = 0;
  int64_t alive = 0;
  while (alive < count && row.weight(found[alive].logit) >= row.min_p) {
    mass += row.weight(found[alive++].logit);
  }
  const bool known = complete || alive < count || row.top_k <= size;
  if (row.top_p >= 1.0) return known ? alive : -1;
  if (!known) {
    if (row.top_k < row.vocab) return -1;
    mass = whole_mass(row);
  }
  double before = 0;
  for (int64_t i = 0; i < alive; i++) {
    if (i > 0 && before >= row.top_p * mass) return i;
    before += row.weight(found[i].logit);
  }
  return known ? alive : before >= row.top_p * mass ? alive : -1;
}

// No token with a logit below this has the weight that min-p asks for. A little low: at the border
// the weights themselves decide.
float least_logit(const Row& row) {
  if (row.min_p <= 0) return -INFINITY;
  const double least = static_cast<double>(row.top) + row.temperature * std::log(row.min_p);
  return static_cast<float>(least - 1e-5 * (1.0 + std::fabs(least)));
}

int64_t sample_row(const Row& row) {
  thread_local std::vector<Candidate> found;
  thread_local std::vector<float> numbers;
  if (row.top_k >= row.vocab && row.top_p >= 1.0 && row.min_p <= 0.0)
    return draw_freely(row, &numbers);
  const float least = least_logit(row);
  int64_t wanted = row.top_k < row.vocab ? std::max(kFirst, row.top_k) : kFirst;
  for (;; wanted *= 8) {
    const float low = std::max(low_for(row, wanted, &numbers), least);
    gather(row, low, &found);
    const int64_t kept = kept_of(row, found, low == least);
    if (kept < 0) continue;
    found.resize(std::max<int64_t>(1, kept));
    return draw(row, &found);
  }
}

}  // namespace
}  // namespace quire

using namespace quire;

// out[r] = the first of row r's largest logits, or -1 when that isn't finite or one is NaN.
extern "C" int quire_argmax(int64_t* out, const float* logits, int64_t rows, int64_t vocab,
                            int threads) {
  deal(worth(threads, rows * vocab, 32768), rows, [&](int64_t r, int) {
    const float* row = logits + r * vocab;
    const float top = maximum(row, vocab);
    const bool broken = !std::isfinite(top) || holds_nan(row, vocab);
    out[r] = broken ? kBroken : first_of(row, vocab, top);
  });
  return kOk;
}

// One token for each row: the likeliest where temperature is 0, or -1 where the largest logit isn't
// finite or one is NaN.
extern "C" int quire_sample(int64_t* out, const float* logits, int64_t rows, int64_t vocab,
                            const float* temperature, const int64_t* top_k, const double* top_p,
                            const double* min_p, const double* uniforms, int threads) {
  return guarded([&] {
    bool failed = false;
    deal(worth(threads, rows * vocab, 16384), rows, [&](int64_t r, int) {
      const float* x = logits + r * vocab;
      const float top = maximum(x, vocab);
      if (!std::isfinite(top) || holds_nan(x, vocab)) {
        out[r] = kBroken;
        return;
      }
      if (!(temperature[r] > 0)) {
        out[r] = first_of(x, vocab, top);
        return;
      }
      const Row row{x, vocab, top, static_cast<double>(temperature[r]), top_p[r], min_p[r],
                    uniforms[r], std::max<int64_t>(1, top_k[r])};
      try {
        out[r] = sample_row(row);
      } catch (const std::bad_alloc&) {
        __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      }
    });
    return failed ? kNoMemory : kOk;
  });
}
