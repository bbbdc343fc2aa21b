// Dtypes, status codes and scratch memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "abi.h"
#include "pool.h"
#include "vec.h"

namespace quire {

// The last three are only for KV caches.
enum DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kI8 = 3, kE4M3 = 4, kE5M2 = 5 };

// Returned by the functions of the C interface; kernels/cpu/library.py has the messages.
enum Status : int32_t {
  kOk = 0,
  kBadDType = 1,
  kBadPosition = 2,
  kBadSlot = 3,
  kBadBlock = 4,
  kBadSequence = 5,
  kNoMemory = 6,
  kBadRow = 7,
  kBadPiece = 8,
  kRankFailed = 9,
  kRankTimeout = 10,
  kInterrupted = 11,
};

inline size_t size_of(int dtype) { return dtype == kF32 ? 4 : dtype >= kI8 ? 1 : 2; }

// Calls f(T*) with a null pointer of the type that `dtype` names.
template <class F>
int with_float(int dtype, F&& f) {
  switch (dtype) {
    case kF32:
      return f(static_cast<float*>(nullptr));
    case kBF16:
      return f(static_cast<bf16*>(nullptr));
    case kF16:
      return f(static_cast<f16*>(nullptr));
    default:
      return kBadDType;
  }
}

// `n` values of `dtype` at element `offset` of `p`, to and from float32.
void read_row(float* out, const void* p, int64_t offset, int64_t n, int dtype);
void write_row(void* p, int64_t offset, const float* x, int64_t n, int dtype);

// ---- threads ------------------------------------------------------------------------------------

// The number of threads worth waking for `work` units, if each should get at least `each`.
inline int worth(int threads, int64_t work, int64_t each) {
  const int64_t useful = work / each;
  return useful >= threads ? threads : useful < 1 ? 1 : static_cast<int>(useful);
}

// ---- memory ----------------------------------------------------------------------------------

constexpr size_t kHugePage = 2 << 20;

// Allocates `bytes`, for std::free; throws std::bad_alloc. Uses huge pages where possible, which
// saves most address translations when megabytes are read. `align`: a power of two, at least 64.
char* allocate(size_t bytes, size_t align = 64);

// ---- scratch ------------------------------------------------------------------------------------

// The owner of scratch memory: an operation has its own, separate from that of the operations it
// calls.
enum class Scratch { kRope, kAttention, kContext, kLinear, kExperts, kDecoder, kStep, kLora, kStates, kMixer, kHeads, kRanks, kCount };

// At least `bytes`, aligned to 64, which the calling thread reuses in later calls; it grows but
// never shrinks. Throws std::bad_alloc. Valid until the same thread requests memory for the same
// operation.
char* scratch_for(Scratch whose, size_t bytes);

// The buffers of a call: each is identified by the pointer that shall point to it. All are
// allocated together, before work is dealt.
class Layout {
 public:
  template <class T>
  void add(T** buffer, int64_t count) {
    if (count_ == kMost) std::abort();
    buffers_[count_++] = {buffer, total_};
    total_ += (count * sizeof(T) + 63) & ~size_t{63};
  }
  size_t total() const { return total_; }
  // Sets each pointer, for buffers from `base` on.
  void place(char* base) const {
    for (int i = 0; i < count_; i++) {
      char* at = base + buffers_[i].offset;
      std::memcpy(buffers_[i].pointer, &at, sizeof(at));
    }
  }
  void take(Scratch whose) const { place(scratch_for(whose, total_)); }

 private:
  static constexpr int kMost = 16;
  struct Buffer {
    void* pointer;
    size_t offset;
  };
  Buffer buffers_[kMost];
  int count_ = 0;
  size_t total_ = 0;
};

// Runs body() and turns a failed allocation into its status.
template <class F>
int guarded(F&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace quire
