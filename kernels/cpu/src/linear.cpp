// Divides the work of a linear layer: rows of x are loaded once, then panels times tiles of rows.
#include "linear.h"
#include "lora.h"
#include "runs.h"

namespace quire {
namespace {

// Rows that are loaded together; more rows take several rounds, each of which reads W again.
constexpr int64_t kMostRows = 1024;
// Approximate bytes of x, minimum rows, and panels per piece for many rows: the part of x that is
// multiplied by all panels in turn must stay in the L2 cache. Fewer rows than kLeastPieceRows
// aren't worth reading all panels again. The last panels are dealt one by one, so that threads
// finish at the same time.
constexpr int64_t kPieceBytes = 768 << 10;
constexpr int64_t kLeastPieceRows = 128;
constexpr int64_t kPiecePanels = 4;

// Maximum values of x per block: four per unit, and one more group.
constexpr int64_t kMostBlock = 4 * kBlockUnits + 256;

// Values of x per thread below which waking another thread doesn't pay.
constexpr int64_t kLoadedEach = 8192;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Approximate rows of a piece, where a row takes `row_bytes` of x.
int64_t rows_of_piece(int64_t row_bytes) {
  return std::min(kMostRows, std::max(kLeastPieceRows, kPieceBytes / row_bytes));
}

// Number of pieces for these rows, each at most one and a half times `piece`.
int64_t row_pieces(int64_t rows, int64_t piece) {
  return std::max<int64_t>(1, (rows + piece / 2 - 1) / piece);
}

Kernel kernel_for(const Packed& w, int dtype) {
  switch (w.format) {
    case kFloat:
      return kernel_f32();
    case kBrain:
      return kernel_bf16(dtype == kBF16 || w.round_inputs);
    case kHalf:
      return kernel_f16();
    default:
      return kernel_int(w);
  }
}

struct Job {
  const Packed& w;
  Kernel kernel;
  int64_t block_steps, blocks;
  int64_t rows;
  uint32_t* a;          // [blocks][rows][kRowUnits]
  float* c;             // [slots][kPiecePanels][piece_rows][NR]
  char* out;
  int64_t row_pieces, piece_rows;
  int64_t whole_pieces, piece_panels;  // number of pieces with piece_panels; the others have one
  int dtype;
  const Activation* gate;  // or null; otherwise panels come in pairs, from both halves of w
  const LoraCall* adapters;  // or null
  int64_t first_row;         // its number for the adapters

