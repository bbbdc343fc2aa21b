// The microkernel for integer weights.
#include "linear_int.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace quire {
namespace {

// Most rows at a time: as many as leave registers for weights and for x.
constexpr int kInt8Tile = W == 16 ? 8 : W == 8 ? 6 : 4;
#ifdef QUIRE_PAIRS
constexpr int kInt4Tile = W == 16 ? 8 : 4;
#else
constexpr int kInt4Tile = W == 16 ? 8 : W == 8 ? 5 : 4;
#endif
// A row's group of x begins with its scale, the start of its sums, and scale * sum(x).
constexpr int kHead = 3;

// Entries of a table that were looked up once for many rows: of a group [group / 2][NR] pairs.
constexpr Format kEntries = static_cast<Format>(100);

constexpr bool is_table(Format format) { return format == kTable4 || format == kEntries; }

constexpr int x_unit(Format format) {
  return is_int8(format) ? kInt8Unit : is_table(format) ? 2 : 4;
}

constexpr int64_t value_bytes(Format format, int64_t group) {
  return is_int8(format) ? group * NR : format == kEntries ? group * NR * 2 : group * NR / 2;
}

// Twice e2m1, without a sign.
alignas(16) constexpr uint8_t kLookedUp[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                               12, 11, 10, 9,  8,  6,  4,  0};

// sums[r] += quads of one group, for int8 and int4.
template <int ROWS>
QUIRE_INLINE void add_int8(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                           int64_t line_ahead, int64_t group) {
  constexpr int kBytes = W * kInt8Unit;
  for (int64_t i = 0; i < group; i += 4, ahead += line_ahead) {
#pragma GCC unroll 4
    for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(ahead + line);
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

// sums[r] += `count` values of k.
template <Format FORMAT, int ROWS>
QUIRE_INLINE void add_nibbles(vi (&sums)[ROWS][2], const uint32_t*& a, const char*& b,
                              const char*& ahead, int64_t line_ahead, int64_t count) {
  for (int64_t i = 0; i < count; i += 8, b += NR * 4, ahead += line_ahead, a += 2) {
#pragma GCC unroll 4
    for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(ahead + line);
    const auto b0 = load_four_bits<FORMAT>(b), b1 = load_four_bits<FORMAT>(b + W * 4);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) dot_row(sums[r], b0, b1, a + r * kRowUnits);
  }
}

#ifdef QUIRE_PAIRS
template <Format FORMAT, int ROWS>
QUIRE_INLINE void add_int4(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                           int64_t line_ahead, int64_t group) {
  // Products of up to 24 fill the words sooner than those of up to 15.
  constexpr int64_t kRun = FORMAT == kInt4Float ? kNibbleRun / 2 : kNibbleRun;
  for (int64_t left = group; left > 0; left -= kRun) {
    vi words[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) words[r][0] = words[r][1] = vset_int(0);
    add_nibbles<FORMAT>(words, a, b, ahead, line_ahead, left < kRun ? left : kRun);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      sums[r][0] = widen(sums[r][0], words[r][0]);
      sums[r][1] = widen(sums[r][1], words[r][1]);
    }
  }
}
#else
template <Format FORMAT, int ROWS>
QUIRE_INLINE void add_int4(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                           int64_t line_ahead, int64_t group) {
  add_nibbles<FORMAT>(sums, a, b, ahead, line_ahead, group);
}
#endif

template <int ROWS>
QUIRE_INLINE void add_table(vi (&sums)[ROWS][2], const uint32_t* a, const char* b,
                            const char* ahead, int64_t line_ahead, int64_t group,
                            const Entries& table) {
  for (int64_t i = 0; i < group; i += 8, b += NR * 4, ahead += line_ahead) {
#pragma GCC unroll 4
    for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(ahead + line);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++, a++) {
      const Words b0 = load_entries(b, pair, table), b1 = load_entries(b + W * 4, pair, table);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        sums[r][0] = vdot_words(sums[r][0], b0, a[r * kRowUnits]);
        sums[r][1] = vdot_words(sums[r][1], b1, a[r * kRowUnits]);
      }
    }
  }
}

