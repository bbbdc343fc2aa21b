// Converts weights to the layout of the kernels.
#include <memory>

#include "linear_int.h"
#include "ranks.h"
#include "weights.h"

namespace quire {
namespace {

// Transposes W x W words of 32 bits: word i of row j becomes column j of step i. The rows are far
// apart in memory, often by a power of two, so each of their cache lines must be used whole while
// it is in the cache.
void turn_block(char* to, const char* src, int64_t row_bytes) {
  vf block[W];
  for (int j = 0; j < W; j++) block[j] = vload(reinterpret_cast<const float*>(src + j * row_bytes));
  vtranspose(block);
  for (int i = 0; i < W; i++) vstore(reinterpret_cast<float*>(to) + i * NR, block[i]);
}

// The word at byte `at` of a row of `bytes`, with zeros beyond the row's end.
uint32_t word_at(const char* row, int64_t at, int64_t bytes) {
  uint32_t word = 0;
  std::memcpy(&word, row + at, std::min<int64_t>(4, bytes - at));
  return word;
}

// [words][NR] from NR rows of `words` 32-bit words each, the last of which may be half a word.
void turn_panel(char* to, const char* src, int64_t row_bytes, int64_t rows, int64_t bytes) {
  const int64_t words = (bytes + 3) / 4;
  uint32_t* out = reinterpret_cast<uint32_t*>(to);
  for (int64_t j = 0; j < NR; j += W) {
    const int64_t whole = j + W <= rows ? bytes / 4 / W * W : 0;
    for (int64_t i = 0; i < whole; i += W)
      turn_block(reinterpret_cast<char*>(out + i * NR + j), src + j * row_bytes + i * 4, row_bytes);
    for (int64_t i = whole; i < words; i++) {
      for (int64_t c = j; c < j + W; c++)
        out[i * NR + c] = c < rows ? word_at(src + c * row_bytes, i * 4, bytes) : 0;
    }
  }
}

// Pairs of f16 along an even k -> [k][NR] f16, in place: NR pairs are as long as two rows of NR.
void split_pairs(char* panel, int64_t k) {
  for (int64_t i = 0; i < k; i += 2) {
    uint32_t pairs[NR];
    uint16_t* out = reinterpret_cast<uint16_t*>(panel) + i * NR;
    std::memcpy(pairs, out, sizeof(pairs));
    for (int64_t j = 0; j < NR; j++) {
      out[j] = static_cast<uint16_t>(pairs[j]);
      out[NR + j] = static_cast<uint16_t>(pairs[j] >> 16);
    }
  }
}

// Panel `p` of float weights from the rows at `from`.
void pack_panel(const Packed& w, int64_t p, const char* from, int64_t row_bytes) {
  const int64_t rows = std::min<int64_t>(NR, w.n - p * NR);
  if (w.format != kHalf) {
    turn_panel(w.panel(p), from, row_bytes, rows, w.k * (w.format == kFloat ? 4 : 2));
    return;
  }
  const int64_t even = w.k / 2 * 2;
  turn_panel(w.panel(p), from, row_bytes, rows, even * 2);
  split_pairs(w.panel(p), even);
  uint16_t* last = reinterpret_cast<uint16_t*>(w.panel(p)) + even * NR;
  for (int64_t j = 0; even < w.k && j < NR; j++) {
    last[j] = j < rows ? static_cast<uint16_t>(word_at(from + j * row_bytes, even * 2, w.k * 2)) : 0;
  }
}

// Quantizes `count` rows of x into panel `p`; the panel's other rows become zeros.
void quantize_panel(const Packed& w, int64_t p, const void* x, int64_t offset, int64_t stride,
                    int dtype, int64_t count, float* row, int8_t* q) {
  const int64_t width = w.steps * w.group;
  for (int64_t j = 0; j < NR; j++) {
    std::fill(row, row + width, 0.0f);
    if (j < count) read_row(row, x, offset + j * stride, w.k, dtype);
    for (int64_t g = 0; g < w.steps; g++) {
      const Scale scale = quantize_group(w.format, row + g * w.group, w.group, q + g * w.group);
      put_group(w, p, g, j, q + g * w.group, scale);
    }
  }
}

// Rows are packed in whole panels: a slice begins with one, and only the last one ends within one.
bool whole_panels(const Packed& w, int64_t first, int64_t rows) {
  return first >= 0 && rows >= 0 && first % NR == 0 && first + rows <= w.n &&
         (rows % NR == 0 || first + rows == w.n);
}

struct Freed {
  void operator()(Packed* w) const {
    give_weights(w->data, w->bytes);
    give_weights(w->bias, w->n * static_cast<int64_t>(sizeof(float)));
    give_weights(w->order, w->k * static_cast<int64_t>(sizeof(int32_t)));
    delete w->shard;
    delete w;
  }
};

template <class T>
T* copied(const T* from, int64_t count) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  T* to = reinterpret_cast<T*>(take_weights(bytes));
  std::memcpy(to, from, bytes);
  return to;
}

// Table entries in units of the largest one.
void set_table(Packed& w, const float* table) {
  float top = 0.0f;
  for (int i = 0; i < 16; i++) top = std::max(top, std::fabs(table[i]));
  w.table_scale = top / 32767.0f;
  for (int i = 0; i < 16; i++) {
    const int entry = top > 0 ? static_cast<int>(std::nearbyint(table[i] / top * 32767.0f)) : 0;
    w.table[i] = static_cast<uint8_t>(entry), w.table[16 + i] = static_cast<uint8_t>(entry >> 8);
  }
}

int64_t bytes_of_step(Format format, int64_t group) {
  return format >= kInt8 ? group_bytes(format, group) : NR * (format == kHalf ? 2 : 4);
}

// Everything but the values.
std::unique_ptr<Packed, Freed> make(Format format, int64_t n, int64_t k, int64_t group,
                                    const float* bias, const int32_t* order) {
  std::unique_ptr<Packed, Freed> w(new Packed{});
  w->format = format, w->n = n, w->k = k, w->group = group;
  w->panels = (n + NR - 1) / NR;
  w->step_k = format >= kInt8 ? group : format == kBrain ? 2 : 1;
  w->steps = (k + w->step_k - 1) / w->step_k;
  w->step_bytes = bytes_of_step(format, group);
  w->bytes = w->panels * w->steps * w->step_bytes;
  w->data = take_weights(w->bytes);
  if (bias) w->bias = copied(bias, n);
  if (order) w->order = copied(order, k);
  return w;
}

}  // namespace
}  // namespace quire