  int64_t group() const { return gate ? 2 : 1; }  // panels that are dealt together
  int64_t groups() const { return w.panels / group(); }
  int64_t panel_pieces() const { return whole_pieces + groups() - whole_pieces * piece_panels; }
  // The first group of a piece; one past the last piece it is the number of groups.
  int64_t first_group(int64_t piece) const {
    return piece <= whole_pieces ? piece * piece_panels
                                 : piece + whole_pieces * (piece_panels - 1);
  }
  // Panel `i` of the groups from `first` on.
  int64_t panel(int64_t first, int64_t i) const {
    return gate ? first + i / 2 + i % 2 * groups() : first + i;
  }
};

template <class T>
void gather_from(float* to, const T* x, const int32_t* order, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = to_float(x[order[i]]);
}

// x in the order of sorted weights: `count` values from `first` on, of a row that begins at
// `offset`.
void gather(float* to, const void* x, int64_t offset, const int32_t* order, int64_t first,
            int64_t count, int dtype) {
  order += first;
  if (dtype == kF32) return gather_from(to, static_cast<const float*>(x) + offset, order, count);
  if (dtype == kBF16) return gather_from(to, static_cast<const bf16*>(x) + offset, order, count);
  gather_from(to, static_cast<const f16*>(x) + offset, order, count);
}

void load_rows(const Job& job, const void* x, int64_t stride, int64_t low, int64_t high) {
  const int64_t block_k = job.block_steps * job.w.step_k;
  float sorted[kMostBlock];
  for (int64_t r = low; r < high; r++) {
    for (int64_t i = 0; i < job.blocks; i++) {
      const int64_t steps = std::min(job.block_steps, job.w.steps - i * job.block_steps);
      const int64_t count = std::min(block_k, job.w.k - i * block_k);
      uint32_t* to = job.a + (i * job.rows + r) * kRowUnits;
      if (job.w.order) {
        gather(sorted, x, r * stride, job.w.order, i * block_k, count, job.dtype);
        job.kernel.load_row(to, sorted, 0, count, steps, kF32, job.w.group);
      } else {
        job.kernel.load_row(to, x, r * stride + i * block_k, count, steps, job.dtype, job.w.group);
      }
    }
  }
}

// Where a panel's sums are stored until they are complete, and afterwards: in `out` itself if it
// has floats.
struct Sums {
  float* kept;
  float* done;
  int64_t ld_done;
};

Sums sums_for(const Job& job, int64_t row, int64_t panel, int64_t at, int slot) {
  float* own = job.c + (slot * kPiecePanels + at) * job.piece_rows * NR;
  if (!job.gate && job.dtype == kF32 && (panel + 1) * NR <= job.w.n) {
    float* out = reinterpret_cast<float*>(job.out) + row * job.w.n + panel * NR;
    return {own, out, job.w.n};
  }
  return {own, own, NR};
}

// Adds the bias and the adapters.
void complete(const Job& job, float* sums, int64_t ld, int64_t row, int64_t rows, int64_t panel) {
  const int64_t from = panel * NR, count = std::min<int64_t>(NR, job.w.n - from);
  for (int64_t r = 0; r < rows && job.w.bias; r++) {
    float* s = sums + r * ld;
    for_lanes(count, [&](int64_t i, int n) {
      vstore_some(s + i, vload_some(s + i, n) + vload_some(job.w.bias + from + i, n), n);
    });
  }
  if (job.adapters) job.adapters->add(sums, ld, job.first_row + row, rows, from);
}

// Completes sums and writes them to `out` unless they are there.
void finish(const Job& job, const Sums& sums, int64_t row, int64_t rows, int64_t panel) {
  const int64_t from = panel * NR, count = std::min<int64_t>(NR, job.w.n - from);
  complete(job, sums.done, sums.ld_done, row, rows, panel);
  if (sums.done != sums.kept) return;
  for (int64_t r = 0; r < rows; r++)
    write_row(job.out, (row + r) * job.w.n + from, sums.done + r * NR, count, job.dtype);
}

template <int GATE>
void gate_row(float* out, const float* x, const float* up, const float* bias, int64_t half,
              const Activation& how) {
  for (int i = 0; i < NR; i += W) {
    vf a = vload(x + i), b = vload(up + i);
    if (bias) a = a + vload(bias + i), b = b + vload(bias + half + i);
    vstore(out + i, Gated::of<GATE>(a, b, how));
  }
}

// finish for a pair of panels: sums of gates and those that they multiply.
void finish_pair(const Job& job, float* x, float* up, int64_t row, int64_t rows, int64_t panel) {
  const int64_t half = job.w.n / 2, from = panel * NR;
  const float* bias = job.w.bias ? job.w.bias + from : nullptr;
  if (job.adapters) {
    complete(job, x, NR, row, rows, panel);
    complete(job, up, NR, row, rows, panel + job.groups());
    bias = nullptr;  // already added
  }
  float* out = reinterpret_cast<float*>(job.out) + row * half + from;
  with_gate(job.gate->kind, [&](auto kind) {
    for (int64_t r = 0; r < rows; r++) {
      gate_row<decltype(kind)::value>(out + r * half, x + r * NR, up + r * NR, bias, half,
                                      *job.gate);
    }
  });
}

// Bytes of prefetch distance in a panel that is used only once.
constexpr int64_t kAhead = 4096;

// `blocks` blocks of steps of one panel times the rows [row, row + rows), while `next` is
// prefetched, an equal part by each tile.
void multiply(const Job& job, const Sums& sums, int64_t row, int64_t rows, int64_t panel,
              int64_t block, int64_t blocks, const char* next) {
  const Packed& w = job.w;
  const int64_t first = block * job.block_steps;
  const int64_t steps = std::min(w.steps, (block + blocks) * job.block_steps) - first;
  const int64_t tile = job.kernel.tile, tiles = ceil_div(rows, tile);
  const char* b = w.panel(panel) + first * w.step_bytes;
  const bool done = block + blocks >= job.blocks;
  alignas(64) float wide[kWideBytes / sizeof(float)];
  const bool widens = job.kernel.widen && tiles >= job.kernel.least_tiles;
  if (widens) job.kernel.widen(wide, b, steps, w.group, w.table);
  const LinearMicro* micro = widens ? job.kernel.widened : job.kernel.micro;
  // A tile of a few rows takes nearly as long as a full one, so tiles have nearly equal sizes.
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t from = rows * t / tiles;
    const int64_t to = rows * (t + 1) / tiles;
    const char* ahead = next ? next + steps * w.step_bytes * t / tiles : b + kAhead;
    float* kept = sums.kept + from * NR;
    micro[to - from - 1](MicroCall{
        job.a + (block * job.rows + row + from) * kRowUnits, job.rows * kRowUnits, job.block_steps,
        widens ? reinterpret_cast<const char*>(wide) : b, ahead, next ? w.step_bytes / tiles : w.step_bytes, steps, block ? kept : nullptr, NR,
        done ? sums.done + from * sums.ld_done : kept, done ? sums.ld_done : NR, w.group,
        w.table});
  }
}

// The groups of panels [first, end) times the rows [row, row + rows). `after` is the panel that the
// thread will probably use next.
void do_piece(const Job& job, int64_t row, int64_t rows, int64_t first, int64_t end, int64_t after,
              int slot) {
  // A single tile of rows reads a whole panel at a time. Several tiles share it block by block,
  // while it is in the L1 cache and the next block is prefetched.
  const bool single = rows <= job.kernel.tile;
  const int64_t at_once = single ? job.blocks : 1, count = (end - first) * job.group();
  const int64_t block_bytes = job.block_steps * job.w.step_bytes;
  for (int64_t block = 0; block < job.blocks; block += at_once) {
    const bool last = block + at_once >= job.blocks;
    for (int64_t i = 0; i < count; i++) {
      const int64_t p = job.panel(first, i);
      const Sums sums = sums_for(job, row, p, single ? 0 : i, slot);
      const char* next = i + 1 < count ? job.w.panel(job.panel(first, i + 1)) + block * block_bytes
                         : last        ? job.w.panel(after)
                                       : job.w.panel(first) + (block + 1) * block_bytes;
      if (last && job.adapters) job.adapters->fetch(job.first_row + row, rows, p * NR);
      multiply(job, sums, row, rows, p, block, at_once, single ? nullptr : next);
      if (!last) continue;
      if (!job.gate) {
        finish(job, sums, row, rows, p);
      } else if (i % 2) {
        finish_pair(job, sums.kept - job.piece_rows * NR, sums.kept, row, rows, first + i / 2);
      }
    }
  }
}

// For few rows: pieces of weights large enough to stream, small enough to distribute evenly.
int64_t panels_for_few_rows(const Packed& w, int threads) {
  const int64_t panel_bytes = w.steps * w.step_bytes;
  const int64_t wanted = std::max<int64_t>(65536, w.bytes / (16 * threads));
  return std::max<int64_t>(1, std::min<int64_t>(wanted / panel_bytes, w.panels));
}

void run_rows(Job& job, const void* x, int64_t stride, int threads) {
  const Packed& w = job.w;
  const int loading = worth(threads, job.rows * w.k, kLoadedEach);
  // The first round of rows runs the first pass of the adapters for all rows.
  const bool shrinks = job.adapters && job.first_row == 0;
  const int64_t tasks = shrinks ? static_cast<int64_t>(job.adapters->tasks.size()) : 0;
  const int64_t loads = std::min<int64_t>(job.rows, loading > 1 ? 4 * loading : 1);
  deal(tasks ? threads : loading, tasks + loads, [&](int64_t i, int slot) {
    if (i < tasks) return job.adapters->shrink(i, slot);
    load_rows(job, x, stride, job.rows * (i - tasks) / loads, job.rows * (i - tasks + 1) / loads);
  });
  const int64_t panel_pieces = job.panel_pieces(), pieces = job.row_pieces * panel_pieces;
  const auto one = [&](int64_t piece, int slot) {
    const int64_t part = piece / panel_pieces, at = piece % panel_pieces;
    const int64_t from = job.rows * part / job.row_pieces;
    const int64_t to = job.rows * (part + 1) / job.row_pieces;
    const int64_t next = (piece + threads) % panel_pieces;
    do_piece(job, from, to - from, job.first_group(at), job.first_group(at + 1),
             job.first_group(next), slot);
  };
  // With few rows, pieces are equal and adjacent in memory; with many, the last ones are small.
  if (job.rows <= job.kernel.tile) {
    deal_runs(threads, pieces, one);
  } else {
    deal(threads, pieces, one);
  }
}

// Divides the panels into pieces of several, followed by single ones.
void cut_panels(Job& job, int threads) {
  const int64_t groups = job.groups();
  if (job.rows <= job.kernel.tile) {
    job.piece_panels = panels_for_few_rows(job.w, threads);
    job.whole_pieces = groups / job.piece_panels;
  } else {
    const int64_t last = std::max<int64_t>(groups / 4, 2 * threads);
    job.piece_panels = kPiecePanels / job.group();
    job.whole_pieces = std::max<int64_t>(0, groups - last) / job.piece_panels;
  }
}

int multiply_all(const Packed& w, void* out, const void* x, int64_t stride, int64_t rows,
                 int dtype, const Activation* gate, const LoraCall* adapters, int threads) {
  const Kernel kernel = kernel_for(w, dtype);
  const int64_t fit = kernel.widen ? kWideBytes / kernel.wide_bytes : kBlockUnits;
  const int64_t block_steps = std::max<int64_t>(1, std::min(fit, kBlockUnits / kernel.step_units));
  const int64_t blocks = ceil_div(w.steps, block_steps), most = std::min(rows, kMostRows);
  const int team = worth(threads, w.bytes * (1 + rows / 8), 32768);
  const int64_t piece = rows_of_piece(blocks * kRowUnits * static_cast<int64_t>(sizeof(uint32_t)));
  const int64_t piece_rows = std::min(most, piece + piece / 2);
  const int64_t out_row = (gate ? w.n / 2 : w.n) * static_cast<int64_t>(size_of(dtype));
  const int64_t x_row = stride * static_cast<int64_t>(size_of(dtype));
  uint32_t* a;
  float* c;
  Layout layout;
  layout.add(&a, blocks * most * kRowUnits);
  layout.add(&c, team * piece_rows * kPiecePanels * NR);
  layout.take(Scratch::kLinear);
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(most, rows - row);
    Job job{w, kernel, block_steps, blocks, count, a, c, static_cast<char*>(out) + row * out_row,
            row_pieces(count, piece), piece_rows, 0, 0, dtype, gate, adapters, row};
    cut_panels(job, team);
    run_rows(job, static_cast<const char*>(x) + row * x_row, stride, team);
  }
  return kOk;
}

}  // namespace

