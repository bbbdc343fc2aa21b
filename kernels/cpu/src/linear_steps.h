// One step of integer weights, for each format, and widening of weights once for many rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear_int.h"

namespace quire {

// Values of k per iteration of the loops below, with packed or widened weights.
template <Format FORMAT>
constexpr int64_t pass_of(bool wide) {
  if (is_words(FORMAT) && wide) return in_planes(FORMAT) ? 4 : 2;
  return is_int8(FORMAT) || FORMAT == kFloat8 ? 4 : 8;
}

// Widened words have 16 bits, widened nibbles 8.
template <Format FORMAT, bool WIDE>
int64_t value_bytes(int64_t group) {
  if (!WIDE) return bytes_of_values(FORMAT, group);
  return is_words(FORMAT) ? group * NR * 2 : group * NR;
}

// 12 + twice the e2m1 value of each code; see kDoubledOffset.
alignas(16) constexpr uint8_t kLookedUp[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                               12, 11, 10, 9,  8,  6,  4,  0};

QUIRE_INLINE void fetch_line(const char* ahead) {
#pragma GCC unroll 4
  for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(ahead + line);
}

// How far the prefetch address advances with each NR * 4 bytes of weights. The scales after a
// step's values are prefetched separately: spreading them over the iterations would miss cache
// lines.
inline int64_t line_ahead_of(const MicroCall& call, int64_t pass) {
  return std::min<int64_t>(NR * 4, call.ahead_step * pass / call.group);
}

// sums[r] += quads of one group, for int8.
template <int ROWS>
QUIRE_INLINE void add_int8(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                           int64_t line_ahead, int64_t group) {
  constexpr int kBytes = W * kInt8Unit;
  for (int64_t i = 0; i < group; i += 4, ahead += line_ahead) {
    fetch_line(ahead);
#pragma GCC unroll 2
    for (int unit = 0; unit < 4 / kInt8Unit; unit++, b += 2 * kBytes, a++) {
      const Bytes b0 = load_bytes(b), b1 = load_bytes(b + kBytes);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) dot_row(sums[r], b0, b1, a + r * kRowUnits);
    }
  }
}

template <Format FORMAT>
QUIRE_INLINE auto load_four_bits(const char* p) {
  if constexpr (FORMAT == kInt4Float) {
    return look_up(load_nibbles(p), kLookedUp);
  } else {
    return load_nibbles(p);
  }
}

#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
// Widened nibbles: vectors of low ones, then of high ones.
constexpr bool kWidensNibbles = true;
QUIRE_INLINE Nibbles load_apart(const char* p) {
  return {*reinterpret_cast<const vi_unaligned*>(p),
          *reinterpret_cast<const vi_unaligned*>(p + W * 4)};
}
QUIRE_INLINE void store_apart(char* p, const Nibbles& four) {
  *reinterpret_cast<vi_unaligned*>(p) = four.low;
  *reinterpret_cast<vi_unaligned*>(p + W * 4) = four.high;
}

template <Format FORMAT>
void take_apart(float* to, const char* b, int64_t steps, int64_t group, const uint8_t*) {
  constexpr int64_t kScales = NR * (has_second(FORMAT) ? 4 : 2);
  char* out = reinterpret_cast<char*>(to);
  for (int64_t s = 0; s < steps; s++, b += kScales, out += kScales) {
    for (int64_t i = 0; i < group; i += 8, b += NR * 4, out += NR * 8) {
      store_apart(out, load_four_bits<FORMAT>(b));
      store_apart(out + NR * 4, load_four_bits<FORMAT>(b + W * 4));
    }
    std::memcpy(out, b, kScales);
  }
}
#else
constexpr bool kWidensNibbles = false;
QUIRE_INLINE Nibbles load_apart(const char* p) { return load_nibbles(p); }
template <Format FORMAT>
void take_apart(float*, const char*, int64_t, int64_t, const uint8_t*) {}
#endif

// sums[r] += `count` values of k.
template <Format FORMAT, bool WIDE, int ROWS>
QUIRE_INLINE void add_nibbles(vi (&sums)[ROWS][2], const uint32_t*& a, const char*& b,
                              const char*& ahead, int64_t line_ahead, int64_t count) {
  const auto add = [&](const auto& b0, const auto& b1) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) dot_row(sums[r], b0, b1, a + r * kRowUnits);
  };
  for (int64_t i = 0; i < count; i += 8, ahead += line_ahead, a += 2) {
    fetch_line(ahead);
    if constexpr (WIDE) {
      add(load_apart(b), load_apart(b + NR * 4));
      b += NR * 8;
    } else {
      add(load_four_bits<FORMAT>(b), load_four_bits<FORMAT>(b + W * 4));
      b += NR * 4;
    }
  }
}

