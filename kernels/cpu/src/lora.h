// Low-rank adapters: rows of a linear layer's result get what their own adapter adds.
//
// Rows come in groups by adapter, each with its own rank, so that a row pays for its own adapter's
// rank alone. Each sum is one chain in the order of k or of the ranks, whatever other rows there are:
// a row's bits don't depend on its neighbours or on the threads.
#pragma once

#include <vector>

#include "linear.h"

namespace quire {

// Columns of y that lie together in a packed B.
constexpr int64_t kLoraColumns = 32;
// In a packed A so many ranks lie together, a piece of k of each behind the other: who reads it for
// one row reads on and on.
constexpr int64_t kLoraRanks = 8, kLoraLanes = 32;

// Values of a row of a packed A; those behind k are zeros.
inline int64_t lora_depth(int64_t k) { return (k + kLoraLanes - 1) / kLoraLanes * kLoraLanes; }

// Ranks of a part's B as it is packed.
inline int64_t lora_width(const LoraLinear& of, int64_t rank) { return of.pairs ? rank + rank % 2 : rank; }

// Of the rows of a use [row, row + rows), its ranks or a part's columns [first, first + count).
struct LoraTask {
  int64_t use, row, rows;
  int64_t first, count;
  int64_t part;
};

// What comes of a use's rows on their way.
struct LoraBetween {
  float* h;      // [count, rank]
  bf16* h_half;  // pairs: [count, rank and a pair], h rounded
};

// What adapters add to one linear layer while its product is made: first h of all rows, beside the
// loading of x, then what comes of it to each panel that is done.
struct LoraCall {
  const float* x;
  int64_t stride;
  const LoraUse* uses;
  int64_t num_uses, low;
  std::vector<LoraBetween> between;  // of each use
  std::vector<LoraTask> tasks;       // of the first pass
  char* rooms;                       // of each thread, for rows of x
  int64_t room_bytes;

  // Rows of `uses` are counted from `first`, which is where x begins; their memory is kept by the
  // calling thread until the next call. Throws std::bad_alloc.
  void begin(const float* x, int64_t stride, const LoraUse* uses, int64_t num_uses, int64_t first,
             int threads);
  const float* row_of_x(int64_t use, int64_t row) const {
    return x + (uses[use].rows[row] - low) * stride;
  }
  // Any thread, in any order; `slot` is the thread's.
  void shrink(int64_t task, int slot) const;
  // sums [rows, NR] with the distance `ld`: columns [column, column + NR) of y's rows from `row` on.
  // After all tasks, where `adds_by_panels`.
  void add(float* sums, int64_t ld, int64_t row, int64_t rows, int64_t column) const;
  // Has what `add` will read come into the cache.
  void fetch(int64_t row, int64_t rows, int64_t column) const;
};

// Whether parts begin where panels do.
bool adds_by_panels(const LoraUse* uses, int64_t num_uses);

// y [.., n] += ... for the rows of `uses`, of x with the distance `stride`. Rows are counted from
// `low`, which is where x and y begin.
void add_lora(float* y, int64_t n, const float* x, int64_t stride, const LoraUse* uses,
              int64_t num_uses, int64_t low, int threads);

// The uses of one layer's `slot` among rows [low, high); nothing where no group has any.
void lora_uses(std::vector<LoraUse>& uses, const LoraGroup* groups, int64_t num_groups,
               int64_t layer, const LoraLinear* LoraLayer::* slot, int64_t low, int64_t high);

// What goes through adapters in one layer: rows [0, ..) of the layer's x.
struct LayerAdapters {
  const LoraGroup* groups;
  int64_t count, layer;
};

// A linear layer's y [rows, n] gets what adapters add; x and y begin at row `low`.
void adapt(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot, float* y, int64_t n,
           const float* x, int64_t stride, int64_t low, int64_t rows, int threads);

// y [rows, w.n] = linear(x) and what adapters add; x begins at row `low`.
int adapted_linear(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot,
                   const Packed& w, float* y, const float* x, int64_t stride, int64_t low,
                   int64_t rows, int threads);
// out [rows, width] = gated_linear(x) of products that adapters have added to.
int adapted_gated_linear(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot,
                         const Packed& w, float* out, float* gated, const float* x, int64_t width,
                         int64_t low, int64_t rows, const Activation& how, int threads);

}  // namespace quire
