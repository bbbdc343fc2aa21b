// The machine's peak performance, to which a benchmark's percentages refer.
#include "runtime.h"

namespace quire {
namespace {

constexpr int64_t kPiece = 1 << 20;
constexpr int kSums = 8;

// Reads `bytes` and nothing else.
float read_piece(const char* p, int64_t bytes) {
  vf sums[kSums];
  for (vf& sum : sums) sum = vset(0.0f);
  for (int64_t i = 0; i < bytes; i += kSums * W * 4) {
    for (int j = 0; j < kSums; j++) {
      sums[j] = sums[j] + vload(reinterpret_cast<const float*>(p + i) + j * W);
    }
  }
  vf total = vset(0.0f);
  for (const vf& sum : sums) total = total + sum;
  return vsum(total);
}

// Multiply-adds in registers, with enough independent ones to hide their latency.
float multiply_piece(int64_t rounds) {
  constexpr int kChains = 12;
  vf sums[kChains];
  for (vf& sum : sums) sum = vset(1.0f);
  vf x = vset(0.5f), y = vset(0.25f);
  for (int64_t i = 0; i < rounds; i++) {
    for (vf& sum : sums) sum = vfma(sum, x, y);
  }
  vf total = vset(0.0f);
  for (const vf& sum : sums) total = total + sum;
  return vsum(total);
}

}  // namespace
}  // namespace quire

// Reads `bytes` (a multiple of a MiB) of float32 on all threads.
extern "C" int quire_read_memory(const void* p, int64_t bytes, int threads) {
  volatile float sink = 0;
  deal(threads, bytes / kPiece, [&](int64_t i, int) {
    sink = read_piece(static_cast<const char*>(p) + i * kPiece, kPiece);
  });
  return kOk;
}

// 24 * vector width * 100,000 floating-point operations per piece, on all threads.
extern "C" int quire_multiply(int64_t pieces, int threads) {
  volatile float sink = 0;
  deal(threads, pieces, [&](int64_t, int) { sink = multiply_piece(100000); });
  return kOk;
}