// Sums of nibbles in 16-bit words: 32 products of up to 24 would overflow. But the sums of the
// weights without their offset, at most 12, fit. So each run starts at the compensation for the
// offset, and may overflow in between. x stores these starts after its values.
#ifdef QUIRE_PAIRS
constexpr bool starts_in_words(Format format) { return format == kInt4Float; }

// The start of a run: -12 * the sum of the values of x for each half of the words.
inline uint32_t start_of_run(const int8_t* q, int64_t count) {
  __m128i sums = _mm_setzero_si128();
  for (int64_t i = 0; i < count; i += 16) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i));
    sums = _mm_sub_epi16(sums, _mm_maddubs_epi16(_mm_set1_epi8(kDoubledOffset), x));
  }
  sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4e));
  sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(sums));
}

template <Format FORMAT, bool WIDE, int ROWS>
QUIRE_INLINE void add_int4(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                           int64_t line_ahead, int64_t group) {
  const uint32_t* start = a + group / 4;
  for (int64_t left = group; left > 0; left -= kNibbleRun, start++) {
    vi words[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const bool starts = starts_in_words(FORMAT);
      words[r][0] = words[r][1] = vset_int(starts ? int(start[r * kRowUnits]) : 0);
    }
    add_nibbles<FORMAT, WIDE>(words, a, b, ahead, line_ahead, std::min(left, kNibbleRun));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      sums[r][0] = widen(sums[r][0], words[r][0]);
      sums[r][1] = widen(sums[r][1], words[r][1]);
    }
  }
}
#else
constexpr bool starts_in_words(Format) { return false; }
inline uint32_t start_of_run(const int8_t*, int64_t) { return 0; }

template <Format FORMAT, bool WIDE, int ROWS>
QUIRE_INLINE void add_int4(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                           int64_t line_ahead, int64_t group) {
  add_nibbles<FORMAT, WIDE>(sums, a, b, ahead, line_ahead, group);
}
#endif

#ifdef QUIRE_PLANES
// Maximum rows whose sums of high and of low bytes are computed together; more rows take a pass for
// each.
constexpr int kJointRows = W == 16 ? 4 : 1;

// sums[r] = 256 * sums[r] + low[r]
template <int ROWS>
QUIRE_INLINE void join(vi (&sums)[ROWS][2], const vi (&low)[ROWS][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    sums[r][0] = vjoin(sums[r][0], low[r][0]);
    sums[r][1] = vjoin(sums[r][1], low[r][1]);
  }
}

// sums[r] += entries for eight k.
template <int ROWS>
QUIRE_INLINE void add_entries(vi (&sums)[ROWS][2], const uint32_t* a, const Nibbles& b0,
                              const Nibbles& b1, vi entries) {
  const Nibbles e0 = look_up(b0, entries), e1 = look_up(b1, entries);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) dot_row(sums[r], e0, e1, a + r * kRowUnits);
}

// sums[r] += one group of entries in planes; initial sums count 256 times.
template <int ROWS>
QUIRE_INLINE void add_planes(vi (&sums)[ROWS][2], const uint32_t* a, const char* b,
                             const char* ahead, int64_t line_ahead, int64_t group,
                             const uint8_t* table) {
  const Entries entries = load_planes(table);
  const int64_t bytes = group * NR / 2;
  vi low[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) low[r][0] = low[r][1] = vset_int(0);
  const uint32_t* x = a;
  for (int64_t i = 0; i < bytes; i += NR * 4, x += 2, ahead += line_ahead) {
    fetch_line(ahead);
    const Nibbles b0 = load_nibbles(b + i), b1 = load_nibbles(b + i + W * 4);
    add_entries(sums, x, b0, b1, entries.high);
    if constexpr (ROWS <= kJointRows) add_entries(low, x, b0, b1, entries.low);
  }
  join(sums, low);
  if constexpr (ROWS <= kJointRows) return;
  for (int64_t i = 0; i < bytes; i += NR * 4, a += 2)
    add_entries(sums, a, load_nibbles(b + i), load_nibbles(b + i + W * 4), entries.low);
}

