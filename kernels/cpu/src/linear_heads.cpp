// A linear layer per head: small products, dealt by head and groups of rows.
#include <atomic>

#include "linear.h"

namespace quire {
namespace {

// Rows that a head multiplies together; bounds the buffer.
constexpr int64_t kRowsAtOnce = 256;

// `count` rows of a head from `row` on; `room` is a buffer [kRowsAtOnce, n].
int run_head(const HeadLinears& h, int64_t head, int64_t row, int64_t count, char* room) {
  const Packed& w = *h.layers[head];
  const int64_t size = static_cast<int64_t>(size_of(h.dtype)), bytes = w.n * size;
  const char* x = h.x + (row * h.x_stride + head * h.x_head) * size;
  char* out = h.out + (row * h.out_stride + head * h.out_head) * size;
  const bool dense = count == 1 || h.out_stride == w.n;
  const int wrong = linear(w, dense ? out : room, x, h.x_stride, count, h.dtype, 1);
  if (wrong || dense) return wrong;
  for (int64_t i = 0; i < count; i++) std::memcpy(out + i * h.out_stride * size, room + i * bytes, bytes);
  return kOk;
}

}  // namespace

int linear_heads(const HeadLinears& h, int threads) {
  if (h.dtype > kF16) return kBadDType;
  const Packed& w = *h.layers[0];
  const int64_t parts = (h.rows + kRowsAtOnce - 1) / kRowsAtOnce, pieces = h.heads * parts;
  const int team = worth(threads, h.heads * w.bytes * (1 + h.rows / 8), 32768);
  const int64_t most = std::min(h.rows, kRowsAtOnce) * w.n * static_cast<int64_t>(size_of(h.dtype));
  char* room;
  Layout layout;
  layout.add(&room, team * ((most + 63) / 64 * 64));
  layout.take(Scratch::kHeads);
  std::atomic<int> wrong{kOk};
  deal(team, pieces, [&](int64_t piece, int slot) {
    const int64_t row = piece % parts * kRowsAtOnce, count = std::min(kRowsAtOnce, h.rows - row);
    char* own = room + slot * ((most + 63) / 64 * 64);
    const int status = guarded([&] { return run_head(h, piece / parts, row, count, own); });
    if (status) wrong = status;
  });
  return wrong;
}

}  // namespace quire

extern "C" int quire_linear_heads(const void* const* layers, int64_t heads, void* out,
                                  int64_t out_stride, int64_t out_head, const void* x,
                                  int64_t x_stride, int64_t x_head, int64_t rows, int dtype,
                                  int threads) {
  const HeadLinears all{reinterpret_cast<const Packed* const*>(layers),
                        heads,
                        static_cast<char*>(out),
                        static_cast<const char*>(x),
                        out_stride,
                        out_head,
                        x_stride,
                        x_head,
                        rows,
                        dtype};
  return guarded([&] { return linear_heads(all, threads); });
}
