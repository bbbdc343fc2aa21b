// Low-rank adapters: rows of a linear layer's result get what their own adapter adds.
//
// Rows come in groups by adapter, each with its own rank, so that a row pays for its own adapter's
// rank alone. Each sum is one chain in the order of k or of the ranks, whatever other rows there are:
// a row's bits don't depend on its neighbours or on the threads.
#pragma once

#include <vector>

#include "runtime.h"

namespace quire {

// Columns of y that lie together in a packed B.
constexpr int64_t kLoraColumns = 32;
// In a packed A so many ranks lie together, a piece of k of each behind the other: who reads it for
// one row reads on and on.
constexpr int64_t kLoraRanks = 8, kLoraLanes = 32;

// Values of a row of a packed A; those behind k are zeros.
inline int64_t lora_depth(int64_t k) { return (k + kLoraLanes - 1) / kLoraLanes * kLoraLanes; }

// What an adapter adds to neighbouring columns of y: (x A^T)[start, start + rank) times B^T.
struct LoraPart {
  const void* b;           // see pack_outputs
  int64_t first, columns;  // of y
  int64_t start, rank;     // rows of A; 0 of them: nothing is added
  float scale;             // of what is added
};

// What an adapter does to one linear layer: y = gain * (y + added) + shift.
struct LoraLinear {
  const void* a;  // [rank / kLoraRanks, rounded up][lora_depth(k) / kLoraLanes][ranks][kLoraLanes]
  int64_t n, rank, k;
  const LoraPart* parts;
  int64_t num_parts;
  const float *gain, *shift;  // [n] or null: 1 and 0; only columns of a part are changed
  int32_t dtype;              // of a and b
  int32_t pairs;              // bf16: x and h are rounded to it, and b lies in pairs of ranks
};

// Ranks of a part's B as it is packed.
inline int64_t lora_width(const LoraLinear& of, int64_t rank) { return of.pairs ? rank + rank % 2 : rank; }

// Of one layer of a decoder; null where the adapter leaves one as it is.
struct LoraLayer {
  const LoraLinear *qkv, *o, *up, *down;
  const LoraLinear *router, *shared_up, *shared_down, *shared_gate;
  const LoraLinear *const *expert_ups, *const *expert_downs;  // by expert, or null
};

// The rows of a step that go through one adapter, in ascending order.
struct LoraGroup {
  const LoraLayer* layers;
  const int64_t* rows;
  int64_t count;
};

// Rows of one linear layer's x and y that meet an adapter.
struct LoraUse {
  const LoraLinear* linear;
  const int64_t* rows;
  int64_t count;
};

// Where the values of A's rows [first, first + count) of `rank` are in a file, and where they go.
struct LoraInputs {
  int64_t from, to;  // values; `to`: where A begins
  int64_t rank, first, count, k;
};

// Where a part's B is in a file, [columns, rank], and where it goes.
struct LoraOutputs {
  int64_t from, to;
  int64_t columns, rank, pairs;
};

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

}  // namespace quire
