// Short causal convolutions, and recurrences of heads whose state is a matrix.
//
// Tokens of a sequence are processed one after the other, whatever else is computed, so a token's
// bits don't depend on the chunks of its prompt.
#include "states.h"

#include "gate.h"

namespace quire {
namespace {

bool fits(const StateRows& of) {
  if (of.starts[0] != 0 || of.starts[of.num_seqs] != of.tokens) return false;
  for (int64_t i = 0; i < of.num_seqs; i++) {
    if (of.starts[i] > of.starts[i + 1]) return false;
    if (of.rows[i] < 0 || of.rows[i] >= of.num_rows) return false;
  }
  for (int64_t i = 0; i < of.num_saves; i++) {
    const int64_t end = of.saves[2 * i], row = of.saves[2 * i + 1];
    if (end < (i ? of.saves[2 * i - 2] : 1) || end > of.tokens) return false;
    if (row < 0 || row >= of.num_rows) return false;
  }
  return true;
}

// Calls save(end, row) for the saves after tokens (start, end].
template <typename Save>
inline __attribute__((always_inline)) void for_saves(const StateRows& of, int64_t start, int64_t end,
                                                     Save save) {
  for (int64_t i = 0; i < of.num_saves; i++) {
    const int64_t last = of.saves[2 * i];
    if (last > start && last <= end) save(last, of.saves[2 * i + 1]);
  }
}

// Copies a state with stores that bypass the caches. Nothing reads the copy soon, and ordinary stores
// would evict lines that are in use and first read those that they overwrite.
void save_state(void* to, const void* from, size_t bytes) {
#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
  const size_t line = sizeof(__m256i);
  if (reinterpret_cast<uintptr_t>(to) % line == 0) {
    const size_t whole = bytes / line * line;
    for (size_t i = 0; i < whole; i += line) {
      const void* lane = static_cast<const char*>(from) + i;
      _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(to) + i),
                          _mm256_loadu_si256(static_cast<const __m256i*>(lane)));
    }
    std::memcpy(static_cast<char*>(to) + whole, static_cast<const char*>(from) + whole,
                bytes - whole);
    _mm_sfence();  // other threads may read the copy after this call
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

// ---- convolution --------------------------------------------------------------------------------

constexpr int64_t kChannels = 256;
constexpr int64_t kRows = 16;  // rows of states per thread at a time

// Channels [low, high) of one sequence.
void convolve(const CausalConv& c, int64_t seq, int64_t low, int64_t high) {
  const int64_t from = c.of.starts[seq], count = c.of.starts[seq + 1] - from, before = c.width - 1;
  float* state = c.states + c.of.rows[seq] * before * c.channels;
  // The input of token t, which for t < 0 belongs to an earlier step.
  const auto input = [&](int64_t t) __attribute__((always_inline)) -> const float* {
    return t < 0 ? state + (before + t) * c.channels : c.x + (from + t) * c.stride;
  };
  for (int64_t t = 0; t < count; t++) {
    float* out = c.out + (from + t) * c.channels + low;
    for_lanes(high - low, [&](int64_t i, int n) {
      vf sum = c.bias ? vload_some(c.bias + low + i, n) : vset(0.0f);
      for (int64_t j = 0; j < c.width; j++) {
        const vf w = vload_some(c.weight + j * c.channels + low + i, n);
        sum = vfma(vload_some(input(t - before + j) + low + i, n), w, sum);
      }
      vstore_some(out + i, c.silu ? act<kSilu>(sum) : sum, n);
    });
  }
  for_saves(c.of, from, from + count, [&](int64_t end, int64_t row) {
    float* saved = c.states + row * before * c.channels;
    for (int64_t j = 0; j < before; j++) {
      std::memcpy(saved + j * c.channels + low, input(end - from - before + j) + low,
                  (high - low) * sizeof(float));
    }
  });
  for (int64_t j = 0; count && j < before; j++) {
    // Its sources are after its destination.
    std::memmove(state + j * c.channels + low, input(count - before + j) + low,
                 (high - low) * sizeof(float));
  }
}

// ---- recurrence ---------------------------------------------------------------------------------

float inverse_length(const float* x, int64_t size) {
  vf sum = vset(0.0f);
  for_lanes(size, [&](int64_t i, int n) {
    const vf part = vload_some(x + i, n);
    sum = vfma(part, part, sum);
  });
  return 1.0f / std::sqrt(vsum(sum) + 1e-6f);
}

void scaled(float* out, const float* x, int64_t size, float factor) {
  for_lanes(size, [&](int64_t i, int n) {
    vstore_some(out + i, vload_some(x + i, n) * vset(factor), n);
  });
}

// Updates R rows of a head's state with one token, and applies its query. The factor of the old
// state is `decay`, or per key `decays` unless null.
template <int R, bool DELTA>
void advance(float* rows, const float* q, const float* k, const float* v, float* out, int64_t size,
             float decay, float beta, const float* decays) {
  const auto kept = [&](int64_t i, int n) __attribute__((always_inline)) {
    return decays ? vload_some(decays + i, n) : vset(decay);
  };
  float taken[4], found[4];
  vf sums[4];
  for (int r = 0; r < R; r++) taken[r] = v[r] * beta;
  if (DELTA) {
    for (int r = 0; r < 4; r++) sums[r] = vset(0.0f);
    for_lanes(size, [&](int64_t i, int n) {
      const vf key = vload_some(k + i, n), factor = kept(i, n);
      for (int r = 0; r < R; r++) {
        const vf state = vload_some(rows + r * size + i, n) * factor;
        sums[r] = vfma(state, key, sums[r]);
      }
    });
    vsum4(sums[0], sums[1], sums[2], sums[3], found);
    for (int r = 0; r < R; r++) taken[r] = (v[r] - found[r]) * beta;
  }
  for (int r = 0; r < 4; r++) sums[r] = vset(0.0f);
  for_lanes(size, [&](int64_t i, int n) {
    const vf key = vload_some(k + i, n), query = vload_some(q + i, n), factor = kept(i, n);
    for (int r = 0; r < R; r++) {
      const vf before = vload_some(rows + r * size + i, n) * factor;
      const vf state = vfma(key, vset(taken[r]), before);
      vstore_some(rows + r * size + i, state, n);
      sums[r] = vfma(state, query, sums[r]);
    }
  });
  vsum4(sums[0], sums[1], sums[2], sums[3], found);
  for (int r = 0; r < R; r++) out[r] = found[r];
}

// Rounds a row to int8 in units of the scale that it returns. The scale follows the largest value,
// so a decay only changes the scale.
float rounded(int8_t* to, const float* x, int64_t size) {
  float top = 0.0f;
  for (int64_t i = 0; i < size; i++) top = std::max(top, std::fabs(x[i]));
  const float factor = top > 1e-30f ? 127.0f / top : 0.0f;
  for_lanes(size, [&](int64_t i, int n) {
    vstore_some(to + i, vload_some(x + i, n) * vset(factor), n);
  });
  return all_finite(x, size) ? top / 127.0f : NAN;
}

// R rows of a head's state, as float32 during a token.
template <class T, int R>
struct Rows {
  T* rows;
  float *scales, *scratch;
  int64_t size;
  float* open() {
    for (int r = 0; r < R; r++) {
      const vf scale = vset(scales ? scales[r] : 1.0f);
      for_lanes(size, [&](int64_t i, int n) {
        vstore_some(scratch + r * size + i, vload_some(rows + r * size + i, n) * scale, n);
      });
    }
    return scratch;
  }
  void close() {
    if constexpr (std::is_same_v<T, int8_t>) {
      for (int r = 0; r < R; r++) scales[r] = rounded(rows + r * size, scratch + r * size, size);
    } else {
      for_lanes(R * size, [&](int64_t i, int n) { vstore_some(rows + i, vload_some(scratch + i, n), n); });
    }
  }
};
template <int R>
struct Rows<float, R> {
  float *rows, *scales, *scratch;
  int64_t size;
  float* open() { return rows; }
  void close() {}
};

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Tokens that are prepared at once: a part of the state stays in the L1 cache for all of them.
constexpr int64_t kTokens = 16;

// What a token does to a head's state.
struct HeadToken {
  const float *q, *k, *v, *decays;  // `decays` by key, or null for `decay`
  float* out;
  float decay, beta;
};

// `scratch` has room for decays, and by the delta rule also for a query and a key.
template <bool DELTA>
HeadToken prepare_token(const LinearScan& s, int64_t t, int64_t head, float* scratch) {
  const int64_t size = s.key_size, shared = head / (s.heads / s.key_heads) * size;
  const auto limited = [&](float raw) {
    return std::min(std::max(softplus(raw), s.least_rate), s.most_rate);
  };
  HeadToken token{s.q + t * s.q_stride + shared, s.k + t * s.k_stride + shared,
                  s.v + t * s.v_stride + head * s.value_size, nullptr,
                  s.out + (t * s.heads + head) * s.value_size, 1.0f, 0.0f};
  const float* raw = s.rate + t * s.rate_stride;
  float rate = 0.0f;
  if (s.rate_by_key) {
    for (int64_t i = head * size; i < (head + 1) * size; i++)
      scratch[i - head * size] = std::exp(limited(raw[i] + s.rate_bias[i]) * s.decay[head]);
    token.decays = scratch;
  } else {
    rate = limited(raw[head] + s.rate_bias[head]);
    if (!s.decay_by_key) token.decay = std::exp(rate * s.decay[head]);
  }
  if (s.decay_by_key) {
    for_lanes(size, [&](int64_t i, int n) {
      vstore_some(scratch + i, vexp(vload_some(s.decay + head * size + i, n) * vset(rate)), n);
    });
    token.decays = scratch;
  }
  token.beta = s.beta ? 1.0f / (1.0f + std::exp(-s.beta[t * s.beta_stride + head])) : rate;
  if (DELTA) {
    float *queries = scratch + size, *keys = scratch + 2 * size;
    const float root = 1.0f / std::sqrt(static_cast<float>(size));
    scaled(queries, token.q, size, inverse_length(token.q, size) * root);
    scaled(keys, token.k, size, inverse_length(token.k, size));
    token.q = queries, token.k = keys;
  }
  return token;
}

#ifdef QUIRE_AVX512
constexpr int64_t kColumns = 4 * W;

// `advance` for all tokens, without the delta rule. Four rows by `kColumns` of the state stay in
// registers meanwhile: to load and store them for each token would take as long as the arithmetic,
// whose order, and so whose bits, are those of `advance`.
void advance_columns(const HeadToken* tokens, int64_t count, float* rows, int64_t p, int64_t size) {
  vf sums[kTokens][4];
  for (int64_t i = 0; i < count; i++)
    for (vf& sum : sums[i]) sum = vset(0.0f);
  for (int64_t column = 0; column < size; column += kColumns) {
    vf state[4][4];
    for (int r = 0; r < 4; r++)
      for (int j = 0; j < 4; j++) {
        state[r][j] = vload(rows + r * size + column + j * W);
        __builtin_prefetch(rows + (r + 4) * size + column + j * W);  // the next four rows
      }
    for (int64_t i = 0; i < count; i++) {
      const HeadToken& t = tokens[i];
      vf taken[4];
      for (int r = 0; r < 4; r++) taken[r] = vset(t.v[p + r] * t.beta);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const int64_t at = column + j * W;
        const vf key = vload(t.k + at), query = vload(t.q + at);
        const vf factor = t.decays ? vload(t.decays + at) : vset(t.decay);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
          state[r][j] = vfma(key, taken[r], state[r][j] * factor);
          sums[i][r] = vfma(state[r][j], query, sums[i][r]);
        }
      }
    }
    for (int r = 0; r < 4; r++)
      for (int j = 0; j < 4; j++) vstore(rows + r * size + column + j * W, state[r][j]);
  }
  for (int64_t i = 0; i < count; i++)
    vsum4(sums[i][0], sums[i][1], sums[i][2], sums[i][3], tokens[i].out + p);
}
#endif

