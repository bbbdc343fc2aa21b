// Choosing a token from a row of logits, without sorting the row.
//
// Tokens are ordered by (logit descending, id ascending). min-p keeps those at least min_p times as
// likely as the most likely one, top-k the first k, top-p the shortest prefix with top_p of the
// remaining probability. The token is then drawn by inverse CDF over those left, in the order of
// ids.
//
// Filters examine the largest logits first, which suffice for nearly all rows of a trained model;
// for other rows all logits are weighed.
#include <limits>
#include <vector>

#include "edits.h"
#include "ops.h"

namespace quire {
namespace {

constexpr int64_t kBroken = -1;
constexpr int64_t kBlock = 64;       // logits per block maximum
constexpr int64_t kFirst = 256;      // number of logits to examine first
constexpr int64_t kDrawBlock = 256;  // weights summed per block of the draw
constexpr int kBins = 1024;

struct Candidate {
  float logit;
  int32_t id;
};

bool comes_first(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

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

// All tokens with logits of at least `low`, in order.
void gather(const Row& row, float low, std::vector<Candidate>* out) {
  out->clear();
  for (int64_t i = 0; i < row.vocab; i += kBlock) {
    const int64_t end = std::min(row.vocab, i + kBlock);
    if (!(maximum(row.logits + i, end - i) >= low)) continue;
    for (int64_t j = i; j < end; j++) {
      if (row.logits[j] >= low) out->push_back({row.logits[j], static_cast<int32_t>(j)});
    }
  }
  std::sort(out->begin(), out->end(), comes_first);
}

// A logit reached by at least `count` tokens: the count-th largest of the blocks' maxima.
float low_for(const Row& row, int64_t count, std::vector<float>* maxima) {
  maxima->clear();
  for (int64_t i = 0; i < row.vocab; i += kBlock) {
    maxima->push_back(maximum(row.logits + i, std::min(kBlock, row.vocab - i)));
  }
  if (count >= static_cast<int64_t>(maxima->size())) return -INFINITY;
  std::nth_element(maxima->begin(), maxima->begin() + count, maxima->end(), std::greater<float>());
  return (*maxima)[count];
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

struct Whole {
  std::vector<float> weights;  // of all tokens; 0 for those not kept
  std::vector<double> bins;    // probability mass by logit
  std::vector<Candidate> border;
};

// Computes the weights of the tokens that min-p keeps; returns their sum.
double weigh(const Row& row, Whole* whole) {
  // Finite, since infinity times the top token's 0 would be NaN.
  constexpr double kMost = std::numeric_limits<float>::max();
  const vf top = vset(row.top);
  const vf scale = vset(static_cast<float>(std::min(kMost, 1.0 / row.temperature)));
  const vf least = vset(static_cast<float>(row.min_p));
  whole->weights.resize(row.vocab);
  double total = 0;
  for (int64_t i = 0; i < row.vocab; i += kDrawBlock) {
    vf sum = vset(0.0f);
    for_lanes(std::min(kDrawBlock, row.vocab - i), [&](int64_t j, int n) {
      const vf w = vexp((vload_some(row.logits + i + j, n) - top) * scale);
      const vf kept = vzero_below(w, w, least);
      vstore_some(whole->weights.data() + i + j, kept, n);
      sum = sum + (n == W ? kept : vfill(kept, n, 0.0f));
    });
    total += static_cast<double>(vsum(sum));
  }
  return total;
}

// How many of the first candidates the filters keep; -1 if more candidates are needed. `complete`:
// no further token can be kept. `mass`: of all tokens that min-p keeps, if it matters.
int64_t kept_of(const Row& row, const std::vector<Candidate>& found, bool complete, double mass) {
  const int64_t size = static_cast<int64_t>(found.size()), count = std::min(size, row.top_k);
  const bool known = complete || row.top_k <= size;
  double alive_mass = 0;
  int64_t alive = 0;
  for (; alive < count; alive++) {
    const double weight = row.weight(found[alive].logit);
    if (weight < row.min_p) break;
    alive_mass += weight;
  }
  if (row.top_p >= 1.0) return known || alive < count ? alive : -1;
  const double wanted = row.top_p * (known || alive < count ? alive_mass : mass);
  double before = 0;
  for (int64_t i = 0; i < alive; i++) {
    if (i > 0 && before >= wanted) return i;
    before += row.weight(found[i].logit);
  }
  return known || alive < count || before >= wanted ? alive : -1;
}

// Zeroes the weights after the shortest prefix with `wanted` mass: tokens are distributed to bins
// by logit, and only the bin with the border is sorted.
void keep_mass(const Row& row, double wanted, Whole* whole) {
  const float low = static_cast<float>(88.0 * row.temperature);
  float range = 0;
  for (int64_t i = 0; i < row.vocab; i++) {
    const float below_top = row.top - row.logits[i];
    range = std::max(range, std::min(below_top, low));
  }
  const float scale = range > 0 ? static_cast<float>(kBins) / range : 0.0f;
  auto bin_of = [&](int64_t i) {
    return std::min<int>(kBins - 1, static_cast<int>((row.top - row.logits[i]) * scale));
  };
  float* weights = whole->weights.data();
  whole->bins.assign(kBins, 0.0);
  for (int64_t i = 0; i < row.vocab; i++) {
    if (weights[i] > 0) whole->bins[bin_of(i)] += static_cast<double>(weights[i]);
  }
  double before = 0;
  int cut = 0;
  while (cut + 1 < kBins && before + whole->bins[cut] < wanted) before += whole->bins[cut++];
  whole->border.clear();
  for (int64_t i = 0; i < row.vocab; i++) {
    if (weights[i] <= 0) continue;
    const int bin = bin_of(i);
    if (bin > cut) weights[i] = 0;
    if (bin == cut) whole->border.push_back({row.logits[i], static_cast<int32_t>(i)});
  }
  std::sort(whole->border.begin(), whole->border.end(), comes_first);
  bool first = before == 0;
  for (const Candidate& c : whole->border) {
    const double weight = static_cast<double>(weights[c.id]);
    if (before >= wanted && !first) weights[c.id] = 0;
    before += weight;
    first = false;
  }
}

// Draws by weight: first a block, then a token in it.
int64_t draw_whole(const Row& row, const Whole& whole) {
  const float* weights = whole.weights.data();
  auto block_sum = [&](int64_t from) {
    vf sum = vset(0.0f);
    for_lanes(std::min(kDrawBlock, row.vocab - from), [&](int64_t j, int n) {
      const vf w = vload_some(weights + from + j, n);
      sum = sum + (n == W ? w : vfill(w, n, 0.0f));
    });
    return static_cast<double>(vsum(sum));
  };
  double total = 0;
  for (int64_t i = 0; i < row.vocab; i += kDrawBlock) total += block_sum(i);
  const double target = below(total, row.uniform);
  double before = 0;
  int64_t chosen = kBroken;
  for (int64_t from = 0; from < row.vocab; from += kDrawBlock) {
    const double sum = block_sum(from);
    const bool here = before + sum > target;
    if (!here) {
      before += sum;
      continue;
    }
    for (int64_t i = from; i < std::min(row.vocab, from + kDrawBlock); i++) {
      before += static_cast<double>(weights[i]);
      if (weights[i] > 0) chosen = i;
      if (before > target) break;
    }
    break;
  }
  return chosen;
}

// No token with a logit below this reaches the weight required by min-p. Slightly low: at the
// border the weights themselves decide.
float least_logit(const Row& row) {
  if (row.min_p <= 0) return -INFINITY;
  const double least = static_cast<double>(row.top) + row.temperature * std::log(row.min_p);
  return static_cast<float>(least - 1e-5 * (1.0 + std::fabs(least)));
}

int64_t sample_row(const Row& row) {
  thread_local std::vector<Candidate> found;
  thread_local std::vector<float> numbers;
  thread_local Whole whole;
  const bool limited = row.top_k < row.vocab;
  const double mass = limited ? 0 : weigh(row, &whole);
  if (limited || row.top_p < 1.0 || row.min_p > 0) {
    const float least = least_logit(row);
    const int64_t wanted = limited ? std::max(kFirst, row.top_k) : kFirst;
    const float low = std::max(low_for(row, wanted, &numbers), least);
    gather(row, low, &found);
    const int64_t kept = kept_of(row, found, low == least, mass);
    if (kept >= 0) {
      found.resize(std::max<int64_t>(1, kept));
      return draw(row, &found);
    }
  }
  if (row.top_p < 1.0) keep_mass(row, row.top_p * mass, &whole);
  return draw_whole(row, whole);
}

// The logsumexp of the logits, and how many of them are larger than `own`.
double normalizer(const float* x, int64_t vocab, float top, float own, int64_t* above) {
  double total = 0;
  *above = 0;
  for (int64_t i = 0; i < vocab; i += kDrawBlock) {
    const int64_t count = std::min(kDrawBlock, vocab - i);
    vf sum = vset(0.0f);
    for_lanes(count, [&](int64_t j, int n) {
      const vf w = vexp(vload_some(x + i + j, n) - vset(top));
      sum = sum + (n == W ? w : vfill(w, n, 0.0f));
    });
    total += static_cast<double>(vsum(sum));
    int32_t larger = 0;
    for (int64_t j = i; j < i + count; j++) larger += x[j] > own;
    *above += larger;
  }
  return static_cast<double>(top) + std::log(total);
}

}  // namespace

float tell_row(const float* x, int64_t vocab, int64_t token, int64_t k, const Told& told) {
  thread_local std::vector<Candidate> found;
  thread_local std::vector<float> maxima;
  const float top = maximum(x, vocab);
  if (!std::isfinite(top) || holds_nan(x, vocab)) {
    for (int64_t i = 0; i <= k; i++) told.ids[i] = token, told.values[i] = NAN, told.ranks[i] = 1;
    return NAN;
  }
  int64_t above = 0;
  const double sum = normalizer(x, vocab, top, x[token], &above);
  auto put = [&](int64_t at, int64_t id, int64_t rank) {
    told.ids[at] = id, told.ranks[at] = rank;
    told.values[at] = static_cast<float>(static_cast<double>(x[id]) - sum);
  };
  put(0, token, above + 1);
  if (k > 0) {
    const Row row{x, vocab, top};
    gather(row, low_for(row, k, &maxima), &found);
  }
  for (int64_t i = 0; i < k; i++) {
    const bool equal = i > 0 && found[i].logit == found[i - 1].logit;
    put(1 + i, found[i].id, equal ? told.ranks[i] : i + 1);
  }
  return static_cast<float>(sum);
}

int choose_likeliest(int64_t* out, const float* logits, int64_t rows, int64_t vocab, int threads) {
  deal(worth(threads, rows * vocab, 32768), rows, [&](int64_t r, int) {
    const float* row = logits + r * vocab;
    const float top = maximum(row, vocab);
    const bool broken = !std::isfinite(top) || holds_nan(row, vocab);
    out[r] = broken ? kBroken : first_of(row, vocab, top);
  });
  return kOk;
}

int choose_sampled(int64_t* out, const float* logits, int64_t rows, int64_t vocab,
                   const Sampling& how, int threads) {
  bool failed = false;
  deal(worth(threads, rows * vocab, 16384), rows, [&](int64_t r, int) {
    const float* x = logits + r * vocab;
    const float top = maximum(x, vocab);
    if (!std::isfinite(top) || holds_nan(x, vocab)) {
      out[r] = kBroken;
      return;
    }
    if (!(how.temperature[r] > 0)) {
      out[r] = first_of(x, vocab, top);
      return;
    }
    const Row row{x, vocab, top, static_cast<double>(how.temperature[r]), how.top_p[r],
                  how.min_p[r], how.uniforms[r], std::max<int64_t>(1, how.top_k[r])};
    try {
      out[r] = sample_row(row);
    } catch (const std::bad_alloc&) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    }
  });
  return failed ? kNoMemory : kOk;
}

}  // namespace quire

extern "C" int quire_argmax(int64_t* out, const float* logits, int64_t rows, int64_t vocab,
                            int threads) {
  return choose_likeliest(out, logits, rows, vocab, threads);
}

extern "C" int quire_sample(int64_t* out, const float* logits, int64_t rows, int64_t vocab,
                            const float* temperature, const int64_t* top_k, const double* top_p,
                            const double* min_p, const double* uniforms, int threads) {
  return guarded([&] {
    return choose_sampled(out, logits, rows, vocab,
                          Sampling{temperature, top_k, top_p, min_p, uniforms}, threads);
  });
}

// Log probabilities of `tokens` [rows] and of each row's k <= vocab most likely tokens, best first:
// ids, values and ranks [rows, 1 + k], the normalizers [rows].
extern "C" int quire_top_logprobs(int64_t* ids, float* values, int64_t* ranks, float* normalizers,
                                  const float* logits, int64_t rows, int64_t vocab,
                                  const int64_t* tokens, int64_t k, int threads) {
  for (int64_t r = 0; r < rows; r++)
    if (tokens[r] < 0 || tokens[r] >= vocab) return kBadRow;
  bool failed = false;
  deal(worth(threads, rows * vocab, 16384), rows, [&](int64_t r, int) {
    const int64_t at = r * (1 + k);
    try {
      normalizers[r] =
          tell_row(logits + r * vocab, vocab, tokens[r], k, Told{ids + at, values + at, ranks + at});
    } catch (const std::bad_alloc&) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    }
  });
  return failed ? kNoMemory : kOk;
}
