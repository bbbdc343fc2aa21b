// Ranks: processes that share a model's rows, and gather their results.
//
// All ranks of a machine map the same memory. Gathers are numbered. Each rank writes its part to
// its slot in the buffer selected by the number's last bit, announces its arrival, and reads the
// others' slots once they have arrived. A rank that enters gather n + 2 has passed n + 1, before
// which all ranks finished reading n: so two buffers suffice, and a gather waits only once. Ranks
// of several machines each have a copy of the memory, to which an exchange copies the others'
// slots.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "runtime.h"

namespace quire {

constexpr int kMostRanks = 64;

// The start of the shared memory, which is initially zero.
struct SharedRanks {
  struct alignas(64) Rank {
    std::atomic<uint32_t> arrived;   // number of its latest gather
    std::atomic<uint32_t> sleepers;  // ranks that sleep until it arrives
  };
  std::atomic<uint32_t> failed;  // no gather succeeds until `reset`
  // Wakes ranks that listen: another rank entered a gather, or theirs is interrupted.
  std::atomic<uint32_t> bell, listeners;
  Rank ranks[kMostRanks];
};

class RankGroup {
 public:
  // Sends `floats` of this rank's slot to all others, and receives theirs; `slots` is the first
  // rank's. Returns -1, the rank that timed out, or `size` after a failure.
  using Exchange = int (*)(float* slots, int64_t floats);

  RankGroup(void* shared, int rank, int size, int64_t slot_bytes, int64_t timeout_ms,
            Exchange exchange);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t slot_floats() const { return slot_bytes_ / static_cast<int64_t>(sizeof(float)); }
  // A rank's slot of the next gather.
  float* slot(int rank) const;
  float* slot() const { return slot(rank_); }
  // Waits until all ranks have written their slots, of which at most `floats` are valid;
  // kRankFailed or kRankTimeout. The slots may be read until the next `arrive`.
  int arrive(int64_t floats);
  // Moves on: from now on `slot` returns those of the following gather.
  void advance() { gathers_++; }
  // Makes this and all later gathers of all ranks fail. May be called by any thread.
  void fail();
  // Restarts this rank. No rank may be in a gather, and all must do this before the next one.
  void reset();
  // To be called once all ranks that share the memory are reset: gathers succeed again.
  void forget_failure();
  // Sleeps until another rank waits in a gather that this one hasn't entered (kOk), or until
  // kInterrupted or kRankFailed. No gather may run in this rank meanwhile.
  int listen();
  // Ends this rank's `listen`, or the next one. May be called by any thread.
  void interrupt();
  // The missing rank of the latest `arrive` that timed out.
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

// How ranks share a linear layer's outputs, and possibly its inputs: rank r has the columns from
// starts[r] to starts[r + 1]. The layer's weights are the rows of this rank's outputs.
struct Shard {
  RankGroup* group;
  std::vector<int64_t> outputs, inputs;  // inputs empty: all ranks have all of them

  int64_t width(const std::vector<int64_t>& starts) const {
    return starts[group->rank() + 1] - starts[group->rank()];
  }
};

int64_t widest(const std::vector<int64_t>& starts);

// out [rows, starts.back()]: all ranks' columns; row_of(i) is row i of this rank's, which may be in
// group.slot() if all rows fit.
template <class RowOf>
int gather_rows(RankGroup& group, float* out, RowOf&& row_of, int64_t rows,
                const std::vector<int64_t>& starts, int threads) {
  const int64_t columns = starts.back(), most = group.slot_floats() / widest(starts);
  const int64_t own = starts[group.rank() + 1] - starts[group.rank()];
  if (most < 1) return kNoMemory;
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(most, rows - row);
    const int team = worth(threads, count * columns, 32768);
    float* slot = group.slot();
    if (row_of(row) != slot) {
      deal_ranges(team, count, 1, [&](int64_t low, int64_t high) {
        for (int64_t i = low; i < high; i++)
          std::memcpy(slot + i * own, row_of(row + i), own * sizeof(float));
      });
    }
    if (const int wrong = group.arrive(count * widest(starts))) return wrong;
    deal_ranges(team, count, 1, [&](int64_t low, int64_t high) {
      for (int r = 0; r < group.size(); r++) {
        const int64_t width = starts[r + 1] - starts[r];
        const float* from = group.slot(r);
        for (int64_t i = low; i < high; i++)
          std::memcpy(out + (row + i) * columns + starts[r], from + i * width,
                      width * sizeof(float));
      }
    });
    group.advance();
  }
  return kOk;
}

// The same for the rows of `local`, from one to the next `stride` floats.
int gather_columns(RankGroup& group, float* out, const float* local, int64_t stride, int64_t rows,
                   const std::vector<int64_t>& starts, int threads);

}  // namespace quire