// Rows [p, p + R) of a head's state, token by token.
template <class T, int R, bool DELTA>
void advance_rows(const LinearScan& s, const HeadToken* tokens, int64_t count, T* state,
                  float* scales, int64_t p, float* scratch) {
  const int64_t size = s.key_size;
#ifdef QUIRE_AVX512
  if constexpr (std::is_same_v<T, float> && R == 4 && !DELTA) {
    if (size % kColumns == 0) return advance_columns(tokens, count, state + p * size, p, size);
  }
#endif
  Rows<T, R> rows{state + p * size, scales ? scales + p : nullptr, scratch, size};
  for (const HeadToken* t = tokens; t < tokens + count; t++) {
    advance<R, DELTA>(rows.open(), t->q, t->k, t->v + p, t->out + p, size, t->decay, t->beta,
                      t->decays);
    rows.close();
  }
}

template <class T, bool DELTA>
void scan_head(const LinearScan& s, int64_t seq, int64_t head, float* scratch) {
  const int64_t size = s.key_size, elements = s.value_size * size;
  T* const states = static_cast<T*>(s.states);
  T* state = states + (s.of.rows[seq] * s.heads + head) * elements;
  float* scales = s.state_scales;
  if (scales) scales += (s.of.rows[seq] * s.heads + head) * s.value_size;
  float* rows = scratch + kTokens * 3 * size;
  HeadToken tokens[kTokens];
  // The state of a head of Mamba 1, one row, is in the cache anyway.
  const int64_t end = s.of.starts[seq + 1], together = s.value_size == 1 ? 1 : kTokens;
  for (int64_t first = s.of.starts[seq], next; first < end; first = next) {
    next = std::min(end, first + together);
    for_saves(s.of, first, next, [&](int64_t last, int64_t) { next = std::min(next, last); });
    const int64_t count = next - first;
    for (int64_t i = 0; i < count; i++)
      tokens[i] = prepare_token<DELTA>(s, first + i, head, scratch + i * 3 * size);
    int64_t p = 0;
    for (; p + 4 <= s.value_size; p += 4)
      advance_rows<T, 4, DELTA>(s, tokens, count, state, scales, p, rows);
    for (; p < s.value_size; p++)
      advance_rows<T, 1, DELTA>(s, tokens, count, state, scales, p, rows);
    for (int64_t i = 0; s.skip && i < count; i++) {
      const HeadToken& t = tokens[i];
      for_lanes(s.value_size, [&](int64_t j, int n) {
        const vf sum = vfma(vload_some(t.v + j, n), vset(s.skip[head]), vload_some(t.out + j, n));
        vstore_some(t.out + j, sum, n);
      });
    }
    for_saves(s.of, next - 1, next, [&](int64_t, int64_t row) {
      const int64_t at = row * s.heads + head;
      save_state(states + at * elements, state, elements * sizeof(T));
      if (scales)
        std::memcpy(s.state_scales + at * s.value_size, scales, s.value_size * sizeof(float));
    });
  }
}

