#include "pool.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

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

// Sleeps while `word` is `seen`; may wake for no reason.
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

// About 50 us of looking before sleeping: longer than the gaps between the kernels of a step,
// shorter than what anyone else on the machine would notice.
constexpr int kSpins = 4000;

class Pool {
 public:
  // Deals to helpers if no one else does; says whether it did.
  bool deal(int threads, int64_t pieces, Body body, void* context) {
    if (pieces >= kMostPieces || busy_.exchange(true, std::memory_order_acquire)) return false;
    hire(threads - 1);
    epoch_++;
    // Closed first: no piece of this call can be taken while what describes it is being written.
    ticket_.exchange(static_cast<uint64_t>(epoch_) << 32 | kClosed, std::memory_order_acq_rel);
    body_.store(body, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    pieces_.store(pieces, std::memory_order_relaxed);
    threads_.store(threads, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(epoch_) << 32, std::memory_order_release);
    call_.store(epoch_, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) wake_all(call_);
    work(epoch_, 0);
    wait_for_pieces(static_cast<uint32_t>(pieces));
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr int64_t kMostPieces = int64_t{1} << 31;
  static constexpr uint32_t kClosed = 0xffffffffu;

  // Takes pieces of the call `epoch` until none are left.
  void work(uint32_t epoch, int slot) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(ticket >> 32) == epoch) {
      // What is read here belongs to `epoch` if the exchange below succeeds: the next call closes
      // the ticket before it writes any of it.
      const int64_t piece = static_cast<uint32_t>(ticket);
      const int64_t pieces = pieces_.load(std::memory_order_relaxed);
      const Body body = body_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      if (piece >= pieces) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      body(context, piece, slot);
      const uint32_t done = done_.fetch_add(1, std::memory_order_seq_cst) + 1;
      if (done == pieces && waiting_.load(std::memory_order_seq_cst)) wake_all(done_);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void wait_for_pieces(uint32_t pieces) {
    for (int spins = 0; spins < kSpins; spins++) {
      if (done_.load(std::memory_order_acquire) == pieces) return;
      relax();
    }
    // Asleep, this core is free for the helper that was pushed aside in the middle of a piece.
    waiting_.store(true, std::memory_order_seq_cst);
    for (uint32_t done; (done = done_.load(std::memory_order_seq_cst)) != pieces;) {
      sleep_on(done_, done);
    }
    waiting_.store(false, std::memory_order_relaxed);
  }

  void help(int slot) {
    uint32_t seen = 0;
    for (;;) {
      uint32_t epoch = call_.load(std::memory_order_acquire);
      for (int spins = 0; epoch == seen && spins < kSpins; spins++) {
        relax();
        epoch = call_.load(std::memory_order_acquire);
      }
      if (epoch == seen) {
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        while ((epoch = call_.load(std::memory_order_seq_cst)) == seen) sleep_on(call_, seen);
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = epoch;
      if (slot < threads_.load(std::memory_order_relaxed)) work(epoch, slot);
    }
  }

  // Starts helpers until there are `wanted`. Where the system refuses a thread, fewer do the work.
  void hire(int wanted) {
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
};

std::atomic<Pool*> current{nullptr};

// A forked child has none of its parent's helpers: it starts a pool of its own. The old one is
// left alone, as are all pools at exit: helpers may still be looking at them.
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
