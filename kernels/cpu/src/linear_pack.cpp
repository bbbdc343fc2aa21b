// Brings weights into the order in which the kernels read them.
#include <sys/mman.h>

#include <cstdlib>
#include <memory>

#include "linear_int.h"

namespace quire {
namespace {

// Memory for weights: in huge pages as far as it covers them, which spares a read of gigabytes most
// of its address translations.
char* allocate(int64_t bytes) {
  char* data = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  if (!data) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t from = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t to = reinterpret_cast<uintptr_t>(data + bytes) / kHuge * kHuge;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
  return data;
}

// W x W words of 32 bits, turned: word i of row j goes to column j of step i. The rows are far apart
// in memory, often by a power of two: each line of them must be used whole while it is in the cache.
void turn_block(char* to, const char* src, int64_t row_bytes) {
  vf block[W];
  for (int j = 0; j < W; j++) block[j] = vload(reinterpret_cast<const float*>(src + j * row_bytes));
  vtranspose(block);
  for (int i = 0; i < W; i++) vstore(reinterpret_cast<float*>(to) + i * NR, block[i]);
}

// The word at byte `at` of a row of `bytes`; what lies behind the row's end is zero.
uint32_t word_at(const char* row, int64_t at, int64_t bytes) {
  uint32_t word = 0;
  std::memcpy(&word, row + at, std::min<int64_t>(4, bytes - at));
  return word;
}

// [words][NR] from NR rows of `words` 32-bit words each, of which the last may be a half.
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

void pack_panel(const Packed& w, int64_t p, const char* src, int64_t row_bytes) {
  const char* from = src + p * NR * row_bytes;
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

struct Freed {
  void operator()(Packed* w) const {
    std::free(w->data);
    std::free(w->bias);
    delete w;
  }
};

// Everything but the values.
std::unique_ptr<Packed, Freed> make(Format format, int64_t n, int64_t k, int64_t group,
                                    const float* bias) {
  std::unique_ptr<Packed, Freed> w(new Packed{});
  w->format = format, w->n = n, w->k = k, w->group = group;
  w->panels = (n + NR - 1) / NR;
  w->step_k = format >= kInt8 ? group : format == kBrain ? 2 : 1;
  w->steps = (k + w->step_k - 1) / w->step_k;
  w->step_bytes = format >= kInt8 ? group_bytes(format, group) : NR * (format == kHalf ? 2 : 4);
  w->bytes = w->panels * w->steps * w->step_bytes;
  w->data = allocate(w->bytes);
  if (bias) {
    w->bias = reinterpret_cast<float*>(allocate(n * sizeof(float)));
    std::memcpy(w->bias, bias, n * sizeof(float));
  }
  return w;
}

}  // namespace
}  // namespace quire

using namespace quire;

// Packs weights [n, k] of `dtype` as they are. Gives null when memory runs out.
extern "C" void* quire_pack(const void* weight, int64_t row_stride, int dtype, int64_t n, int64_t k,
                            const float* bias, int round_inputs, int threads) {
  try {
    auto w = make(static_cast<Format>(dtype), n, k, 0, bias);
    w->round_inputs = round_inputs != 0;
    const int64_t row_bytes = row_stride * static_cast<int64_t>(size_of(dtype));
    deal(threads, w->panels, [&](int64_t p, int) {
      pack_panel(*w, p, static_cast<const char*>(weight), row_bytes);
    });
    return w.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Quantises weights [n, k] of `dtype` to `format`, a scale for each `group` of a row.
extern "C" void* quire_pack_quantized(const void* weight, int64_t row_stride, int dtype, int64_t n,
                                      int64_t k, const float* bias, int format, int64_t group,
                                      int threads) {
  try {
    auto w = make(static_cast<Format>(format), n, k, group, bias);
    std::unique_ptr<float[]> rows(new float[threads * w->steps * group]);
    std::unique_ptr<int8_t[]> values(new int8_t[threads * w->steps * group]);
    deal(threads, w->panels, [&](int64_t p, int slot) {
      const int64_t first = p * NR;
      float* row = rows.get() + slot * w->steps * group;
      int8_t* q = values.get() + slot * w->steps * group;
      for (int64_t j = 0; j < NR; j++) {
        std::fill(row, row + w->steps * group, 0.0f);
        if (first + j < n) read_row(row, weight, (first + j) * row_stride, k, dtype);
        for (int64_t g = 0; g < w->steps; g++) {
          const Scale scale = quantize_group(w->format, row + g * group, group, q + g * group);
          put_group(*w, p, g, j, q + g * group, scale);
        }
      }
    });
    return w.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Packs integers [n, k] that are quantised already: w = scale * (q - offset) - minimum, with an
// offset of 0 for int8 and int4 with minima, 8 for int4 without. scales, minima [n, k / group].
extern "C" void* quire_pack_integers(const int8_t* q, const float* scales, const float* minima,
                                     int64_t n, int64_t k, const float* bias, int format,
                                     int64_t group, int threads) {
  try {
    auto w = make(static_cast<Format>(format), n, k, group, bias);
    deal(threads, w->panels, [&](int64_t p, int) {
      for (int64_t j = 0; j < NR; j++) {
        const int64_t row = p * NR + j;
        for (int64_t g = 0; g < w->steps; g++) {
          const int8_t zeros[kMostGroup] = {};
          const int64_t at = row * w->steps + g;
          const bool real = row < n;
          const Scale scale{real ? scales[at] : 0.0f, real && minima ? minima[at] : 0.0f};
          put_group(*w, p, g, j, real ? q + row * k + g * group : zeros, scale);
        }
      }
    });
    return w.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

extern "C" void quire_free_packed(void* packed) {
  if (packed) Freed{}(static_cast<Packed*>(packed));
}

extern "C" int64_t quire_packed_bytes(const void* packed) {
  return static_cast<const Packed*>(packed)->bytes;
}
