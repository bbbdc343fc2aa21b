// The microkernel for e4m3: x isn't rounded, sums are float32.
#include "linear_float8.h"

#include "linear_float.h"

namespace quire {
namespace {

constexpr int kK = 4;  // along k, at a time

// Two k of NR columns from their words: values of the first, then of the second one.
QUIRE_INLINE void widen(const char* b, int which, vf& b0, vf& b1) {
#if defined(QUIRE_AVX512)
  const __m512i both = _mm512_loadu_si512(b);
  const __m512i words = which ? both : _mm512_slli_epi16(both, 8);
  const __m512i halves =
      _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(short(0xbf80)));
  b0 = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  b1 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
#elif defined(QUIRE_AVX2)
  const __m256i both = _mm256_loadu_si256((const __m256i*)b);
  const __m256i words = which ? both : _mm256_slli_epi16(both, 8);
  const __m256i brains =
      _mm256_and_si256(_mm256_srai_epi16(words, 4), _mm256_set1_epi16(short(0x87f0)));
  const __m256i zero = _mm256_setzero_si256();
  b0 = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, brains));
  b1 = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, brains));
#else
  f16 halves[NR];
  for (int j = 0; j < NR; j++) {
    const uint8_t code = static_cast<uint8_t>(b[2 * j + which]);
    halves[j] = {static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)};
  }
  b0 = vload(halves), b1 = vload(halves + W);
#endif
}

// Weights as they are packed: kK along k of NR columns.
struct Codes {
  static constexpr int kBytes = kK * NR;

  template <int ROWS>
  QUIRE_INLINE static void add(vf (&acc)[ROWS][2], const uint32_t* a, const char* b) {
#pragma GCC unroll 4
    for (int i = 0; i < kK; i++) {
      vf b0, b1;
      widen(b + i / 2 * NR * 2, i % 2, b0, b1);
      add_products(acc, a, i, b0, b1);
    }
  }
};

// The same, widened: many rows meet weights that were widened once.
struct Widened {
  static constexpr int kBytes = kK * NR * 4;

  template <int ROWS>
  QUIRE_INLINE static void add(vf (&acc)[ROWS][2], const uint32_t* a, const char* b) {
    const float* values = reinterpret_cast<const float*>(b);
#pragma GCC unroll 4
    for (int i = 0; i < kK; i++)
      add_products(acc, a, i, vload(values + i * NR), vload(values + i * NR + W));
  }
};

template <int ROWS>
QUIRE_INLINE void clear(vf (&sums)[ROWS][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = vset(0.0f);
}

template <int ROWS>
QUIRE_INLINE void add_scaled(vf (&acc)[ROWS][2], const vf (&sums)[ROWS][2], const char* scales) {
  const float* by = reinterpret_cast<const float*>(scales);
  const vf s0 = vload(by), s1 = vload(by + W);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    acc[r][0] = vfma(sums[r][0], s0, acc[r][0]);
    acc[r][1] = vfma(sums[r][1], s1, acc[r][1]);
  }
}

QUIRE_INLINE void fetch(const char* ahead) {
#pragma GCC unroll 4
  for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(ahead + line);
}

// Both halves of a group have sums of their own: with few rows they are made side by side, since one
// row's two chains of additions take longer than its weights take to come; with more there are chains
// enough and no registers. The sums are the same.
template <class F, int ROWS>
QUIRE_INLINE void add_group(vf (&acc)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                            int64_t line_ahead, int64_t group) {
  constexpr bool kBeside = ROWS <= (W == 16 ? 4 : 2);
  const int64_t half = group / 2, bytes = half / kK * F::kBytes;
  vf first[ROWS][2], second[ROWS][2];
  clear(first);
  if (kBeside) clear(second);
  for (int64_t i = 0; i < half; i += kK, ahead += (kBeside ? 2 : 1) * line_ahead) {
    const char* at = b + i / kK * F::kBytes;
    fetch(ahead);
    F::add(first, a + i, at);
    if (!kBeside) continue;
    fetch(ahead + line_ahead);
    F::add(second, a + half + i, at + bytes);
  }
  add_scaled(acc, first, b + 2 * bytes);
  if (!kBeside) {
    clear(second);
    for (int64_t i = 0; i < half; i += kK, ahead += line_ahead) {
      fetch(ahead);
      F::add(second, a + half + i, b + bytes + i / kK * F::kBytes);
    }
  }
  add_scaled(acc, second, b + 2 * bytes);
}

template <class F, int ROWS>
void float8_micro(const MicroCall& call) {
  vf acc[ROWS][2];
  load_sums(call, acc);
  const char *b = call.b, *ahead = call.ahead;
  const uint32_t* block = call.a;
  const int64_t group = call.group, step_bytes = group / kK * F::kBytes + NR * 4;
  const int64_t line_ahead = call.ahead_step * kK / group;
  for (int64_t left = call.steps; left > 0; left -= call.block_steps) {
    const int64_t steps = left < call.block_steps ? left : call.block_steps;
    const uint32_t* a = block;
    for (int64_t i = 0; i < steps; i++) {
      add_group<F>(acc, a, b, ahead, line_ahead, group);
      a += group;
      b += step_bytes;
      ahead += call.ahead_step;
    }
    block += call.block_stride;
  }
  store_sums(call, acc);
}

void widen_steps(float* to, const char* b, int64_t steps, int64_t group, const uint8_t*) {
  for (int64_t s = 0; s < steps; s++, b += NR * 4, to += NR) {
    for (int64_t i = 0; i < group; i += 2, b += NR * 2, to += 2 * NR) {
      for (int which = 0; which < 2; which++) {
        vf b0, b1;
        widen(b, which, b0, b1);
        vstore(to + which * NR, b0);
        vstore(to + which * NR + W, b1);
      }
    }
    std::memcpy(to, b, NR * 4);
  }
}

void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps, int dtype,
              int64_t group) {
  load_floats(to, x, offset, count, steps * group, dtype);
  if (kXFactor == 1.0f) return;
  float* row = reinterpret_cast<float*>(to);
  for_lanes(count, [&](int64_t i, int n) {
    vstore_some(row + i, vload_some(row + i, n) * vset(kXFactor), n);
  });
}

template <size_t... I>
Kernel make(int64_t group, std::index_sequence<I...>) {
  return Kernel{kFloatTile, group, {float8_micro<Codes, I + 1>...}, load_row, widen_steps,
                {float8_micro<Widened, I + 1>...}};
}

}  // namespace

Kernel kernel_float8(const Packed& w) {
  return make(w.group, std::make_index_sequence<kFloatTile>{});
}

void put_float8(const Packed& w, int64_t panel, int64_t g, int64_t j, const uint8_t* codes,
                int64_t count, float scale) {
  char* step = w.panel(panel) + g * w.step_bytes;
  for (int64_t i = 0; i < w.group; i++) {
    const uint8_t code = i < count ? codes[i] : 0;
    step[byte_of(j, i)] = static_cast<char>(code);
    if ((code & 0x7f) == 0x7f) scale = NAN;  // shows in what is computed with it
  }
  scale *= kScaleFactor;
  std::memcpy(step + w.group * NR + j * 4, &scale, 4);
}

void read_float8(const Packed& w, const char* step, int64_t j, float* out, int64_t count) {
  float scale;
  std::memcpy(&scale, step + w.group * NR + j * 4, 4);
  for (int64_t i = 0; i < count; i++) {
    const uint8_t code = static_cast<uint8_t>(step[byte_of(j, i)]);
    const f16 half{static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)};
    out[i] = to_float(half) * 0x1p8f * (scale / kScaleFactor);
  }
}

}  // namespace quire
