#include "ranks.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>

#include "linear.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

// About 50 us of spinning before sleep, as in the pool: ranks that run the same layers arrive
// within that time, unless the system preempts one.
constexpr int kSpins = 4000;
// A sleeper wakes regularly, in case a failed rank didn't wake it.
constexpr int64_t kNapMs = 50;
constexpr int64_t kAlign = 64;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The word is in memory shared by processes, so these futexes aren't private.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec nap{0, kNapMs * 1000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
  if (word.load() == seen) relax();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// Numbers wrap around: only their distance matters.
bool reached(uint32_t arrived, uint32_t number) {
  return static_cast<int32_t>(arrived - number) >= 0;
}

}  // namespace

int64_t widest(const std::vector<int64_t>& starts) {
  int64_t most = 1;
  for (size_t r = 1; r < starts.size(); r++) most = std::max(most, starts[r] - starts[r - 1]);
  return most;
}

RankGroup::RankGroup(void* shared, int rank, int size, int64_t slot_bytes, int64_t timeout_ms,
                     Exchange exchange)
    : shared_(static_cast<SharedRanks*>(shared)),
      slots_(static_cast<char*>(shared) + (sizeof(SharedRanks) + kAlign - 1) / kAlign * kAlign),
      rank_(rank),
      size_(size),
      slot_bytes_(slot_bytes),
      timeout_ms_(timeout_ms),
      exchange_(exchange) {}

float* RankGroup::slot(int rank) const {
  const int64_t index = static_cast<int64_t>(gathers_ & 1) * size_ + rank;
  return reinterpret_cast<float*>(slots_ + index * slot_bytes_);
}

int RankGroup::wait_for(int rank, uint32_t number) {
  SharedRanks::Rank& other = shared_->ranks[rank];
  Clock::time_point deadline{};
  for (int spins = 0;; spins++) {
    const uint32_t seen = other.arrived.load(std::memory_order_acquire);
    if (reached(seen, number)) return kOk;
    if (shared_->failed.load(std::memory_order_relaxed)) return kRankFailed;
    if (spins < kSpins) {
      relax();
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (spins == kSpins) deadline = now + std::chrono::milliseconds(timeout_ms_);
    if (now >= deadline) {
      missing_ = rank;
      fail();
      return kRankTimeout;
    }
    // An arriving rank announces itself before it checks for sleepers, and a sleeper registers
    // before it checks for arrivals.
    other.sleepers.fetch_add(1);
    if (!reached(other.arrived.load(), number)) sleep_on(other.arrived, seen);
    other.sleepers.fetch_sub(1);
  }
}

int RankGroup::arrive(int64_t floats) {
  const Clock::time_point start = Clock::now();
  const int wrong = exchange_ ? exchange(floats) : wait_for_all();
  waited_ns_ += std::chrono::nanoseconds(Clock::now() - start).count();
  return wrong;
}

int RankGroup::exchange(int64_t floats) {
  if (shared_->failed.load()) return kRankFailed;
  const int missing = exchange_(slot(0), floats);
  if (missing < 0) return kOk;
  fail();
  if (missing >= size_) return kRankFailed;
  missing_ = missing;
  return kRankTimeout;
}

int RankGroup::wait_for_all() {
  const uint32_t number = gathers_ + 1;
  SharedRanks::Rank& self = shared_->ranks[rank_];
  self.arrived.store(number);
  if (self.sleepers.load()) wake_all(self.arrived);
  if (shared_->listeners.load()) ring();
  for (int r = 0; r < size_; r++) {
    if (r == rank_) continue;
    if (const int wrong = wait_for(r, number)) return wrong;
  }
  return kOk;
}

bool RankGroup::is_awaited() const {
  for (int r = 0; r < size_; r++)
    if (r != rank_ && reached(shared_->ranks[r].arrived.load(), gathers_ + 1)) return true;
  return false;
}

void RankGroup::ring() {
  shared_->bell.fetch_add(1);
  wake_all(shared_->bell);
}

int RankGroup::listen() {
  for (int spins = 0;; spins++) {
    const uint32_t seen = shared_->bell.load();
    if (shared_->failed.load()) return kRankFailed;
    if (interrupted_.exchange(false)) return kInterrupted;
    if (is_awaited()) return kOk;
    if (spins < kSpins) {
      relax();
      continue;
    }
    // An arriving rank announces itself before it checks for listeners, and a listener registers
    // before it checks for arrivals.
    shared_->listeners.fetch_add(1);
    if (!is_awaited() && !interrupted_.load()) sleep_on(shared_->bell, seen);
    shared_->listeners.fetch_sub(1);
  }
}

void RankGroup::interrupt() {
  interrupted_.store(true);
  ring();
}

void RankGroup::fail() {
  shared_->failed.store(1);
  ring();
  for (int r = 0; r < size_; r++) wake_all(shared_->ranks[r].arrived);
}

void RankGroup::reset() {
  gathers_ = 0;
  missing_ = -1;
  shared_->ranks[rank_].arrived.store(0);
}

void RankGroup::forget_failure() { shared_->failed.store(0); }

int gather_columns(RankGroup& group, float* out, const float* local, int64_t stride, int64_t rows,
                   const std::vector<int64_t>& starts, int threads) {
  const auto row = [&](int64_t i) { return local + i * stride; };
  return gather_rows(group, out, row, rows, starts, threads);
}

int sharded_linear(const Packed& w, float* out, const float** x, int64_t* stride, int64_t rows,
                   int threads) {
  const Shard& shard = *w.shard;
  RankGroup& group = *shard.group;
  const bool fits = rows * widest(shard.outputs) <= group.slot_floats();
  float *inputs, *outputs;
  Layout layout;
  layout.add(&inputs, shard.inputs.empty() ? 0 : rows * w.k);
  layout.add(&outputs, fits ? 0 : rows * w.n);
  layout.take(Scratch::kRanks);
  if (!shard.inputs.empty()) {
    if (const int wrong = gather_columns(group, inputs, *x, *stride, rows, shard.inputs, threads))
      return wrong;
    *x = inputs, *stride = w.k;
  }
  if (fits) outputs = group.slot();
  if (const int wrong = local_linear(w, outputs, *x, *stride, rows, kF32, threads)) return wrong;
  return gather_columns(group, out, outputs, w.n, rows, shard.outputs, threads);
}

}  // namespace quire

