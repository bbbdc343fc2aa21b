// The microkernel for codes of floats: x stays as it is, sums are float32.
#include "linear_coded.h"

#include "linear_float.h"

namespace quire {
namespace {

// Values of a code of NR * 4 bytes: kK along k for each of NR columns.

struct Float8 {
  static constexpr int kK = 4;
  static constexpr int kTile = kFloatTile;

  explicit Float8(const float*) {}

  // acc[r] += x[r] * two k of the columns, whose codes are at `b`.
  template <int ROWS>
  QUIRE_INLINE void add_two(vf (&acc)[ROWS][2], const uint32_t* a, const char* b) const {
#if defined(QUIRE_AVX512)
    const __m512i both = _mm512_loadu_si512(b), mask = _mm512_set1_epi16(short(0xbf80));
    const auto halves = [&](__m512i words, int unit) __attribute__((always_inline)) {
      const __m512i kept = _mm512_and_si512(_mm512_srai_epi16(words, 1), mask);
      add_products(acc, a, unit, _mm512_cvtph_ps(_mm512_castsi512_si256(kept)),
                   _mm512_cvtph_ps(_mm512_extracti64x4_epi64(kept, 1)));
    };
    halves(_mm512_slli_epi16(both, 8), 0);
    halves(both, 1);
#elif defined(QUIRE_AVX2)
    const __m256i both = _mm256_loadu_si256((const __m256i*)b);
    const __m256i mask = _mm256_set1_epi16(short(0xbf80));
    const auto halves = [&](__m256i words, int unit) __attribute__((always_inline)) {
      const __m256i kept = _mm256_and_si256(_mm256_srai_epi16(words, 1), mask);
      add_products(acc, a, unit, _mm256_cvtph_ps(_mm256_castsi256_si128(kept)),
                   _mm256_cvtph_ps(_mm256_extracti128_si256(kept, 1)));
    };
    halves(_mm256_slli_epi16(both, 8), 0);
    halves(both, 1);
#else
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(b);
    for (int unit = 0; unit < 2; unit++) {
      f16 halves[NR];
      for (int j = 0; j < NR; j++) halves[j] = half_of(codes[2 * j + unit]);
      add_products(acc, a, unit, vload(halves), vload(halves + W));
    }
#endif
  }
  template <int ROWS>
  QUIRE_INLINE void add(vf (&acc)[ROWS][2], const uint32_t* a, const char* b) const {
    add_two(acc, a, b);
    add_two(acc, a + 2, b + NR * 2);
  }
};

struct Table4 {
  static constexpr int kK = 8;
  static constexpr int kTile = W == 8 ? 4 : kFloatTile;  // of 16 registers the table takes two

#if defined(QUIRE_AVX512)
  vf table;
  explicit Table4(const float* values) : table(vload(values)) {}
  QUIRE_INLINE vf values(const char* b, int j) const {
    const __m512i words = _mm512_loadu_si512(b);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * j), table);
  }
#elif defined(QUIRE_AVX2)
  vf low, high;
  explicit Table4(const float* values) : low(vload(values)), high(vload(values + 8)) {}
  QUIRE_INLINE vf values(const char* b, int j) const {
    const __m256i words = _mm256_loadu_si256((const __m256i*)b);
    const __m256i at = _mm256_srli_epi32(words, 4 * j);  // its last three bits count
    const vf upper = _mm256_castsi256_ps(_mm256_slli_epi32(words, 28 - 4 * j));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at),
                            upper);
  }
#else
  const float* table;
  explicit Table4(const float* values) : table(values) {}
  QUIRE_INLINE vf values(const char* b, int j) const {
    uint32_t words[W];
    std::memcpy(words, b, sizeof(words));
    vf out = vset(0.0f);
    for (int i = 0; i < W; i++) out[i] = table[words[i] >> 4 * j & 15];
    return out;
  }
#endif

  template <int ROWS>
  QUIRE_INLINE void add(vf (&acc)[ROWS][2], const uint32_t* a, const char* b) const {
#pragma GCC unroll 8
    for (int j = 0; j < kK; j++) add_products(acc, a, j, values(b, j), values(b + W * 4, j));
  }
};

