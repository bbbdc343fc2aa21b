// Ranks: processes that share a model's rows, and gather what each has computed.
//
// All ranks of a machine map the same memory. A gather has a number; each rank writes its part to its slot of the
// buffer that the number's last bit names, says that it has arrived, and reads the others' slots once
// they have. A rank that comes to gather n + 2 has passed n + 1, for which all must have read n: so
// two buffers are enough, and a gather waits once. Ranks of several machines have a copy of the
// memory each, into which an exchange brings the others' slots.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "runtime.h"

namespace quire {

constexpr int kMostRanks = 64;

// At the start of the shared memory, which is zero at first.
struct SharedRanks {
  struct alignas(64) Rank {
    std::atomic<uint32_t> arrived;   // number of its latest gather
    std::atomic<uint32_t> sleepers;  // ranks that sleep until it arrives
  };
  std::atomic<uint32_t> failed;  // no gather succeeds until `reset`
  // Rings for ranks that listen: another one comes to a gather, or theirs is interrupted.
  std::atomic<uint32_t> bell, listeners;
  Rank ranks[kMostRanks];
};

class RankGroup {
 public:
  // Sends `floats` of this rank's slot to all others, and receives theirs; `slots` is the first
  // rank's. Returns -1, the rank that didn't come in time, or `size` where one has failed.
  using Exchange = int (*)(float* slots, int64_t floats);

  RankGroup(void* shared, int rank, int size, int64_t slot_bytes, int64_t timeout_ms,
            Exchange exchange);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t slot_floats() const { return slot_bytes_ / static_cast<int64_t>(sizeof(float)); }
  // A rank's slot of the next gather.
  float* slot(int rank) const;
  float* slot() const { return slot(rank_); }
  // Waits until all ranks' slots are written, of which `floats` count at most; kRankFailed or
  // kRankTimeout. They may be read until the next `arrive`.
  int arrive(int64_t floats);
  // What `slot` means from here on: those of the following gather.
  void advance() { gathers_++; }
  // Has this and all later gathers of all ranks fail. May be called in any thread.
  void fail();
  // This rank begins anew. No rank may be in a gather, and all must do it before the next one.
  void reset();
  // All ranks that share the memory have been reset: gathers succeed again.
  void forget_failure();
  // Sleeps until another rank waits in a gather that this one isn't in: kOk; or kInterrupted, or
  // kRankFailed. No gather may run here meanwhile.
  int listen();
  // Ends this rank's `listen`, or the next one. May be called in any thread.
  void interrupt();
  // Of the latest `arrive` that timed out: the rank that wasn't there.
  int missing() const { return missing_; }
  uint32_t gathers() const { return gathers_; }
  int64_t waited_ns() const { return waited_ns_; }

 private:
  int wait_for(int rank, uint32_t number);
  int wait_for_all();
  bool is_awaited() const;
  void ring();
  int exchange(int64_t floats);

  SharedRanks* shared_;
  char* slots_;
  int rank_, size_;
  int64_t slot_bytes_, timeout_ms_;
  uint32_t gathers_ = 0;
  Exchange exchange_;
  std::atomic<int> missing_{-1};
  std::atomic<int64_t> waited_ns_{0};
  std::atomic<bool> interrupted_{false};
};

// How a linear layer's outputs, and maybe its inputs, are shared out: rank r has the columns from
// starts[r] to starts[r + 1]. The layer's weights are the rows of this rank's outputs.
struct Shard {
  RankGroup* group;
  std::vector<int64_t> outputs, inputs;  // inputs empty: all ranks have all of them

  int64_t width(const std::vector<int64_t>& starts) const {
    return starts[group->rank() + 1] - starts[group->rank()];
  }
};

// out [rows, starts.back()]: all ranks' columns; `local` [rows, own columns] with the distance
// `stride` are this rank's, which may lie in group.slot() if they fit.
int gather_columns(RankGroup& group, float* out, const float* local, int64_t stride, int64_t rows,
                   const std::vector<int64_t>& starts, int threads);

}  // namespace quire
