// Dtypes, error codes, the team of threads and its scratch memory.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "vec.h"

namespace quire {

enum DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kI8 = 3 };

// Returned by every function of the C interface; kernels/cpu/library.py has the words for them.
enum Status : int32_t {
  kOk = 0,
  kBadDType = 1,
  kBadPosition = 2,
  kBadSlot = 3,
  kBadBlock = 4,
  kBadSequence = 5,
  kNoMemory = 6,
};

inline size_t size_of(int dtype) { return dtype == kF32 ? 4 : dtype == kI8 ? 1 : 2; }

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

// What the threads of one parallel region share: a barrier and a counter that deals out work.
//
// Work is dealt in small pieces, not split in advance: when something else runs on one of the
// cores, the other threads take over its share. Who does a piece never changes its result.
class Team {
 public:
  // The next piece of work, from 0 on after each barrier.
  int64_t take(int64_t pieces = 1) {
    return counter_.fetch_add(pieces, std::memory_order_relaxed);
  }

  // Waits for all `size` threads and sets the counter back to 0.
  void barrier(int size) {
    if (size == 1) {
      counter_.store(0, std::memory_order_relaxed);
      return;
    }
    const uint32_t seen = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      counter_.store(0, std::memory_order_relaxed);
      generation_.store(seen + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; spins++) {
      // Someone else may need this core for the thread we wait for to get on.
      if (spins > kSpins) {
        sched_yield();
      } else {
        relax();
      }
    }
  }

 private:
  static constexpr int kSpins = 20000;
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  alignas(64) std::atomic<int64_t> counter_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
};

// One thread's view of its team.
struct Worker {
  Team& team;
  int rank;
  int size;
  int64_t take(int64_t pieces = 1) const { return team.take(pieces); }
  void barrier() const { team.barrier(size); }
};

// Runs body(worker) on `threads` threads (fewer inside another parallel region).
template <class F>
void parallel(int threads, F&& body) {
  Team team;
  if (threads <= 1) {
    body(Worker{team, 0, 1});
    return;
  }
#pragma omp parallel num_threads(threads)
  body(Worker{team, omp_get_thread_num(), omp_get_num_threads()});
}

// Threads worth waking for `work` units when each should get at least `each`.
inline int worth(int threads, int64_t work, int64_t each) {
  const int64_t useful = work / each;
  return useful >= threads ? threads : useful < 1 ? 1 : static_cast<int>(useful);
}

// Rows [low, high) of `count` for one of `size` threads.
inline void share(int64_t count, const Worker& w, int64_t* low, int64_t* high) {
  *low = count * w.rank / w.size;
  *high = count * (w.rank + 1) / w.size;
}

// ---- scratch ------------------------------------------------------------------------------------

// Memory that the calling thread keeps from call to call; grows, never shrinks. Lay out what a
// call needs with `Layout`, then ask for it once, before the parallel region.
class Scratch {
 public:
  // At least `bytes`, aligned to 64; throws std::bad_alloc. One at a time for each slot.
  static char* get(int slot, size_t bytes);
};

// Adds up aligned pieces of a scratch block.
class Layout {
 public:
  size_t add(size_t bytes) {
    const size_t at = total_;
    total_ += (bytes + 63) & ~size_t{63};
    return at;
  }
  size_t total() const { return total_; }

 private:
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
