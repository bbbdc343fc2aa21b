// The microkernel for integer weights.
#include "linear_int.h"

#include <utility>

namespace quire {
namespace {

constexpr int kIntTile = W == 16 ? 8 : W == 8 ? 3 : 4;
// A row's group of x begins with its scale, the start of its sums, and scale * sum(x).
constexpr int kHead = 3;

// sums[r] += quads of one group, for int8 and int4.
template <int ROWS>
QUIRE_INLINE void add_int8(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                           int64_t line_ahead, int64_t group) {
  for (int64_t i = 0; i < group; i += 4, b += NR * 4, ahead += line_ahead, a++) {
#pragma GCC unroll 4
    for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(ahead + line);
    const Bytes b0 = load_bytes(b), b1 = load_bytes(b + W * 4);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Quad x = load_quad(a + r * kRowUnits);
      sums[r][0] = vdot(sums[r][0], b0, x);
      sums[r][1] = vdot(sums[r][1], b1, x);
    }
  }
}

template <int ROWS>
QUIRE_INLINE void add_int4(vi (&sums)[ROWS][2], const uint32_t* a, const char* b, const char* ahead,
                           int64_t line_ahead, int64_t group) {
  for (int64_t i = 0; i < group; i += 8, b += NR * 4, ahead += line_ahead, a += 2) {
#pragma GCC unroll 4
    for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(ahead + line);
    const Nibbles b0 = load_nibbles(b), b1 = load_nibbles(b + W * 4);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Quad low = load_quad(a + r * kRowUnits), high = load_quad(a + r * kRowUnits + 1);
      sums[r][0] = vdot_small(sums[r][0], b0, low, high);
      sums[r][1] = vdot_small(sums[r][1], b1, low, high);
    }
  }
}

template <Format FORMAT, int ROWS>
void int_micro(const MicroCall& call) {
  vf acc[ROWS][2];
  load_sums(call, acc);
  const char *b = call.b, *ahead = call.ahead;
  const uint32_t* block = call.a;
  const int64_t group = call.group, values = FORMAT == kInt8 ? group * NR : group * NR / 2;
  const int64_t step_units = kHead + group / 4;
  const int64_t step_bytes = values + NR * 2 * (FORMAT == kInt4Min ? 2 : 1);
  const int64_t line_ahead = NR * 4 * call.ahead_step / step_bytes;
  for (int64_t left = call.steps; left > 0; left -= call.block_steps) {
    const int64_t steps = left < call.block_steps ? left : call.block_steps;
    const uint32_t* a = block;
    for (int64_t i = 0; i < steps; i++) {
      vi sums[ROWS][2];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = vset_int(int(a[r * kRowUnits + 1]));
      if (FORMAT == kInt8) {
        add_int8<ROWS>(sums, a + kHead, b, ahead, line_ahead, group);
      } else {
        add_int4<ROWS>(sums, a + kHead, b, ahead, line_ahead, group);
      }
      const f16* scales = reinterpret_cast<const f16*>(b + values);
      const float* head = reinterpret_cast<const float*>(a);
      const vf s0 = vload(scales), s1 = vload(scales + W);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const vf by = vset(head[r * kRowUnits]);
        acc[r][0] = vfma(vfloat(sums[r][0]), by * s0, acc[r][0]);
        acc[r][1] = vfma(vfloat(sums[r][1]), by * s1, acc[r][1]);
      }
      if (FORMAT == kInt4Min) {
        const vf m0 = vload(scales + NR), m1 = vload(scales + NR + W);
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

// Rounds one group of x to int8 and lays it out for the kernel.
void quantize_x(uint32_t* to, const float* x, int64_t group, int offset) {
  vf top = vset(0.0f);
  for_lanes(group, [&](int64_t i, int n) { top = vmax(top, vabs(vload_some(x + i, n))); });
  const float most = vmaximum(top), scale = most / 127.0f;
  const vf inverse = vset(most > 0 ? 127.0f / most : 0.0f);
  float rounded[kMostGroup];
  for_lanes(group, [&](int64_t i, int n) {
    vstore_some(rounded + i, vround(vload_some(x + i, n) * inverse), n);
  });
  int8_t q[kMostGroup];
  int32_t sum = 0;
  for (int64_t i = 0; i < group; i++) {
    q[i] = static_cast<int8_t>(rounded[i]);
    sum += q[i];
  }
  const float scaled_sum = scale * static_cast<float>(sum);
  const int32_t start = -offset * sum;
  std::memcpy(to, &scale, 4);
  std::memcpy(to + 1, &start, 4);
  std::memcpy(to + 2, &scaled_sum, 4);
  std::memcpy(to + kHead, q, group);
}

template <Format FORMAT>
void load_row(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps, int dtype,
              int64_t group) {
  // A block holds at most as many values as units of four, and a group more.
  float values[4 * kBlockUnits + kMostGroup];
  read_row(values, x, offset, count, dtype);
  std::fill(values + count, values + steps * group, 0.0f);
  for (int64_t i = 0; i < steps; i++) {
    quantize_x(to + i * (kHead + group / 4), values + i * group, group, offset_of(FORMAT));
  }
}

template <Format FORMAT, size_t... I>
Kernel make(std::index_sequence<I...>) {
  return Kernel{kIntTile, 0, {int_micro<FORMAT, I + 1>...}, load_row<FORMAT>};
}

}  // namespace

Kernel kernel_int(const Packed& w) {
  constexpr std::make_index_sequence<kIntTile> tiles{};
  Kernel kernel = w.format == kInt8   ? make<kInt8>(tiles)
                  : w.format == kInt4 ? make<kInt4>(tiles)
                                      : make<kInt4Min>(tiles);
  kernel.step_units = kHead + w.group / 4;
  return kernel;
}

}  // namespace quire
