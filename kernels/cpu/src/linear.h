// Linear layers with packed weights: y = x W^T + b.
//
// W [n, k] is divided into panels of NR rows of W, which are NR columns of y. A panel stores its
// values in the order in which the kernels read them, step by step along k. The same microkernel
// serves every number of rows of x: it has a tile of rows x NR sums in registers while it reads the
// panel. Each sum is one chain of additions along k, so a row of y doesn't depend on the other rows
// of x.
#pragma once

#include "gate.h"
#include "runtime.h"

namespace quire {

struct Shard;

enum Format : int32_t {
  kFloat = 0,     // step: 1 k;  [NR] float
  kBrain = 1,     // step: 2 k;  [NR] pairs of bf16
  kHalf = 2,      // step: 1 k;  [NR] f16
  kInt8 = 3,      // step: a group of k;  see linear_int.h
  kInt4 = 4,      // likewise
  kInt4Min = 5,   // likewise, with a minimum for each group
  kInt4Zero = 6,  // likewise, with a zero point for each group
  kInt4Float = 7, // likewise, floats in 4 bits (e2m1), doubled
  kTable4 = 8,    // likewise, indices into a table of 16 entries
  kFloat8 = 9,    // likewise, floats in 8 bits (e4m3)
  kInt8Zero = 10, // see linear_int.h, with a zero point for each group
};

struct Packed {
  Format format;
  int64_t n, k;
  int64_t group;  // integers and codes: number of values along k with the same scale
  int64_t steps;  // along k
  int64_t step_k;
  int64_t step_bytes;
  int64_t panels;
  char* data;        // [panels][steps][step_bytes]
  int64_t bytes;
  float* bias;       // [n] or null
  bool round_inputs;  // bf16: multiply as pairs of bf16 if the CPU can, for any dtype of x
  // kTable4: entries in 16 bits, all of their low bytes, then all high ones; a code's value is its
  // entry times table_scale.
  uint8_t table[32];
  float table_scale;
  int32_t* order;     // [k] or null: the index in x for each value of a packed row
  Shard* shard;       // null if all rows of W are here; see ranks.h

  char* panel(int64_t p) const { return data + p * steps * step_bytes; }
  // Columns of y: n, or those of all ranks.
  int64_t outputs() const;
};

// Rows of x in the microkernels' layout: 32-bit units, in blocks of steps along k, with a constant
// distance between the rows of a block. A block and its part of a panel fit the L1 cache together,
// and the odd number of cache lines distributes the rows of a tile over its sets.
constexpr int kBlockUnits = 256;
constexpr int kRowUnits = kBlockUnits + 16;
// Maximum bytes of weights that are widened at a time.
constexpr int64_t kWideBytes = (kBlockUnits + kBlockUnits / 16) * NR * 4;

struct MicroCall {
  const uint32_t* a;     // first row of the tile in its first block
  int64_t block_stride;  // units from block to block
  int64_t block_steps;   // steps in a block
  const char* b;
  const char* ahead;     // what to prefetch
  int64_t ahead_step;    // bytes by which it advances with each step
  int64_t steps;
  const float* from;  // initial sums, [rows, NR] with the distance ld_from; null for zeros
  int64_t ld_from;
  float* to;  // where to store the sums, likewise
  int64_t ld_to;
  int64_t group;
  const uint8_t* table;
};
// Loads a microkernel's initial sums. If they are stored elsewhere, that memory is prefetched.
template <int ROWS>
QUIRE_INLINE void load_sums(const MicroCall& call, vf (&acc)[ROWS][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    const float* from = call.from + r * call.ld_from;
    acc[r][0] = call.from ? vload(from) : vset(0.0f);
    acc[r][1] = call.from ? vload(from + W) : vset(0.0f);
  }
  if (call.from == call.to) return;
  for (int r = 0; r < ROWS; r++) {
    const char* to = reinterpret_cast<const char*>(call.to + r * call.ld_to);
#pragma GCC unroll 4
    for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(to + line, 1);
  }
}

template <int ROWS>
QUIRE_INLINE void store_sums(const MicroCall& call, const vf (&acc)[ROWS][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    vstore(call.to + r * call.ld_to, acc[r][0]);
    vstore(call.to + r * call.ld_to + W, acc[r][1]);
  }
}

using LinearMicro = void (*)(const MicroCall& call);

constexpr int kMostTile = 14;

// The functions to multiply by weights of one format.
struct Kernel {
  int tile;              // maximum rows at a time
  int64_t step_units;    // units of x per step
  LinearMicro micro[kMostTile];  // for 1, 2, ... rows
  // Converts `count` values of x (of `dtype`) to `steps` steps of units.
  void (*load_row)(uint32_t* to, const void* x, int64_t offset, int64_t count, int64_t steps,
                   int dtype, int64_t group);
  // If worthwhile for many rows: widens `steps` steps of weights, which the `widened` kernels read.
  void (*widen)(float* to, const char* b, int64_t steps, int64_t group, const uint8_t* table);
  LinearMicro widened[kMostTile];
  int64_t wide_bytes = 0;   // of a widened step
  int64_t least_tiles = 2;  // minimum number of tiles of rows for widening
};

// The kernel for weights of `format` and rows of `dtype`.
Kernel kernel_f32();
Kernel kernel_bf16(bool pairs);
Kernel kernel_f16();
Kernel kernel_int(const Packed& w);
Kernel kernel_float8(const Packed& w);  // only with QUIRE_FLOAT8_PAIRS

struct LoraCall;

// out [rows, n] = x W^T + b; both of `dtype`; rows of x have the distance `stride`. `adapters`, for
// float32, add to it; or null.
int linear(const Packed& w, void* out, const void* x, int64_t stride, int64_t rows, int dtype,
           int threads, const LoraCall* adapters = nullptr);
// The same for the rows of W in this rank: out [rows, n].
int local_linear(const Packed& w, void* out, const void* x, int64_t stride, int64_t rows, int dtype,
                 int threads);
// linear of a layer that ranks share, without adapters. Afterwards `x` and `stride` are those of
// all ranks' inputs, until the next such call.
int sharded_linear(const Packed& w, float* out, const float** x, int64_t* stride, int64_t rows,
                   int threads);

// A linear layer per head.
struct HeadLinears {
  const Packed* const* layers;  // [heads], of one shape
  int64_t heads;
  char* out;  // [rows, heads, n]
  const char* x;  // [rows, heads, k]
  int64_t out_stride, out_head, x_stride, x_head;  // elements from row to row, from head to head
  int64_t rows;
  int dtype;
};

int linear_heads(const HeadLinears& h, int threads);

// out [rows, n / 2] = gate(first half of a row of x W^T + b) * its second half, without writing the
// intermediate row. float32.
int linear_gated(const Packed& w, float* out, const float* x, int64_t stride, int64_t rows,
                 const Activation& how, int threads, const LoraCall* adapters = nullptr);
// Whether both halves are whole panels, and there are enough rows: with few, reading both halves at
// a time takes longer than writing the intermediate rows.
bool can_gate(const Packed& w, int64_t rows);

}  // namespace quire