template <class T>
void scan(const LinearScan& s, int64_t seq, int64_t head, float* scratch) {
  if (s.delta) scan_head<T, true>(s, seq, head, scratch);
  else scan_head<T, false>(s, seq, head, scratch);
}

// Channels [low, high) of one sequence.
void scan_channels(const DiagonalScan& s, int64_t seq, int64_t low, int64_t high) {
  float* state = s.states + s.of.rows[seq] * s.channels + low;
  for (int64_t t = s.of.starts[seq]; t < s.of.starts[seq + 1]; t++) {
    const int64_t first = t * s.channels + low;
    for_lanes(high - low, [&](int64_t i, int n) {
      const vf next = vfma(vload_some(s.decay + first + i, n), vload_some(state + i, n),
                           vload_some(s.x + first + i, n));
      vstore_some(state + i, next, n);
      vstore_some(s.out + first + i, next, n);
    });
    for_saves(s.of, t, t + 1, [&](int64_t, int64_t row) {
      std::memcpy(s.states + row * s.channels + low, state, (high - low) * sizeof(float));
    });
  }
}

// 1 - e^-x for x >= 0, to a few units in the last place.
vf one_minus_exp(vf x) {
  const vf least = vset(0.35f);
  vf series = vset(1.0f / 5040);
  for (const float factor : {-1.0f / 720, 1.0f / 120, -1.0f / 24, 1.0f / 6, -0.5f, 1.0f})
    series = vfma(series, x, vset(factor));
  series = series * x;
  const vf direct = vset(1.0f) - vexp(vset(0.0f) - x);
  return vzero_below(direct, x, least) + (series - vzero_below(series, x, least));
}

