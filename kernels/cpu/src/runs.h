// Scheduling of pieces that are adjacent in memory and take about the same time.
//
// Each thread takes the pieces of its own run one after the other, so that it reads contiguous
// memory, and claiming them costs nothing without contention. Then it takes pieces from the ends of
// others' runs, so that a slow thread doesn't delay the rest (work stealing; Blumofe and Leiserson,
// "Scheduling Multithreaded Computations by Work Stealing", 1999).
#pragma once

#include <atomic>
#include <cstdint>

#include "pool.h"

namespace quire {

class Runs {
 public:
  static constexpr int kMost = 64;  // threads
  static constexpr int64_t kMostPieces = int64_t{1} << 31;

  Runs(int threads, int64_t pieces) : threads_(threads) {
    for (int64_t i = 0; i < threads; i++) {
      const uint64_t from = pieces * i / threads, to = pieces * (i + 1) / threads;
      runs_[i].left.store(to << 32 | from, std::memory_order_relaxed);
    }
  }

  // Claims a piece for the caller, from its own run `own` if any are left; -1 if none are.
  int64_t take(int64_t own) {
    for (int64_t i = 0; i < threads_; i++) {
      const int64_t piece = take_of(runs_[(own + i) % threads_], i == 0);
      if (piece >= 0) return piece;
    }
    return -1;
  }

 private:
  struct alignas(64) Run {
    std::atomic<uint64_t> left;  // end << 32 | first
  };

  static int64_t take_of(Run& run, bool first) {
    uint64_t left = run.left.load(std::memory_order_relaxed);
    for (;;) {
      const auto from = static_cast<uint32_t>(left), to = static_cast<uint32_t>(left >> 32);
      if (from >= to) return -1;
      const uint64_t rest = first ? left + 1 : left - (uint64_t{1} << 32);
      // The pool orders memory: the pieces' inputs were written before the call, and the caller
      // waits for all pieces.
      if (run.left.compare_exchange_weak(left, rest, std::memory_order_relaxed))
        return first ? from : to - 1;
    }
  }

  int64_t threads_;
  Run runs_[kMost];
};

// deal(), in runs.
template <class F>
void deal_runs(int threads, int64_t pieces, F&& f) {
  const bool fits = threads > 1 && threads <= Runs::kMost && pieces < Runs::kMostPieces;
  if (!fits || pieces <= threads) return deal(threads, pieces, f);
  Runs runs(threads, pieces);
  deal(threads, threads, [&](int64_t own, int slot) {
    for (int64_t piece; (piece = runs.take(own)) >= 0;) f(piece, slot);
  });
}

}  // namespace quire
