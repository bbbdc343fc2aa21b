// The microkernel for integer weights.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "linear_steps.h"

namespace quire {
namespace {

// Maximum rows at a time: as many as leave registers for weights and for x.
constexpr int kInt8Tile = W == 16 ? 8 : W == 8 ? 6 : 4;
#ifdef QUIRE_PAIRS
constexpr int kInt4Tile = W == 16 ? 8 : 4;
#else
constexpr int kInt4Tile = W == 16 ? 8 : W == 8 ? 5 : 4;
#endif
// A row's group of x begins with its scale, the start of its sums, and scale * sum(x).
constexpr int kHead = 3;

constexpr int x_unit(Format format) {
  return is_int8(format) ? kInt8Unit : is_words(format) && !in_planes(format) ? 2 : 4;
}

// Units of x per group.
template <Format FORMAT>
int64_t units_of(int64_t group) {
  const int64_t runs = starts_in_words(FORMAT) ? (group + 31) / 32 : 0;
  return kHead + group / x_unit(FORMAT) + runs;
}

// Scales of a group: float16, except for words.
template <Format FORMAT>
QUIRE_INLINE vf load_scales(const char* p, int64_t from) {
  if constexpr (is_words(FORMAT)) return vload(reinterpret_cast<const float*>(p) + from);
  return vload(reinterpret_cast<const f16*>(p) + from);
}

template <Format FORMAT, bool WIDE, int ROWS>
void int_micro(const MicroCall& call) {
  vf acc[ROWS][2];
  load_sums(call, acc);
  const char *b = call.b, *ahead = call.ahead;
  const uint32_t* block = call.a;
  const int64_t group = call.group, values = value_bytes<FORMAT, WIDE>(group);
  const int64_t step_units = units_of<FORMAT>(group);
  const int64_t step_bytes = values + scale_bytes(FORMAT);
  const int64_t line_ahead = line_ahead_of(call, pass_of<FORMAT>(WIDE));
  for (int64_t left = call.steps; left > 0; left -= call.block_steps) {
    const int64_t steps = left < call.block_steps ? left : call.block_steps;
    const uint32_t* a = block;
    for (int64_t i = 0; i < steps; i++) {
      vi sums[ROWS][2];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = vset_int(int(a[r * kRowUnits + 1]));
      add_step<FORMAT, WIDE>(sums, a + kHead, b, ahead, line_ahead, group, call.table);
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
      fetch_line(ahead - scale_bytes(FORMAT));
    }
    block += call.block_stride;
  }
  store_sums(call, acc);
}

// Clamps to the range of 8 bits, which x * inverse only leaves if x isn't finite: a maximum turns
// NaN into the bound.
QUIRE_INLINE vf bounded(vf x) { return vmin(vmax(x, vset(-127.0f)), vset(127.0f)); }

// q = x * inverse, rounded; returns the sum of q, at most 256 * 127, which a float represents
// exactly. A group is a multiple of 16.
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

// Rounds one group of x to int8 in the kernel's layout.
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
  const int32_t start = starts_in_words(FORMAT) ? 0 : -offset_of(FORMAT) * sum;
  std::memcpy(to, &scale, 4);
  std::memcpy(to + 1, &start, 4);
  std::memcpy(to + 2, &scaled_sum, 4);
  std::memcpy(to + kHead, q, group * sizeof(Value));
  if constexpr (starts_in_words(FORMAT)) {
    uint32_t* starts = to + kHead + group / 4;
    for (int64_t i = 0; i < group; i += 32)
      *starts++ = start_of_run(q + i, std::min<int64_t>(32, group - i));
  }
}

// Values that no integer represents make their group's sums NaN, as in floats.
void spoil(uint32_t* to, const float* x, int64_t group) {
  if (all_finite(x, group)) return;
  const float nan = NAN;
  std::memcpy(to, &nan, 4);
  std::memcpy(to + 2, &nan, 4);
}

template <Format FORMAT>
void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps, int dtype,
              int64_t group) {
  // A block has at most four values per unit, and one more group.
  float values[4 * kBlockUnits + kMostGroup];
  read_row(values, x, offset, count, dtype);
  std::fill(values + count, values + steps * group, 0.0f);
  const int64_t units = units_of<FORMAT>(group);
  for (int64_t i = 0; i < steps; i++) {
    quantize_x<FORMAT>(to + i * units, values + i * group, group);
  }
  if (all_finite(values, count)) return;
  for (int64_t i = 0; i < steps; i++) spoil(to + i * units, values + i * group, group);
}

using Widen = decltype(Kernel::widen);

template <Format FORMAT, size_t... I>
Kernel make(int64_t group, std::index_sequence<I...>) {
  return Kernel{sizeof...(I), units_of<FORMAT>(group), {int_micro<FORMAT, false, I + 1>...},
                load_row<FORMAT>, nullptr, {}};
}

template <Format FORMAT, size_t... I>
Kernel make_widened(int64_t group, Widen widen, std::index_sequence<I...> tiles) {
  Kernel kernel = make<FORMAT>(group, tiles);
  const LinearMicro widened[] = {int_micro<FORMAT, true, I + 1>...};
  kernel.widen = widen;
  kernel.wide_bytes = value_bytes<FORMAT, true>(group) + scale_bytes(FORMAT);
  std::copy(widened, widened + sizeof...(I), kernel.widened);
  return kernel;
}

template <Format FORMAT>
Kernel make_bytes(int64_t group) {
  return make<FORMAT>(group, std::make_index_sequence<kInt8Tile>{});
}

template <Format FORMAT>
Kernel make_words(int64_t group) {
  constexpr std::make_index_sequence<kInt8Tile> tiles{};
#ifdef QUIRE_PLANES
  if constexpr (in_planes(FORMAT)) return make_widened<FORMAT>(group, to_planes, tiles);
#endif
  return make_widened<FORMAT>(group, to_words<FORMAT>, tiles);
}

template <Format FORMAT>
Kernel make_nibbles(int64_t group) {
  constexpr std::make_index_sequence<kInt4Tile> tiles{};
  // Widening int4 costs about as much as each tile saves; with a look-up of floats it saves more.
  if constexpr (kWidensNibbles && FORMAT == kInt4Float) {
    Kernel kernel = make_widened<FORMAT>(group, take_apart<FORMAT>, tiles);
    kernel.least_tiles = 4;
    return kernel;
  }
  return make<FORMAT>(group, tiles);
}

}  // namespace

Kernel kernel_int(const Packed& w) {
  switch (w.format) {
    case kInt8:
      return make_bytes<kInt8>(w.group);
    case kInt8Zero:
      return make_bytes<kInt8Zero>(w.group);
    case kInt4:
      return make_nibbles<kInt4>(w.group);
    case kInt4Min:
      return make_nibbles<kInt4Min>(w.group);
    case kInt4Float:
      return make_nibbles<kInt4Float>(w.group);
    case kTable4:
      return make_words<kTable4>(w.group);
    case kFloat8:
#ifdef QUIRE_FLOAT8_PAIRS
      return kernel_float8(w);
#else
      return make_words<kFloat8>(w.group);
#endif
    default:
      return make_nibbles<kInt4Zero>(w.group);
  }
}

}  // namespace quire