// The inputs and decays of one head of a token.
void prepare_lru(const LruInputs& l, int64_t t, int64_t head) {
  const int64_t channel = head * l.size, at = t * l.heads * l.size + channel;
  const float *gates = l.gates + 2 * at, *biases = l.biases + 2 * channel;
  for_lanes(l.size, [&](int64_t i, int n) {
    const auto gate = [&](int64_t j) {
      return act<kSigmoid>(vload_some(gates + j, n) + vload_some(biases + j, n));
    };
    const vf log_decay = gate(l.size + i) * vload_some(l.decay + channel + i, n);
    vf inputs = vload_some(l.x + at + i, n) * gate(i);
    if (l.positions[t]) inputs = inputs * vsqrt(one_minus_exp(vset(-2.0f) * log_decay));
    vstore_some(l.inputs + at + i, inputs, n);
    vstore_some(l.decays + at + i, vexp(log_decay), n);
  });
}

}  // namespace

int causal_conv(const CausalConv& c, int threads) {
  if (!fits(c.of)) return kBadSequence;
  const int64_t parts = (c.channels + kChannels - 1) / kChannels;
  const int team = worth(threads, c.of.tokens * c.channels * c.width, 16384);
  deal(team, c.of.num_seqs * parts, [&](int64_t piece, int) {
    const int64_t low = piece % parts * kChannels;
    convolve(c, piece / parts, low, std::min(c.channels, low + kChannels));
  });
  return kOk;
}