template <int ROWS>
QUIRE_INLINE void add_entries(vi (&sums)[ROWS][2], const uint32_t* a, const char* b,
                              const char* ahead, int64_t line_ahead, int64_t group) {
  for (int64_t i = 0; i < group; i += 2, b += NR * 4, ahead += line_ahead, a++) {
    __builtin_prefetch(ahead);
    const Words b0 = load_words(b), b1 = load_words(b + W * 4);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      sums[r][0] = vdot_words(sums[r][0], b0, a[r * kRowUnits]);
      sums[r][1] = vdot_words(sums[r][1], b1, a[r * kRowUnits]);
    }
  }
}

// kTable4 to kEntries.
void look_up_steps(float* to, const char* b, int64_t steps, int64_t group, const uint8_t* table) {
  const Entries entries = load_table(table);
  char* out = reinterpret_cast<char*>(to);
  for (int64_t s = 0; s < steps; s++) {
    for (int64_t i = 0; i < group; i += 8, b += NR * 4) {
      for (int pair = 0; pair < 4; pair++, out += NR * 4) {
        store_words(out, load_entries(b, pair, entries));
        store_words(out + W * 4, load_entries(b + W * 4, pair, entries));
      }
    }
    std::memcpy(out, b, NR * 4);
    b += NR * 4, out += NR * 4;
  }
}

// Scales of a group: float16, but for entries of a table.
template <Format FORMAT>
QUIRE_INLINE vf load_scales(const char* p, int64_t from) {
  if constexpr (is_table(FORMAT)) return vload(reinterpret_cast<const float*>(p) + from);
  return vload(reinterpret_cast<const f16*>(p) + from);
}

template <Format FORMAT, int ROWS>
void int_micro(const MicroCall& call) {
  vf acc[ROWS][2];
  load_sums(call, acc);
  const char *b = call.b, *ahead = call.ahead;
  const uint32_t* block = call.a;
  const int64_t group = call.group, values = value_bytes(FORMAT, group);
  const int64_t step_units = kHead + group / x_unit(FORMAT);
  const int64_t step_bytes = values + NR * (has_second(FORMAT) || is_table(FORMAT) ? 4 : 2);
  const int64_t line_ahead = NR * 4 * call.ahead_step / step_bytes;
  for (int64_t left = call.steps; left > 0; left -= call.block_steps) {
    const int64_t steps = left < call.block_steps ? left : call.block_steps;
    const uint32_t* a = block;
    for (int64_t i = 0; i < steps; i++) {
      vi sums[ROWS][2];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = vset_int(int(a[r * kRowUnits + 1]));
      if constexpr (is_int8(FORMAT)) {
        add_int8<ROWS>(sums, a + kHead, b, ahead, line_ahead, group);
      } else if constexpr (FORMAT == kEntries) {
        add_entries<ROWS>(sums, a + kHead, b, ahead, line_ahead, group);
      } else if constexpr (FORMAT == kTable4) {
        add_table<ROWS>(sums, a + kHead, b, ahead, line_ahead, group, load_table(call.table));
      } else {
        add_int4<FORMAT, ROWS>(sums, a + kHead, b, ahead, line_ahead, group);
      }
      const f16* scales = reinterpret_cast<const f16*>(b + values);
      const float* head = reinterpret_cast<const float*>(a);
      const vf s0 = load_scales<FORMAT>(b + values, 0), s1 = load_scales<FORMAT>(b + values, W);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const vf by = vset(head[r * kRowUnits]);
        acc[r][0] = vfma(vfloat(sums[r][0]), by * s0, acc[r][0]);
        acc[r][1] = vfma(vfloat(sums[r][1]), by * s1, acc[r][1]);
      }
      if (has_second(FORMAT)) {
        vf m0 = vload(scales + NR), m1 = vload(scales + NR + W);
        if (has_zeros(FORMAT)) m0 = m0 * s0, m1 = m1 * s1;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          const vf by = vset(-head[r * kRowUnits + 2]);
          acc[r][0] = vfma(by, m0, acc[r][0]);
          acc[r][1] = vfma(by, m1, acc[r][1]);
        }
      }
      a += step_units;
      b += step_bytes;
      ahead += call.ahead_step;
    }
    block += call.block_stride;
  }
  store_sums(call, acc);
}

