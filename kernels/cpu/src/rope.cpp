// QK norm, rotary embedding and the write to the paged KV cache, token by token.
#include <limits>

#include "ops.h"

namespace quire {
namespace {

void normalise(float* x, const float* weight, int64_t size, float eps) {
  vf sum = vset(0);
  for_lanes(size, [&](int64_t i, int n) {
    const vf y = vload_some(x + i, n);
    sum = vfma(y, y, sum);
  });
  const vf scale = vset(1.0f / std::sqrt(vsum(sum) / static_cast<float>(size) + eps));
  for_lanes(size, [&](int64_t i, int n) {
    vstore_some(x + i, vload_some(x + i, n) * scale * vload_some(weight + i, n), n);
  });
}

void rotate_halves(float* x, const float* cos_sin, int64_t rotary) {
  const int64_t half = rotary / 2;
  for_lanes(half, [&](int64_t i, int n) {
    const vf c = vload_some(cos_sin + i, n), s = vload_some(cos_sin + half + i, n);
    const vf a = vload_some(x + i, n), b = vload_some(x + half + i, n);
    vstore_some(x + i, a * c - b * s, n);
    vstore_some(x + half + i, b * c + a * s, n);
  });
}

void rotate_neighbours(float* x, const float* cos_sin, int64_t rotary) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; i++) {
    const float c = cos_sin[i], s = cos_sin[half + i], a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = b * c + a * s;
  }
}

// Norms and rotates one head in place; `row` receives its float32 values as stored.
void turn(const RopeArgs& r, void* x, int64_t at, const float* norm, const float* cos_sin, float* row) {
  read_row(row, x, at, r.head_size, r.dtype);
  if (norm) normalise(row, norm, r.head_size, r.eps);
  if (cos_sin && r.neox) rotate_halves(row, cos_sin, r.rotary);
  if (cos_sin && !r.neox) rotate_neighbours(row, cos_sin, r.rotary);
  write_row(x, at, row, r.head_size, r.dtype);
  if (r.dtype != kF32) read_row(row, x, at, r.head_size, r.dtype);
}

// Rounds a row to 8-bit floats, divided by the head's scale.
template <class T>
void store_float8(const RopeArgs& r, T* to, float scale, const float* row) {
  for (int64_t i = 0; i < r.head_size; i++) to[i] = from_float<T>(row[i] / scale);
}

// Rounds a row of KV head `head` to int8 with its own scale, or to the cache's float type.
void store(const RopeArgs& r, void* cache, float* scales, int64_t head, int64_t at, const float* row) {
  if (r.cache_dtype < kI8) {
    write_row(cache, at * r.head_size, row, r.head_size, r.cache_dtype);
    return;
  }
  if (r.cache_dtype != kI8) {
    const float scale = scales ? scales[head] : 1.0f;
    if (r.cache_dtype == kE4M3) store_float8(r, static_cast<e4m3*>(cache) + at * r.head_size, scale, row);
    else store_float8(r, static_cast<e5m2*>(cache) + at * r.head_size, scale, row);
    return;
  }
  vf top = vset(0.0f), off = vset(0.0f);  // off: NaN if a value isn't finite
  for_lanes(r.head_size, [&](int64_t i, int n) {
    const vf x = vload_some(row + i, n);
    top = vmax(top, vabs(x)), off = vfma(x, vset(0.0f), off);
  });
  const bool finite = vsum(off) == 0.0f;
  const float most = vmaximum(top);
  // Values so small that 1 / scale is infinite count as zeros.
  const bool some = finite && most > 127.0f / std::numeric_limits<float>::max();
  const vf inverse = vset(some ? 127.0f / most : 0.0f);
  int8_t* to = static_cast<int8_t*>(cache) + at * r.head_size;
  for_lanes(r.head_size, [&](int64_t i, int n) {
    vstore_some(to + i, some ? vload_some(row + i, n) * inverse : vset(0.0f), n);
  });
  // Integers can't represent nonfinite values, so the scale becomes NaN.
  scales[at] = finite ? most / 127.0f : NAN;
}

void do_token(const RopeArgs& r, int64_t t, const float* q_norm, const float* k_norm, float* row) {
  const float* cos_sin = r.cos_sin ? r.cos_sin + r.positions[t] * r.rotary : nullptr;
  if (cos_sin || q_norm) {
    for (int64_t h = 0; h < r.q_heads; h++) {
      turn(r, r.q, t * r.q_stride + h * r.head_size, q_norm, cos_sin, row);
    }
  }
  const int64_t slot = r.slots[t];
  for (int64_t h = 0; h < r.kv_heads; h++) {
    const int64_t at = h * r.head_size;
    turn(r, r.k, t * r.k_stride + at, k_norm, cos_sin, row);
    if (slot < 0) continue;
    const int64_t block = slot / r.block_size, offset = slot % r.block_size;
    const int64_t to = (block * r.kv_heads + h) * r.block_size + offset;
    store(r, r.key_cache, r.key_scales, h, to, row);
    read_row(row, r.v, t * r.v_stride + at, r.head_size, r.dtype);
    store(r, r.value_cache, r.value_scales, h, to, row);
  }
}

}  // namespace

int check_rope(const RopeArgs& r) {
  const int64_t slots = r.num_blocks * r.block_size;
  for (int64_t t = 0; t < r.tokens; t++) {
    const bool inside = r.positions[t] >= 0 && r.positions[t] < r.max_position;
    if (r.cos_sin && !inside) return kBadPosition;
    if (r.slots[t] < -1 || r.slots[t] >= slots) return kBadSlot;
  }
  return kOk;
}

int rope_and_cache(const RopeArgs& r, int threads) {
  if (const int wrong = check_rope(r)) return wrong;
  const int64_t size = r.head_size;
  const int team = worth(threads, r.tokens * (r.q_heads + r.kv_heads) * size, 2048);
  const int64_t each = (r.tokens + 4 * team - 1) / (4 * team);
  float *norms, *rows;
  Layout layout;
  layout.add(&norms, 2 * size);
  layout.add(&rows, team * (size + 16));
  layout.take(Scratch::kRope);
  float* q_norm = r.q_norm ? norms : nullptr;
  float* k_norm = r.k_norm ? norms + size : nullptr;
  if (q_norm) read_row(q_norm, r.q_norm, 0, size, r.norm_dtype);
  if (k_norm) read_row(k_norm, r.k_norm, 0, size, r.norm_dtype);
  deal(team, each ? (r.tokens + each - 1) / each : 0, [&](int64_t piece, int slot) {
    float* row = rows + slot * (size + 16);
    const int64_t end = std::min(r.tokens, (piece + 1) * each);
    for (int64_t t = piece * each; t < end; t++) do_token(r, t, q_norm, k_norm, row);
  });
  return kOk;
}

}  // namespace quire

extern "C" int quire_rope_and_cache(const RopeArgs* args, int threads) {
  return guarded([&] { return rope_and_cache(*args, threads); });
}