// The same for widened planes.
template <Format FORMAT, int ROWS>
QUIRE_INLINE void add_wide_planes(vi (&sums)[ROWS][2], const uint32_t* a, const char* b,
                                  const char* ahead, int64_t line_ahead, int64_t group) {
  const uint32_t* x = a;
  add_nibbles<FORMAT, true>(sums, x, b, ahead, line_ahead, group);
  const vi none[ROWS][2] = {};
  join(sums, none);
  add_nibbles<FORMAT, true>(sums, a, b, ahead, line_ahead, group);
}

// Each step: high bytes, low bytes, scales.
inline void to_planes(float* to, const char* b, int64_t steps, int64_t group, const uint8_t* table) {
  const Entries entries = load_planes(table);
  char* out = reinterpret_cast<char*>(to);
  const int64_t plane = group * NR;
  for (int64_t s = 0; s < steps; s++, b += NR * 4, out += plane + NR * 4) {
    for (int64_t i = 0; i < group; i += 4, b += W * 4, out += NR * 4) {
      const Nibbles codes = load_nibbles(b);
      store_apart(out, look_up(codes, entries.high));
      store_apart(out + plane, look_up(codes, entries.low));
    }
    std::memcpy(out + plane, b, NR * 4);
  }
}
#endif

// Words for `PAIRS` pairs of k, made by `load(b, pair)` from one vector of weights.
template <int PAIRS, int ROWS, class Load>
QUIRE_INLINE void add_words(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                            int64_t line_ahead, int64_t group, const Load& load) {
  for (int64_t i = 0; i < group; i += 2 * PAIRS, b += NR * 4, ahead += line_ahead) {
    fetch_line(ahead);
#pragma GCC unroll 4
    for (int pair = 0; pair < PAIRS; pair++, a++) {
      const Words b0 = load(b, pair), b1 = load(b + W * 4, pair);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) dot_words(sums[r], b0, b1, a + r * kRowUnits);
    }
  }
}

// How to load the words of a format.
template <Format FORMAT>
QUIRE_INLINE auto loader_of(const uint8_t* table) {
  if constexpr (FORMAT == kFloat8) {
    return [tables = load_float8_tables()](const char* p, int pair) __attribute__((always_inline)) {
      return load_float8(p, pair, tables);
    };
  } else {
    return [entries = load_table(table)](const char* p, int pair) __attribute__((always_inline)) {
      return load_entries(p, pair, entries);
    };
  }
}

template <Format FORMAT>
void to_words(float* to, const char* b, int64_t steps, int64_t group, const uint8_t* table) {
  constexpr int kPass = pass_of<FORMAT>(false);
  const auto load = loader_of<FORMAT>(table);
  char* out = reinterpret_cast<char*>(to);
  for (int64_t s = 0; s < steps; s++, b += NR * 4, out += NR * 4) {
    for (int64_t i = 0; i < group; i += kPass, b += NR * 4) {
#pragma GCC unroll 4
      for (int pair = 0; pair < kPass / 2; pair++, out += NR * 4) {
        store_words(out, load(b, pair));
        store_words(out + W * 4, load(b + W * 4, pair));
      }
    }
    std::memcpy(out, b, NR * 4);
  }
}

// sums[r] += one step.
template <Format FORMAT, bool WIDE, int ROWS>
QUIRE_INLINE void add_step(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                           int64_t line_ahead, int64_t group, const uint8_t* table) {
  if constexpr (is_int8(FORMAT)) {
    add_int8<ROWS>(sums, a, b, ahead, line_ahead, group);
  } else if constexpr (!is_words(FORMAT)) {
    add_int4<FORMAT, WIDE, ROWS>(sums, a, b, ahead, line_ahead, group);
#ifdef QUIRE_PLANES
  } else if constexpr (in_planes(FORMAT) && WIDE) {
    add_wide_planes<FORMAT>(sums, a, b, ahead, line_ahead, group);
  } else if constexpr (in_planes(FORMAT)) {
    add_planes(sums, a, b, ahead, line_ahead, group, table);
#endif
  } else if constexpr (WIDE) {
    const auto load = [](const char* p, int) __attribute__((always_inline)) { return load_words(p); };
    add_words<1>(sums, a, b, ahead, line_ahead, group, load);
  } else {
    constexpr int kPairs = pass_of<FORMAT>(false) / 2;
    add_words<kPairs>(sums, a, b, ahead, line_ahead, group, loader_of<FORMAT>(table));
  }
}

}  // namespace quire