int linear_scan(const LinearScan& s, int threads) {
  if (!fits(s.of)) return kBadSequence;
  if (s.states_dtype != kF32 && s.states_dtype != kBF16 && s.states_dtype != kI8) return kBadDType;
  const int64_t head_work = s.value_size * s.key_size;
  const int team = worth(threads, s.of.tokens * s.heads * head_work, 16384);
  // Each token's decays, query and key, and four rows of a state that isn't float32.
  const int64_t scratch_size = (kTokens * 3 + 4) * s.key_size;
  float* scratch = nullptr;
  Layout layout;
  layout.add(&scratch, team * scratch_size);
  layout.take(Scratch::kStates);
  // A head of Mamba has one value: dealing heads one by one would cost more than their work.
  const int64_t together = std::max<int64_t>(1, kRows / s.value_size);
  const int64_t parts = (s.heads + together - 1) / together;
  deal(team, s.of.num_seqs * parts, [&](int64_t piece, int slot) {
    float* own = scratch + slot * scratch_size;
    const int64_t seq = piece / parts, first = piece % parts * together;
    for (int64_t head = first; head < std::min(s.heads, first + together); head++) {
      if (s.states_dtype == kF32) scan<float>(s, seq, head, own);
      else if (s.states_dtype == kBF16) scan<bf16>(s, seq, head, own);
      else scan<int8_t>(s, seq, head, own);
    }
  });
  return kOk;
}

int diagonal_scan(const DiagonalScan& s, int threads) {
  if (!fits(s.of)) return kBadSequence;
  const int64_t parts = (s.channels + kChannels - 1) / kChannels;
  deal(worth(threads, s.of.tokens * s.channels, 16384), s.of.num_seqs * parts,
       [&](int64_t piece, int) {
    const int64_t low = piece % parts * kChannels;
    scan_channels(s, piece / parts, low, std::min(s.channels, low + kChannels));
  });
  return kOk;
}

void lru_inputs(const LruInputs& l, int threads) {
  const int64_t count = l.tokens * l.heads;
  deal_ranges(worth(threads, count * l.size * 8, 16384), count, 1, [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; i++) prepare_lru(l, i / l.heads, i % l.heads);
  });
}

}  // namespace quire

extern "C" int quire_causal_conv(const CausalConv* c, int threads) {
  return causal_conv(*c, threads);
}

extern "C" int quire_linear_scan(const LinearScan* s, int threads) {
  return guarded([&] { return linear_scan(*s, threads); });
}

extern "C" int quire_diagonal_scan(const DiagonalScan* s, int threads) {
  return diagonal_scan(*s, threads);
}

extern "C" int quire_lru_inputs(const LruInputs* l, int threads) {
  return guarded([&] {
    lru_inputs(*l, threads);
    return static_cast<int>(kOk);
  });
}
