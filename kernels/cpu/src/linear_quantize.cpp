// Rounding of weights to int8 and int4.
#include "linear_int.h"

namespace quire {
namespace {

float nearest(float x, float low, float high) {
  const float r = std::nearbyint(x);
  return r < low ? low : r > high ? high : r;
}

Scale quantize_int8(const float* x, int64_t count, int8_t* q) {
  float top = 0;
  for (int64_t i = 0; i < count; i++) top = std::max(top, std::fabs(x[i]));
  // As stored, so that the integers fit the scale that the kernel will use.
  const float scale = to_float(from_float<f16>(top / 127.0f));
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < count; i++) q[i] = int8_t(nearest(x[i] * inverse, -127, 127));
  return {scale, 0};
}

// The squared error of rounding to scale * (q - 8), with q left behind.
float round_int4(const float* x, int64_t count, float scale, int8_t* q) {
  const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
  float error = 0;
  for (int64_t i = 0; i < count; i++) {
    const float level = nearest(x[i] * inverse, -8, 7);
    const float off = level * scale - x[i];
    error += off * off;
    q[i] = int8_t(level + 8);
  }
  return error;
}

// The value of largest magnitude goes to -8 or a little further in: of a few such scales, the one
// with the least squared error.
Scale quantize_int4(const float* x, int64_t count, int8_t* q) {
  float top = 0;
  for (int64_t i = 0; i < count; i++) {
    if (std::fabs(x[i]) > std::fabs(top)) top = x[i];
  }
  float best = INFINITY, chosen = 0;
  for (int step = -4; step <= 10; step++) {
    const float scale = to_float(from_float<f16>(top / (-8.0f + 0.1f * static_cast<float>(step))));
    const float error = round_int4(x, count, scale, q);
    if (error < best) best = error, chosen = scale;
  }
  round_int4(x, count, chosen, q);
  return {chosen, 0};
}

}  // namespace

Scale quantize_group(Format format, const float* x, int64_t count, int8_t* q) {
  return format == kInt8 ? quantize_int8(x, count, q) : quantize_int4(x, count, q);
}

void put_group(const Packed& w, int64_t panel, int64_t g, int64_t j, const int8_t* q, Scale scale) {
  char* step = w.panel(panel) + g * w.step_bytes;
  uint8_t* out = reinterpret_cast<uint8_t*>(step);
  int64_t values = w.group;
  if (w.format == kInt8) {
    for (int64_t i = 0; i < w.group; i++) out[i / 4 * NR * 4 + j * 4 + i % 4] = uint8_t(q[i] + kInt8Offset);
  } else {
    values = w.group / 2;
    for (int64_t i = 0; i < w.group; i += 8) {
      for (int64_t b = 0; b < 4; b++) {
        out[i / 8 * NR * 4 + j * 4 + b] = uint8_t(q[i + b] | q[i + 4 + b] << 4);
      }
    }
  }
  f16* scales = reinterpret_cast<f16*>(step + values * NR);
  scales[j] = from_float<f16>(scale.scale);
  if (w.format == kInt4Min) scales[NR + j] = from_float<f16>(scale.minimum);
}

}  // namespace quire
