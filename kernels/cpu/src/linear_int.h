// int8 and int4 weights: groups of k share a scale, and x is quantized in the same groups.
//
// A step is one group of a panel: its quads of k, [group / 4][NR] four bytes each (or pairs of k,
// see kInt8Unit; int4: two quads in the low and the high nibbles, [group / 8][NR]), then NR scales
// in f16, then, with minima or zero points, NR of those. Floats in 4 bits become integers by a
// table, twice their value. Table entries and floats in 8 bits (e4m3) become 16-bit words, with
// scales in float32 (but see linear_float8.cpp). Weights are stored with an offset, for which the
// kernel compensates by starting each sum at -offset * sum(x).
#pragma once

#include "linear.h"
#include "vec_words.h"

namespace quire {

constexpr int kMostGroup = 256;

struct Scale {
  float scale, minimum;  // or the zero point, see has_zeros
};

constexpr bool is_int8(Format format) { return format == kInt8 || format == kInt8Zero; }

constexpr bool has_zeros(Format format) { return format == kInt4Zero || format == kInt8Zero; }

constexpr bool has_second(Format format) { return format == kInt4Min || has_zeros(format); }

// Twice the values of e2m1 codes.
constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int kDoubledOffset = 12;

// Formats that become 16-bit words, with float32 scales.
constexpr bool is_words(Format format) { return format == kTable4 || format == kFloat8; }

// Formats whose high and low bytes are multiplied separately: x is bytes, and codes are stored as
// in int4.
constexpr bool in_planes(Format format) {
#ifdef QUIRE_PLANES
  return format == kTable4;
#else
  return false;
#endif
}

// The byte with value i of column j of a group of words. Two values are multiplied by two of x, so
// each 16 bytes are pairs of k of four columns, followed by their next pairs.
inline int64_t word_byte(Format format, int64_t j, int64_t i) {
  if (in_planes(format)) return i / 8 * NR * 4 + j * 4 + i % 4;
  return i / (format == kTable4 ? 8 : 4) * NR * 4 + j / 4 * 16 + i / 2 % 2 * 8 + j % 4 * 2 + i % 2;
}

inline int64_t bytes_of_values(Format format, int64_t group) {
  return is_int8(format) || format == kFloat8 ? group * NR : group * NR / 2;
}

// Bytes of a group's scales, and of its minima or zero points.
constexpr int64_t scale_bytes(Format format) {
  return NR * (is_words(format) || has_second(format) ? 4 : 2);
}

inline int64_t group_bytes(Format format, int64_t group) {
  return bytes_of_values(format, group) + scale_bytes(format);
}

inline int offset_of(Format format) {
  return is_int8(format)        ? kInt8Offset
         : format == kInt4      ? 8
         : format == kInt4Float ? kDoubledOffset
         : in_planes(format)    ? 128  // of high bytes
                                : 0;
}

// Rounds `count` values to integers with the best scale: int8 in [-127, 127], int4 in [0, 15].
Scale quantize_group(Format format, const float* x, int64_t count, int8_t* q);

// Writes column j of group g of a panel. int8 is signed, int4 in [0, 15].
void put_group(const Packed& w, int64_t panel, int64_t g, int64_t j, const int8_t* q, Scale scale);

// The same for kFloat8: `count` codes, then zeros up to the end of the group.
void put_float8(const Packed& w, int64_t panel, int64_t g, int64_t j, const uint8_t* codes,
                int64_t count, float scale);

}  // namespace quire
