// Rounding of weights to int8 and int4.
#include "linear_int.h"

namespace quire {
namespace {

float as_stored(float scale) { return to_float(from_float<f16>(scale)); }

// The nearest levels of x on a grid with step 1 / inverse, between `low` and `high`.
QUIRE_INLINE vf levels(vf x, vf inverse, float low, float high) {
  return vmin(vmax(vround(x * inverse), vset(low)), vset(high));
}

void write_levels(const float* x, int64_t count, float scale, float low, float high, int offset,
                  int8_t* q) {
  const vf inverse = vset(scale != 0 ? 1.0f / scale : 0.0f);
  float rounded[kMostGroup];
  for_lanes(count, [&](int64_t i, int n) {
    vstore_some(rounded + i, levels(vload_some(x + i, n), inverse, low, high), n);
  });
  for (int64_t i = 0; i < count; i++) q[i] = int8_t(int(rounded[i]) + offset);
}

float largest(const float* x, int64_t count) {
  vf top = vset(0.0f);
  for_lanes(count, [&](int64_t i, int n) { top = vmax(top, vabs(vload_some(x + i, n))); });
  return vmaximum(top);
}

Scale quantize_int8(const float* x, int64_t count, int8_t* q) {
  // As stored, so that the integers fit the scale that the kernel uses.
  const float scale = as_stored(largest(x, count) / 127.0f);
  write_levels(x, count, scale, -127, 127, 0, q);
  return {scale, 0};
}

// The squared error of rounding to multiples of `scale` from -8 to 7.
float error_of(const float* x, int64_t count, float scale) {
  const vf inverse = vset(scale != 0 ? 1.0f / scale : 0.0f), step = vset(scale);
  vf error = vset(0.0f);
  for_lanes(count, [&](int64_t i, int n) {
    const vf value = vload_some(x + i, n);
    const vf off = levels(value, inverse, -8, 7) * step - value;
    error = vfma(off, off, error);
  });
  return vsum(error);
}

// The value of largest magnitude becomes -8 or slightly beside it: of a few such scales, this is
// the one with the least squared error.
Scale quantize_int4(const float* x, int64_t count, int8_t* q) {
  float top = largest(x, count);
  for (int64_t i = 0; i < count; i++) {
    if (std::fabs(x[i]) == std::fabs(top)) {
      top = x[i];
      break;
    }
  }
  float best = INFINITY, chosen = NAN;  // remains NaN if no scale is finite
  for (int step = -4; step <= 10; step++) {
    const float scale = as_stored(top / (-8.0f + 0.1f * static_cast<float>(step)));
    const float error = error_of(x, count, scale);
    if (error < best) best = error, chosen = scale;
  }
  write_levels(x, count, chosen, -8, 7, 8, q);
  return {chosen, 0};
}

}  // namespace

Scale quantize_group(Format format, const float* x, int64_t count, int8_t* q) {
  if (!all_finite(x, count)) {
    std::fill(q, q + count, int8_t{0});
    return {NAN, 0};  // makes results NaN, as in floats
  }
  return format == kInt8 ? quantize_int8(x, count, q) : quantize_int4(x, count, q);
}

void put_group(const Packed& w, int64_t panel, int64_t g, int64_t j, const int8_t* q, Scale scale) {
  char* step = w.panel(panel) + g * w.step_bytes;
  char* out = step + j * 4;
  int64_t values = w.group;
  if (is_int8(w.format)) {
    out = step + j * kInt8Unit;
    for (int64_t i = 0; i < w.group; i += kInt8Unit, out += NR * kInt8Unit) {
      for (int b = 0; b < kInt8Unit; b++) out[b] = static_cast<char>(q[i + b] + kInt8Offset);
    }
  } else if (w.format == kTable4) {
    values = w.group / 2;
    for (int64_t i = 0; i < w.group; i++) {
      char& byte = step[word_byte(w.format, j, i)];
      byte = static_cast<char>(i % 8 < 4 ? q[i] : byte | q[i] << 4);
    }
    const float by = scale.scale * w.table_scale;
    std::memcpy(step + values * NR + j * 4, &by, 4);
    return;
  } else {
    values = w.group / 2;
    for (int64_t i = 0; i < w.group; i += 8, out += NR * 4) {
      uint8_t quad[4];
      for (int b = 0; b < 4; b++) quad[b] = uint8_t(q[i + b] | q[i + 4 + b] << 4);
      std::memcpy(out, quad, 4);
    }
  }
  f16* scales = reinterpret_cast<f16*>(step + values * NR);
  scales[j] = from_float<f16>(scale.scale);
  if (has_second(w.format)) scales[NR + j] = from_float<f16>(scale.minimum);
}

void put_float8(const Packed& w, int64_t panel, int64_t g, int64_t j, const uint8_t* codes,
                int64_t count, float scale) {
  char* step = w.panel(panel) + g * w.step_bytes;
  for (int64_t i = 0; i < w.group; i++) {
    const uint8_t code = i < count ? codes[i] : 0;
    step[word_byte(w.format, j, i)] = static_cast<char>(code);
    if ((code & 0x7f) == 0x7f) scale = NAN;  // makes results NaN
  }
  scale *= kFloat8Step;
  std::memcpy(step + w.group * NR + j * 4, &scale, 4);
}

}  // namespace quire
