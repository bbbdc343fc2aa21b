#include "abi.h"
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace quire {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while `word` is `seen`; may wake spuriously.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr,
          nullptr, 0);
#else
  if (word.load() == seen) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
          nullptr, 0);
#else
  (void)word;
#endif
}

#if defined(__linux__)
std::vector<int> allowed_cpus() {
  cpu_set_t set;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}
int current_cpu() { return sched_getcpu(); }
bool move_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return sched_setaffinity(0, sizeof(set), &set) == 0;
}
#else
std::vector<int> allowed_cpus() { return {}; }
int current_cpu() { return -1; }
bool move_to(int) { return false; }
#endif

// About 50 us of spinning before sleep: longer than the gaps between the kernels of a step, too
// short to disturb other processes.
constexpr int kSpins = 4000;

class Pool {
 public:
  // Deals to helpers unless another thread does; returns whether it did.
  bool deal(int threads, int64_t pieces, Body body, void* context) {
    if (pieces >= kMostPieces || busy_.exchange(true, std::memory_order_acquire)) return false;
    hire(threads - 1);
    epoch_++;
    // Close first: no piece of this call can be taken while its description is being written.
    ticket_.exchange(static_cast<uint64_t>(epoch_) << 32 | kClosed, std::memory_order_acq_rel);
    body_.store(body, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    pieces_.store(pieces, std::memory_order_relaxed);
    threads_.store(threads, std::memory_order_relaxed);
    note_caller(threads);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(epoch_) << 32, std::memory_order_release);
    call_.store(epoch_, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) wake_all(call_);
    work(epoch_, 0, nullptr);
    wait_for_pieces(static_cast<uint32_t>(pieces));
    busy_.store(false, std::memory_order_release);
    return true;
  }

  // Binds helper i to the CPU cpus[i % count] from now on, or without CPUs stops moving helpers;
  // waits for running calls.
  void bind(const int* cpus, int count) {
    while (busy_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    bound_ = true;
    if (count > 0) {
      cpus_.assign(cpus, cpus + count);
      first_place_ = 0;
      placing_.fetch_add(1, std::memory_order_relaxed);
    }
    busy_.store(false, std::memory_order_release);
  }

 private:
  static constexpr int64_t kMostPieces = int64_t{1} << 31;
  static constexpr uint32_t kClosed = 0xffffffffu;

  // Takes pieces of the call `epoch` until none are left. `placed` belongs to a helper.
  void work(uint32_t epoch, int slot, uint32_t* placed) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(ticket >> 32) == epoch) {
      // These values belong to `epoch` if the exchange below succeeds: the next call closes the
      // ticket before it writes any of them.
      const int64_t piece = static_cast<uint32_t>(ticket);
      const int64_t pieces = pieces_.load(std::memory_order_relaxed);
      const Body body = body_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      if (piece >= pieces) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      if (placed) place(slot, placed);
      body(context, piece, slot);
      const uint32_t done = done_.fetch_add(1, std::memory_order_seq_cst) + 1;
      if (done == pieces && waiting_.load(std::memory_order_seq_cst)) wake_all(done_);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void wait_for_pieces(uint32_t pieces) {
    for (int spins = kSpins; spins > 0; spins--) {
      if (done_.load(std::memory_order_acquire) == pieces) return;
      relax();
    }
    // While this thread sleeps, its core can run a helper that was preempted in the middle of a
    // piece.
    waiting_.store(true, std::memory_order_seq_cst);
    for (uint32_t done; (done = done_.load(std::memory_order_seq_cst)) != pieces;) {
      sleep_on(done_, done);
    }
    waiting_.store(false, std::memory_order_relaxed);
  }

  // If helpers use every CPU of this process, each is bound to its own one, apart from the
  // caller's. Otherwise the system wakes them on the caller's CPU, and on a busy machine leaves
  // them there to take turns with it.
  void note_caller(int threads) {
    const int places = static_cast<int>(cpus_.size());
    if (bound_ || places != threads) return;
    const int cpu = current_cpu();
    if (cpu == caller_cpu_) return;
    for (int i = 0; i < places; i++) {
      if (cpus_[i] == cpu) first_place_ = i;
    }
    caller_cpu_ = cpu;
    placing_.fetch_add(1, std::memory_order_relaxed);
  }

  // Moves the helper to its CPU in the latest placing. Called while it may take pieces of a call,
  // when nothing that it reads is being written.
  void place(int slot, uint32_t* placed) {
    const uint32_t placing = placing_.load(std::memory_order_relaxed);
    if (placing == *placed) return;
    *placed = placing;
    move_to(cpus_[(first_place_ + slot) % cpus_.size()]);
  }

  void help(int slot) {
    uint32_t seen = 0;
    uint32_t placed = 0;
    for (;;) {
      uint32_t epoch = call_.load(std::memory_order_acquire);
      for (int spins = kSpins; epoch == seen && spins > 0; spins--) {
        relax();
        epoch = call_.load(std::memory_order_acquire);
      }
      if (epoch == seen) {
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        while ((epoch = call_.load(std::memory_order_seq_cst)) == seen) sleep_on(call_, seen);
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = epoch;
      if (slot >= threads_.load(std::memory_order_relaxed)) continue;
      work(epoch, slot, &placed);
    }
  }

  // Starts helpers until there are `wanted`, or fewer if the system refuses a thread.
  void hire(int wanted) {
    if (cpus_.empty()) cpus_ = allowed_cpus();
    while (hired_ < wanted) {
      try {
        std::thread([this, slot = hired_ + 1] { help(slot); }).detach();
      } catch (const std::system_error&) {
        return;
      }
      hired_++;
    }
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};  // call << 32 | next piece
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> waiting_{false};
  alignas(64) std::atomic<uint32_t> call_{0};
  std::atomic<int> asleep_{0};
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> pieces_{0};
  std::atomic<int> threads_{0};
  alignas(64) std::atomic<bool> busy_{false};
  uint32_t epoch_ = 0;
  int hired_ = 0;
  // The threads' CPUs; written by the dealing thread, before pieces can be taken.
  std::vector<int> cpus_;
  bool bound_ = false;
  int caller_cpu_ = -1;
  size_t first_place_ = 0;
  std::atomic<uint32_t> placing_{0};
};

std::atomic<Pool*> current{nullptr};

// A forked child has none of its parent's helpers, so it starts its own pool. The old one isn't
// destroyed, nor are pools at exit, since helpers may still read them.
void forget() { current.store(nullptr, std::memory_order_relaxed); }

Pool* pool() {
  Pool* found = current.load(std::memory_order_acquire);
  if (found) return found;
  static const int registered = pthread_atfork(nullptr, nullptr, forget);
  (void)registered;
  Pool* made = new Pool;
  if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return made;
  delete made;
  return found;
}

}  // namespace

void deal_pieces(int threads, int64_t pieces, Body body, void* context) {
  if (pool()->deal(threads, pieces, body, context)) return;
  for (int64_t i = 0; i < pieces; i++) body(context, i, 0);
}

}  // namespace quire

// Binds the calling thread to cpus[0] and helper i to cpus[i % count], or without CPUs lets the
// system place helpers; returns 0, or 1 if the system refuses.
extern "C" int quire_bind_threads(const int* cpus, int count) {
  quire::pool()->bind(cpus, count);
  return count == 0 || quire::move_to(cpus[0]) ? 0 : 1;
}