template <int ROWS>
QUIRE_INLINE void clear(vf (&sums)[ROWS][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = vset(0.0f);
}

template <int ROWS>
QUIRE_INLINE void add_scaled(vf (&acc)[ROWS][2], const vf (&sums)[ROWS][2], const float* scales) {
  const vf s0 = vload(scales), s1 = vload(scales + W);
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
template <class Code, int ROWS>
QUIRE_INLINE void add_group(const Code& code, vf (&acc)[ROWS][2], const uint32_t* a, const char* b,
                            const char* ahead, int64_t line_ahead, int64_t group) {
  const int64_t half = group / 2, half_bytes = half / Code::kK * NR * 4;
  const float* scales = reinterpret_cast<const float*>(b + 2 * half_bytes);
  const int64_t units = half / Code::kK;
  vf first[ROWS][2], second[ROWS][2];
  clear(first);
  clear(second);
  if constexpr (ROWS <= (W == 16 ? 4 : 2)) {
    for (int64_t i = 0; i < units; i++, a += Code::kK, b += NR * 4, ahead += 2 * line_ahead) {
      fetch(ahead);
      fetch(ahead + line_ahead);
      code.add(first, a, b);
      code.add(second, a + half, b + half_bytes);
    }
  } else {
    for (int64_t i = 0; i < units; i++, a += Code::kK, b += NR * 4, ahead += line_ahead) {
      fetch(ahead);
      code.add(first, a, b);
    }
    add_scaled(acc, first, scales);
    for (int64_t i = 0; i < units; i++, a += Code::kK, b += NR * 4, ahead += line_ahead) {
      fetch(ahead);
      code.add(second, a, b);
    }
    add_scaled(acc, second, scales);
    return;
  }
  add_scaled(acc, first, scales);
  add_scaled(acc, second, scales);
}

template <class Code, int ROWS>
void coded_micro(const MicroCall& call) {
  const Code code(call.table);
  vf acc[ROWS][2];
  load_sums(call, acc);
  const char *b = call.b, *ahead = call.ahead;
  const uint32_t* block = call.a;
  const int64_t group = call.group, step_bytes = group / Code::kK * NR * 4 + NR * 4;
  const int64_t line_ahead = NR * 4 * call.ahead_step / step_bytes;
  for (int64_t left = call.steps; left > 0; left -= call.block_steps) {
    const int64_t steps = left < call.block_steps ? left : call.block_steps;
    const uint32_t* a = block;
    for (int64_t i = 0; i < steps; i++) {
      add_group(code, acc, a, b, ahead, line_ahead, group);
      a += group;
      b += step_bytes;
      ahead += call.ahead_step;
    }
    block += call.block_stride;
  }
  store_sums(call, acc);
}

void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps, int dtype,
              int64_t group) {
  load_floats(to, x, offset, count, steps * group, dtype);
}

template <class Code, size_t... I>
Kernel make(int64_t group, std::index_sequence<I...>) {
  return Kernel{Code::kTile, group, {coded_micro<Code, I + 1>...}, load_row};
}
template <class Code>
Kernel make(int64_t group) {
  return make<Code>(group, std::make_index_sequence<Code::kTile>{});
}

}  // namespace

Kernel kernel_coded(const Packed& w) {
  return w.format == kFloat8 ? make<Float8>(w.group) : make<Table4>(w.group);
}

void put_codes(const Packed& w, int64_t panel, int64_t g, int64_t j, const uint8_t* codes,
               int64_t count, float scale) {
  char* step = w.panel(panel) + g * w.step_bytes;
  uint8_t* bytes = reinterpret_cast<uint8_t*>(step);
  for (int64_t i = 0; i < w.group; i += w.format == kFloat8 ? 1 : 2) {
    const uint8_t code = i < count ? codes[i] : 0, next = i + 1 < count ? codes[i + 1] : 0;
    if (w.format == kFloat8) {
      bytes[i / 2 * NR * 2 + 2 * j + i % 2] = code;
      if (is_nan_code(code)) scale = NAN;  // shows in what is computed with it
    } else {
      bytes[(i / 8 * NR + j) * 4 + i % 8 / 2] = static_cast<uint8_t>((code & 15) | next << 4);
    }
  }
  if (w.format == kFloat8) scale *= kFloat8Scale;
  std::memcpy(step + w.step_bytes - NR * 4 + j * 4, &scale, 4);
}

void unpack_codes(const Packed& w, const char* step, int64_t j, float* out, int64_t count) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(step);
  float scale;
  std::memcpy(&scale, step + w.step_bytes - NR * 4 + j * 4, 4);
  for (int64_t i = 0; i < count; i++) {
    if (w.format == kFloat8) {
      out[i] = to_float(half_of(bytes[i / 2 * NR * 2 + 2 * j + i % 2])) * scale;
    } else {
      const uint8_t both = bytes[(i / 8 * NR + j) * 4 + i % 8 / 2];
      out[i] = w.table[i % 2 ? both >> 4 : both & 15] * scale;
    }
  }
}

}  // namespace quire