// Within what 8 bits hold. x * inverse is, unless x isn't finite: a maximum takes NaN for the bound.
QUIRE_INLINE vf bounded(vf x) { return vmin(vmax(x, vset(-127.0f)), vset(127.0f)); }

// q = x * inverse, rounded; gives the sum of q, which a float holds: at most 256 of 127. A group is a
// multiple of 16.
template <class Value>
int32_t round_group(Value* q, const float* x, int64_t group, vf inverse) {
  vf sum = vset(0.0f);
  for (int64_t i = 0; i < group; i += W) {
    const vf rounded = vround(bounded(vload(x + i) * inverse));
    sum = sum + rounded;
    vstore(q + i, rounded);
  }
  return static_cast<int32_t>(vsum(sum));
}

// Rounds one group of x to int8 and lays it out for the kernel.
template <Format FORMAT>
void quantize_x(uint32_t* to, const float* x, int64_t group) {
  vf top = vset(0.0f);
  for_lanes(group, [&](int64_t i, int n) { top = vmax(top, vabs(vload_some(x + i, n))); });
  const float most = vmaximum(top), scale = most / 127.0f;
  const vf inverse = vset(most > 0 ? 127.0f / most : 0.0f);
  using Value = std::conditional_t<x_unit(FORMAT) == 2, int16_t, int8_t>;
  Value q[kMostGroup];
  const int32_t sum = round_group(q, x, group, inverse);
  const float scaled_sum = scale * static_cast<float>(sum);
  const int32_t start = -offset_of(FORMAT) * sum;
  std::memcpy(to, &scale, 4);
  std::memcpy(to + 1, &start, 4);
  std::memcpy(to + 2, &scaled_sum, 4);
  std::memcpy(to + kHead, q, group * sizeof(Value));
}

// What no integer stands for makes its group's sums NaN, as it would in floats.
void spoil(uint32_t* to, const float* x, int64_t group) {
  if (all_finite(x, group)) return;
  const float nan = NAN;
  std::memcpy(to, &nan, 4);
  std::memcpy(to + 2, &nan, 4);
}

template <Format FORMAT>
void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps, int dtype,
              int64_t group) {
  // A block holds at most as many values as units of four, and a group more.
  float values[4 * kBlockUnits + kMostGroup];
  read_row(values, x, offset, count, dtype);
  std::fill(values + count, values + steps * group, 0.0f);
  const int64_t units = kHead + group / x_unit(FORMAT);
  for (int64_t i = 0; i < steps; i++) {
    quantize_x<FORMAT>(to + i * units, values + i * group, group);
  }
  if (all_finite(values, count)) return;
  for (int64_t i = 0; i < steps; i++) spoil(to + i * units, values + i * group, group);
}

template <Format FORMAT, size_t... I>
Kernel make(int64_t group, std::index_sequence<I...>) {
  return Kernel{sizeof...(I), kHead + group / x_unit(FORMAT), {int_micro<FORMAT, I + 1>...},
                load_row<FORMAT>, nullptr, {}};
}

template <size_t... I>
Kernel make_table(int64_t group, std::index_sequence<I...> tiles) {
  Kernel kernel = make<kTable4>(group, tiles);
  kernel.widen = look_up_steps;
  const LinearMicro widened[] = {int_micro<kEntries, I + 1>...};
  std::copy(widened, widened + sizeof...(I), kernel.widened);
  return kernel;
}

}  // namespace

Kernel kernel_int(const Packed& w) {
  constexpr std::make_index_sequence<kInt8Tile> bytes{};
  constexpr std::make_index_sequence<kInt4Tile> nibbles{};
  return w.format == kInt8        ? make<kInt8>(w.group, bytes)
         : w.format == kInt8Zero  ? make<kInt8Zero>(w.group, bytes)
         : w.format == kInt4      ? make<kInt4>(w.group, nibbles)
         : w.format == kInt4Min   ? make<kInt4Min>(w.group, nibbles)
         : w.format == kInt4Float ? make<kInt4Float>(w.group, nibbles)
         : w.format == kTable4    ? make_table(w.group, nibbles)
                                  : make<kInt4Zero>(w.group, nibbles);
}

}  // namespace quire