// Allocates weights [n, k], which the functions below fill in slices of rows. Returns null if
// memory runs out. `group` is for integers and codes, `table` [16] for codes of a table. With
// `order` [k] value i of a row is multiplied by value order[i] of x; each must be within k.
extern "C" void* quire_pack_new(int format, int64_t n, int64_t k, int64_t group, const float* bias,
                                int round_inputs, const float* table, const int32_t* order) {
  try {
    auto w = make(static_cast<Format>(format), n, k, group, bias, order);
    w->round_inputs = round_inputs != 0;
    if (table) set_table(*w, table);
    return w.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Packs weights [rows, k] unchanged; `dtype` is the format's own.
extern "C" int quire_pack_rows(void* packed, int64_t first, int64_t rows, const void* weight,
                               int64_t row_stride, int dtype, int threads) {
  const Packed& w = *static_cast<Packed*>(packed);
  if (!whole_panels(w, first, rows) || w.format != dtype) return kBadPiece;
  const int64_t row_bytes = row_stride * static_cast<int64_t>(size_of(dtype));
  const char* src = static_cast<const char*>(weight);
  deal(threads, (rows + NR - 1) / NR, [&](int64_t p, int) {
    pack_panel(w, first / NR + p, src + p * NR * row_bytes, row_bytes);
  });
  return kOk;
}

// Quantizes weights [rows, k] of `dtype`, with a scale for each group of a row.
extern "C" int quire_pack_quantized_rows(void* packed, int64_t first, int64_t rows,
                                         const void* weight, int64_t row_stride, int dtype,
                                         int threads) {
  const Packed& w = *static_cast<Packed*>(packed);
  if (!whole_panels(w, first, rows) || (w.format != kInt8 && w.format != kInt4)) return kBadPiece;
  return guarded([&] {
    const int64_t width = w.steps * w.group;
    std::unique_ptr<float[]> row(new float[threads * width]);
    std::unique_ptr<int8_t[]> values(new int8_t[threads * width]);
    deal(threads, (rows + NR - 1) / NR, [&](int64_t p, int slot) {
      quantize_panel(w, first / NR + p, weight, p * NR * row_stride, row_stride, dtype,
                     rows - p * NR, row.get() + slot * width, values.get() + slot * width);
    });
    return kOk;
  });
}

// Packs quantized integers [rows, k]: w = scale * (q - offset) - minimum, where the offset is 0 for
// int8 and int4 with minima, 8 for int4 without. scales, minima [rows, k / group]. With has_zeros
// minima are zero points: w = scale * (q - zero). For kInt4Float and kTable4 q are codes.
extern "C" int quire_pack_integer_rows(void* packed, int64_t first, int64_t rows, const int8_t* q,
                                       const float* scales, const float* minima, int threads) {
  const Packed& w = *static_cast<Packed*>(packed);
  if (!whole_panels(w, first, rows) || w.format < kInt8 || w.format == kFloat8) return kBadPiece;
  deal(threads, (rows + NR - 1) / NR, [&](int64_t p, int) {
    for (int64_t j = 0; j < NR; j++) {
      const int64_t row = p * NR + j;
      for (int64_t g = 0; g < w.steps; g++) {
        const int8_t zeros[kMostGroup] = {};
        const int64_t at = row * w.steps + g;
        const bool real = row < rows;
        const Scale scale{real ? scales[at] : 0.0f, real && minima ? minima[at] : 0.0f};
        put_group(w, first / NR + p, g, j, real ? q + row * w.k + g * w.group : zeros, scale);
      }
    }
  });
  return kOk;
}

// Packs e4m3 [rows, k], scales [rows, groups]; the last group may be shorter.
extern "C" int quire_pack_float8_rows(void* packed, int64_t first, int64_t rows,
                                      const uint8_t* codes, const float* scales, int threads) {
  const Packed& w = *static_cast<Packed*>(packed);
  if (!whole_panels(w, first, rows) || w.format != kFloat8) return kBadPiece;
  deal(threads, (rows + NR - 1) / NR, [&](int64_t p, int) {
    for (int64_t j = 0; j < NR; j++) {
      const int64_t row = p * NR + j;
      for (int64_t g = 0; g < w.steps; g++) {
        const int64_t count = row < rows ? std::min(w.group, w.k - g * w.group) : 0;
        const float scale = row < rows ? scales[row * w.steps + g] : 0.0f;
        put_float8(w, first / NR + p, g, j, codes + row * w.k + g * w.group, count, scale);
      }
    }
  });
  return kOk;
}

extern "C" void quire_free_packed(void* packed) {
  if (packed) Freed{}(static_cast<Packed*>(packed));
}

extern "C" int64_t quire_packed_bytes(const void* packed) {
  return static_cast<const Packed*>(packed)->bytes;
}
