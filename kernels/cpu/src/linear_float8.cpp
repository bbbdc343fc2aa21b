// Floats of 8 bits on CPUs that multiply pairs of bf16: a table gives each code's exact bf16 value,
// and x is rounded to bf16.
//
// Each group's sum starts at zero and is scaled into the row's sum, so that the next group needn't
// wait for it.
#include <utility>

#include "linear_steps.h"

#ifdef QUIRE_FLOAT8_PAIRS

namespace quire {
namespace {

// Maximum rows at a time: as many as leave registers for the tables.
constexpr int kTile = 12;
// Units of k in two vectors of codes.
constexpr int64_t kPass = 4;

// Values of codes without their signs: low bytes of 128 bf16, then high ones.
struct Tables {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

constexpr Tables make_tables() {
  Tables tables{};
  for (int code = 0; code < 128; code++) {
    int exponent = code >> 3, mantissa = (code & 7) << 4;
    // Subnormals are multiples of 2^-9, for which bf16 has exponents.
    if (exponent == 0 && mantissa != 0) {
      exponent = 1;
      for (; mantissa < 0x80; mantissa *= 2) exponent--;
    }
    const int bits = code ? (exponent + 120) << 7 | (mantissa & 0x7f) : 0;
    tables.low[code] = static_cast<uint8_t>(bits);
    tables.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return tables;
}

constexpr Tables kTables = make_tables();

struct Lookup {
  vi low[2], high[2], sign;
};

QUIRE_INLINE Lookup load_lookup() {
  return {{_mm512_load_si512(kTables.low), _mm512_load_si512(kTables.low + 64)},
          {_mm512_load_si512(kTables.high), _mm512_load_si512(kTables.high + 64)},
          _mm512_set1_epi8(-128)};
}

// Two pairs of k of 16 columns.
struct Pairs {
  vi at[2];
};

QUIRE_INLINE Pairs look_up(const char* p, const Lookup& lookup) {
  const vi codes = vload_codes(p);
  const vi low = _mm512_permutex2var_epi8(lookup.low[0], codes, lookup.low[1]);
  const vi high = _mm512_permutex2var_epi8(lookup.high[0], codes, lookup.high[1]);
  // high | (codes & sign)
  const vi all = _mm512_ternarylogic_epi32(high, codes, lookup.sign, 0xf8);
  return {{vpairs_first(low, all), vpairs_last(low, all)}};
}

// sums[r] += two k of a row.
template <int ROWS>
QUIRE_INLINE void add_pair(vf (&sums)[ROWS][2], const uint32_t* a, vi b0, vi b1) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    const vi x = vset_int(int(a[r * kRowUnits]));
    add_pairs(sums[r][0], x, b0);
    add_pairs(sums[r][1], x, b1);
  }
}

// acc[r] += one group.
template <int ROWS>
QUIRE_INLINE void add_group(vf (&acc)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                            int64_t line_ahead, int64_t group, const Lookup& lookup) {
  vf sums[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = vset(0.0f);
  for (int64_t k = 0; k < group; k += kPass, a += kPass / 2, b += kPass * NR) {
    fetch_line(ahead), ahead += line_ahead;
    const Pairs left = look_up(b, lookup), right = look_up(b + 64, lookup);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; pair++) add_pair(sums, a + pair, left.at[pair], right.at[pair]);
  }
  const float* scales = reinterpret_cast<const float*>(b);
  const vf s0 = vload(scales), s1 = vload(scales + W);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    acc[r][0] = vfma(sums[r][0], s0, acc[r][0]);
    acc[r][1] = vfma(sums[r][1], s1, acc[r][1]);
  }
}

template <int ROWS>
void float8_micro(const MicroCall& call) {
  vf acc[ROWS][2];
  load_sums(call, acc);
  const Lookup lookup = load_lookup();
  const char *b = call.b, *ahead = call.ahead;
  const uint32_t* block = call.a;
  const int64_t units = call.group / 2, bytes = group_bytes(kFloat8, call.group);
  const int64_t line_ahead = line_ahead_of(call, kPass);
  for (int64_t left = call.steps; left > 0; left -= call.block_steps) {
    const int64_t steps = left < call.block_steps ? left : call.block_steps;
    const uint32_t* a = block;
    for (int64_t i = 0; i < steps; i++, a += units, b += bytes) {
      add_group(acc, a, b, ahead, line_ahead, call.group, lookup);
      ahead += call.ahead_step;
      fetch_line(ahead - scale_bytes(kFloat8));
    }
    block += call.block_stride;
  }
  store_sums(call, acc);
}

void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps, int dtype,
              int64_t group) {
  bf16* pairs = reinterpret_cast<bf16*>(to);
  if (dtype == kBF16) {
    std::memcpy(pairs, static_cast<const bf16*>(x) + offset, count * sizeof(bf16));
  } else {
    float values[2 * kBlockUnits];
    read_row(values, x, offset, count, dtype);
    write_row(pairs, 0, values, count, kBF16);
  }
  std::memset(pairs + count, 0, (steps * group - count) * sizeof(bf16));
}

template <size_t... I>
Kernel make(int64_t group, std::index_sequence<I...>) {
  return Kernel{kTile, group / 2, {float8_micro<I + 1>...}, load_row};
}

}  // namespace

Kernel kernel_float8(const Packed& w) {
  return make(w.group, std::make_index_sequence<kTile>{});
}

}  // namespace quire

#endif
