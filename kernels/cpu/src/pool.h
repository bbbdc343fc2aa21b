// The threads that share the work of a call.
//
// A call has numbered pieces; each idle thread takes the next one. The caller works, too, and waits
// only for pieces that were taken, so a helper that the operating system doesn't run delays
// nothing. (An OpenMP region ends when every thread of the team has passed through it, which on a
// busy machine costs a time slice per call.) A piece's result doesn't depend on the thread that
// computes it.
#pragma once

#include <cstdint>
#include <type_traits>

namespace quire {

// Runs a piece of work: body(context, piece, slot), where no other thread has the same slot in [0,
// threads) at that moment.
using Body = void (*)(void* context, int64_t piece, int slot);

void deal_pieces(int threads, int64_t pieces, Body body, void* context);

// Runs f(piece, slot) for each piece in [0, pieces), on at most `threads` threads, and returns when
// all are done. f must not throw. Inside of f, or while another thread deals, it runs on one
// thread.
template <class F>
void deal(int threads, int64_t pieces, F&& f) {
  if (threads <= 1 || pieces <= 1) {
    for (int64_t i = 0; i < pieces; i++) f(i, 0);
    return;
  }
  using Function = std::remove_reference_t<F>;
  deal_pieces(
      threads, pieces,
      [](void* context, int64_t piece, int slot) { (*static_cast<Function*>(context))(piece, slot); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// Runs f(from, to) over [0, count) in ranges of at least `least`, a few for each thread.
template <class F>
void deal_ranges(int threads, int64_t count, int64_t least, F&& f) {
  const int64_t wanted = threads <= 1 ? 1 : 4 * threads;
  const int64_t most = least < 1 ? count : (count + least - 1) / least;
  const int64_t pieces = most < wanted ? most : wanted;
  deal(threads, pieces, [&](int64_t piece, int) {
    f(count * piece / pieces, count * (piece + 1) / pieces);
  });
}

}  // namespace quire
