// Low-rank adapters: rows of a linear layer's result receive their own adapter's addition.
//
// Rows are grouped by adapter, each with its own rank, so a row costs only its own adapter's rank.
// Each sum is one chain in the order of k or of the ranks: a row's bits don't depend on other rows
// or on the threads.
#pragma once

#include <vector>

#include "linear.h"

namespace quire {

// Columns of y per block of a packed B.
constexpr int64_t kLoraColumns = 32;
// Ranks per block of a packed A, which interleaves pieces of k of each: a kernel reads it
// contiguously even for a single row.
constexpr int64_t kLoraRanks = 8, kLoraLanes = 32;

// Values per row of a packed A; those beyond k are zeros.
inline int64_t lora_depth(int64_t k) { return (k + kLoraLanes - 1) / kLoraLanes * kLoraLanes; }

// Ranks of a part's packed B.
inline int64_t lora_width(const LoraLinear& of, int64_t rank) { return of.pairs ? rank + rank % 2 : rank; }

// A task: rows [row, row + rows) of a use, and its ranks or a part's columns [first, first +
// count).
struct LoraTask {
  int64_t use, row, rows;
  int64_t first, count;
  int64_t part;
};

// Intermediate results of a use's rows.
struct LoraBetween {
  float* h;      // [count, rank]
  bf16* h_half;  // pairs: [count, the next even number above rank], h rounded
};

// Adapters of one linear layer, applied during its product: first h of all rows, while x is loaded,
// then the additions to each finished panel.
struct LoraCall {
  const float* x;
  int64_t stride;
  const LoraUse* uses;
  int64_t num_uses, low;
  std::vector<LoraBetween> between;  // of each use
  std::vector<LoraTask> tasks;       // of the first pass
  char* rooms;                       // buffers of each thread, for rows of x
  int64_t room_bytes;

  // `first` is the row number at which x begins. The calling thread owns the memory until the next
  // call. Throws std::bad_alloc.
  void begin(const float* x, int64_t stride, const LoraUse* uses, int64_t num_uses, int64_t first,
             int threads);
  const float* row_of_x(int64_t use, int64_t row) const {
    return x + (uses[use].rows[row] - low) * stride;
  }
  // Called by any thread, in any order; `slot` is the thread's.
  void shrink(int64_t task, int slot) const;
  // Adds to sums [rows, NR] with the distance `ld`: columns [column, column + NR) of y's rows from
  // `row` on. To be called after all tasks, if `adds_by_panels`.
  void add(float* sums, int64_t ld, int64_t row, int64_t rows, int64_t column) const;
  // Prefetches what `add` will read.
  void fetch(int64_t row, int64_t rows, int64_t column) const;
};

// Whether parts begin at multiples of panels.
bool adds_by_panels(const LoraUse* uses, int64_t num_uses);

// y [.., n] += ... for the rows of `uses`, from x with the distance `stride`. Row numbers count
// from `low`, where x and y begin.
void add_lora(float* y, int64_t n, const float* x, int64_t stride, const LoraUse* uses,
              int64_t num_uses, int64_t low, int threads);

// The uses of one layer's `slot` among rows [low, high); empty if no group has any.
void lora_uses(std::vector<LoraUse>& uses, const LoraGroup* groups, int64_t num_groups,
               int64_t layer, const LoraLinear* LoraLayer::* slot, int64_t low, int64_t high);

// The adapters of one layer: rows [0, ..) of the layer's x.
struct LayerAdapters {
  const LoraGroup* groups;
  int64_t count, layer;
};

// Adds the adapters to a linear layer's y [rows, n]; x and y begin at row `low`.
void adapt(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot, float* y, int64_t n,
           const float* x, int64_t stride, int64_t low, int64_t rows, int threads);

// y [rows, w.n] = linear(x) plus the adapters; x begins at row `low`.
int adapted_linear(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot,
                   const Packed& w, float* y, const float* x, int64_t stride, int64_t low,
                   int64_t rows, int threads);
// out [rows, width] = gated_linear(x) with the adapters added to its product.
int adapted_gated_linear(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot,
                         const Packed& w, float* out, float* gated, const float* x, int64_t width,
                         int64_t low, int64_t rows, const Activation& how, int threads);

}  // namespace quire