extern "C" int64_t quire_ranks_bytes(int size, int64_t slot_bytes) {
  return static_cast<int64_t>(sizeof(SharedRanks)) + 64 + 2 * size * slot_bytes;
}

// `shared`: quire_ranks_bytes of memory that all ranks map, initially zero. Returns null if there
// is no memory, or there are too many ranks. `exchange`: see RankGroup::Exchange, or null; with
// one, the memory belongs to this rank alone.
extern "C" void* quire_ranks_new(void* shared, int rank, int size, int64_t slot_bytes,
                                 int64_t timeout_ms, void* exchange) {
  if (rank < 0 || rank >= size || size > kMostRanks || slot_bytes % 64) return nullptr;
  return new (std::nothrow) RankGroup(shared, rank, size, slot_bytes, timeout_ms,
                                      reinterpret_cast<RankGroup::Exchange>(exchange));
}

extern "C" void quire_ranks_free(void* group) { delete static_cast<RankGroup*>(group); }

extern "C" void quire_ranks_fail(void* group) { static_cast<RankGroup*>(group)->fail(); }

extern "C" void quire_ranks_reset(void* group) { static_cast<RankGroup*>(group)->reset(); }

extern "C" void quire_ranks_forget_failure(void* group) {
  static_cast<RankGroup*>(group)->forget_failure();
}

// See RankGroup::listen.
extern "C" int quire_ranks_listen(void* group) { return static_cast<RankGroup*>(group)->listen(); }

extern "C" void quire_ranks_interrupt(void* group) { static_cast<RankGroup*>(group)->interrupt(); }

// Nanoseconds for which this rank has waited in gathers.
extern "C" int64_t quire_ranks_waited_ns(const void* group) {
  return static_cast<const RankGroup*>(group)->waited_ns();
}

// The missing rank of the latest gather that timed out, or -1.
extern "C" int quire_ranks_missing(const void* group) {
  return static_cast<const RankGroup*>(group)->missing();
}

// The number of gathers since the start or the latest reset.
extern "C" int64_t quire_ranks_gathers(const void* group) {
  return static_cast<const RankGroup*>(group)->gathers();
}

// Gathers each rank's local [rows, starts[rank + 1] - starts[rank]] into out [rows, starts[size]].
extern "C" int quire_ranks_gather(void* group, float* out, const float* local, int64_t rows,
                                  const int64_t* starts, int threads) {
  return guarded([&] {
    RankGroup& ranks = *static_cast<RankGroup*>(group);
    const std::vector<int64_t> all(starts, starts + ranks.size() + 1);
    return gather_columns(ranks, out, local, all[ranks.rank() + 1] - all[ranks.rank()], rows, all,
                          threads);
  });
}

// Shares a layer whose weights are a rank's rows: outputs [size + 1] are the ranks' first rows;
// inputs likewise, or null if all ranks have all inputs.
extern "C" int quire_shard_linear(void* packed, void* group, const int64_t* outputs,
                                  const int64_t* inputs) {
  return guarded([&] {
    Packed& w = *static_cast<Packed*>(packed);
    RankGroup& ranks = *static_cast<RankGroup*>(group);
    const int64_t count = ranks.size() + 1;
    w.shard = new Shard{&ranks, std::vector<int64_t>(outputs, outputs + count),
                        inputs ? std::vector<int64_t>(inputs, inputs + count)
                               : std::vector<int64_t>()};
    return kOk;
  });
}