int linear(const Packed& w, void* out, const void* x, int64_t stride, int64_t rows, int dtype,
           int threads, const LoraCall* adapters) {
  if (dtype > kF16 || (w.shard && (dtype != kF32 || adapters))) return kBadDType;
  if (w.shard) {
    const float* values = static_cast<const float*>(x);
    return sharded_linear(w, static_cast<float*>(out), &values, &stride, rows, threads);
  }
  return multiply_all(w, out, x, stride, rows, dtype, nullptr, adapters, threads);
}

int local_linear(const Packed& w, void* out, const void* x, int64_t stride, int64_t rows, int dtype,
                 int threads) {
  return multiply_all(w, out, x, stride, rows, dtype, nullptr, nullptr, threads);
}

int linear_gated(const Packed& w, float* out, const float* x, int64_t stride, int64_t rows,
                 const Activation& how, int threads, const LoraCall* adapters) {
  return multiply_all(w, out, x, stride, rows, kF32, &how, adapters, threads);
}

bool can_gate(const Packed& w, int64_t rows) { return rows > kMostTile && w.n % (2 * NR) == 0; }

}  // namespace quire

extern "C" int quire_linear(const void* packed, void* out, const void* x, int64_t stride,
                            int64_t rows, int dtype, int threads) {
  return guarded([&] {
    return linear(*static_cast<const Packed*>(packed), out, x, stride, rows, dtype, threads);
  });
}
