// See lora.h. Two passes: h = x A^T for all groups, then y += h B^T.
#include "lora.h"

namespace quire {
namespace {

// Rows whose sums are kept in registers at once, and ranks beside them.
constexpr int kRows = W >= 16 ? 4 : 2;
constexpr int kRanks = 4;
constexpr int kVectors = kLoraColumns / W;
// Of a task: many enough that A and B are read from the cache, few enough to be shared out.
constexpr int64_t kTaskRows = 32;
constexpr int64_t kTaskRanks = 8;
constexpr int64_t kTaskColumns = 8 * kLoraColumns;

struct Task {
  int64_t use, row, rows;   // which of the use's rows
  int64_t first, count;     // ranks, or columns of the part
  int64_t part;
};

struct Call {
  float* y;
  int64_t n;
  const float* x;
  int64_t stride;
  const LoraUse* uses;
  int64_t low;
  std::vector<float*> h;  // of each use: [count, rank]
};

// h[r][j] of `ROWS` rows and `RANKS` ranks, each one chain along k.
template <int ROWS, int RANKS, class T>
QUIRE_INLINE void shrink_tile(const Call& call, const LoraUse& use, float* h, int64_t row,
                              int64_t rank) {
  const LoraLinear& l = *use.linear;
  const T* a = static_cast<const T*>(l.a) + rank * l.k;
  const float* x[ROWS];
  for (int r = 0; r < ROWS; r++) x[r] = call.x + (use.rows[row + r] - call.low) * call.stride;
  vf acc[ROWS][RANKS];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < RANKS; j++) acc[r][j] = vset(0.0f);
  for_lanes(l.k, [&](int64_t i, int n) {
    vf of[ROWS];
    for (int r = 0; r < ROWS; r++) of[r] = vload_some(x[r] + i, n);
    for (int j = 0; j < RANKS; j++) {
      const vf with = vload_some(a + j * l.k + i, n);
      for (int r = 0; r < ROWS; r++) acc[r][j] = vfma(of[r], with, acc[r][j]);
    }
  });
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < RANKS; j++) h[(row + r) * l.rank + rank + j] = vsum(acc[r][j]);
}

template <int ROWS, class T>
void shrink_rows(const Call& call, const Task& t, float* h, int64_t row) {
  const LoraUse& use = call.uses[t.use];
  int64_t rank = t.first;
  const int64_t end = t.first + t.count;
  for (; rank + kRanks <= end; rank += kRanks) shrink_tile<ROWS, kRanks, T>(call, use, h, row, rank);
  for (; rank < end; rank++) shrink_tile<ROWS, 1, T>(call, use, h, row, rank);
}

template <class T>
void shrink(const Call& call, const Task& t) {
  float* h = call.h[t.use];
  int64_t row = t.row;
  const int64_t end = t.row + t.rows;
  for (; row + kRows <= end; row += kRows) shrink_rows<kRows, T>(call, t, h, row);
  for (; row < end; row++) shrink_rows<1, T>(call, t, h, row);
}

// One block of columns of `ROWS` rows: the sum along the ranks, then gain and shift.
template <int ROWS, class T>
QUIRE_INLINE void expand_tile(const Call& call, const LoraUse& use, const LoraPart& part,
                              const float* h, int64_t row, int64_t column) {
  const LoraLinear& l = *use.linear;
  const T* b = static_cast<const T*>(part.b) + column * part.rank;
  vf acc[ROWS][kVectors];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < kVectors; v++) acc[r][v] = vset(0.0f);
  for (int64_t j = 0; j < part.rank; j++) {
    vf by[ROWS];
    for (int r = 0; r < ROWS; r++) by[r] = vset(h[(row + r) * l.rank + part.start + j] * part.scale);
    for (int v = 0; v < kVectors; v++) {
      const vf of = vload(b + j * kLoraColumns + v * W);
      for (int r = 0; r < ROWS; r++) acc[r][v] = vfma(by[r], of, acc[r][v]);
    }
  }
  const int64_t at = part.first + column, wide = std::min(kLoraColumns, part.columns - column);
  for (int r = 0; r < ROWS; r++) {
    float* y = call.y + (use.rows[row + r] - call.low) * call.n + at;
    for (int v = 0; v < kVectors && v * W < wide; v++) {
      const int lanes = static_cast<int>(std::min<int64_t>(W, wide - v * W));
      vf sum = vload_some(y + v * W, lanes) + acc[r][v];
      if (l.gain) sum = sum * vload_some(l.gain + at + v * W, lanes);
      if (l.shift) sum = sum + vload_some(l.shift + at + v * W, lanes);
      vstore_some(y + v * W, sum, lanes);
    }
  }
}

template <class T>
void expand(const Call& call, const Task& t) {
  const LoraUse& use = call.uses[t.use];
  const LoraPart& part = use.linear->parts[t.part];
  const float* h = call.h[t.use];
  for (int64_t column = t.first; column < t.first + t.count; column += kLoraColumns) {
    int64_t row = t.row;
    const int64_t end = t.row + t.rows;
    for (; row + kRows <= end; row += kRows) expand_tile<kRows, T>(call, use, part, h, row, column);
    for (; row < end; row++) expand_tile<1, T>(call, use, part, h, row, column);
  }
}

// Cuts [0, total) of a use's rows and of `size` things beside them into tasks.
void cut(std::vector<Task>& tasks, int64_t use, int64_t rows, int64_t size, int64_t most,
         int64_t part) {
  for (int64_t first = 0; first < size; first += most)
    for (int64_t row = 0; row < rows; row += kTaskRows)
      tasks.push_back({use, row, std::min(kTaskRows, rows - row), first,
                       std::min(most, size - first), part});
}

template <class F>
void run(const Call& call, const std::vector<Task>& tasks, int threads, F&& f) {
  deal_ranges(threads, static_cast<int64_t>(tasks.size()), 1, [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; i++) {
      const Task& t = tasks[i];
      with_float(call.uses[t.use].linear->dtype, [&](auto* type) { return f(t, type), kOk; });
    }
  });
}

}  // namespace

void add_lora(float* y, int64_t n, const float* x, int64_t stride, const LoraUse* uses,
              int64_t num_uses, int64_t low, int threads) {
  // Kept from call to call, and reached by reference: a thread that helps has others of these names.
  thread_local std::vector<Task> kept_shrinks, kept_expands;
  thread_local Call kept_call;
  std::vector<Task>&shrinks = kept_shrinks, &expands = kept_expands;
  Call& call = kept_call;
  call.y = y, call.n = n, call.x = x, call.stride = stride, call.uses = uses, call.low = low;
  shrinks.clear(), expands.clear(), call.h.clear();
  int64_t values = 0, down = 0, up = 0;
  for (int64_t u = 0; u < num_uses; u++) values += uses[u].count * uses[u].linear->rank;
  float* h = reinterpret_cast<float*>(scratch_for(Scratch::kLora, values * sizeof(float)));
  for (int64_t u = 0; u < num_uses; u++) {
    const LoraLinear& l = *uses[u].linear;
    call.h.push_back(h);
    h += uses[u].count * l.rank;
    cut(shrinks, u, uses[u].count, l.rank, kTaskRanks, 0);
    down += uses[u].count * l.rank * l.k;
    for (int64_t p = 0; p < l.num_parts; p++) {
      cut(expands, u, uses[u].count, l.parts[p].columns, kTaskColumns, p);
      up += uses[u].count * (l.parts[p].rank + 1) * l.parts[p].columns;
    }
  }
  // A thread that is woken should find some microseconds of work.
  run(call, shrinks, worth(threads, down, 16384), [&](const Task& t, auto* type) {
    shrink<std::remove_pointer_t<decltype(type)>>(call, t);
  });
  run(call, expands, worth(threads, up, 16384), [&](const Task& t, auto* type) {
    expand<std::remove_pointer_t<decltype(type)>>(call, t);
  });
}

void lora_uses(std::vector<LoraUse>& uses, const LoraGroup* groups, int64_t num_groups,
               int64_t layer, const LoraLinear* LoraLayer::* slot, int64_t low, int64_t high) {
  uses.clear();
  for (int64_t g = 0; g < num_groups; g++) {
    const LoraLinear* linear = groups[g].layers[layer].*slot;
    if (!linear) continue;
    const int64_t* end = groups[g].rows + groups[g].count;
    const int64_t* from = std::lower_bound(groups[g].rows, end, low);
    const int64_t* to = std::lower_bound(from, end, high);
    if (from < to) uses.push_back({linear, from, to - from});
  }
}

void adapt(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot, float* y, int64_t n,
           const float* x, int64_t stride, int64_t low, int64_t rows, int threads) {
  thread_local std::vector<LoraUse> kept;
  if (!adapters.count) return;
  std::vector<LoraUse>& uses = kept;
  lora_uses(uses, adapters.groups, adapters.count, adapters.layer, slot, low, low + rows);
  if (uses.empty()) return;
  add_lora(y, n, x, stride, uses.data(), static_cast<int64_t>(uses.size()), low, threads);
}

}  // namespace quire

using namespace quire;

// Rows of `uses` must be in [0, rows).
extern "C" int quire_add_lora(float* y, int64_t n, const float* x, int64_t stride, int64_t rows,
                              const LoraUse* uses, int64_t num_uses, int threads) {
  for (int64_t u = 0; u < num_uses; u++)
    for (int64_t i = 0; i < uses[u].count; i++)
      if (uses[u].rows[i] < 0 || uses[u].rows[i] >= rows) return kBadRow;
  return guarded([&] { return add_lora(y, n, x, stride, uses, num_uses, 0, threads), kOk; });
}

// out [columns / kLoraColumns, rounded up][rank][kLoraColumns] from b [columns, rank], of two bytes
// or four a value; what there is no column for is zero.
extern "C" int quire_pack_lora(void* out, const void* b, int64_t columns, int64_t rank, int size) {
  const char* from = static_cast<const char*>(b);
  char* to = static_cast<char*>(out);
  for (int64_t first = 0; first < columns; first += kLoraColumns)
    for (int64_t j = 0; j < rank; j++)
      for (int64_t i = first; i < first + kLoraColumns; i++, to += size) {
        if (i < columns) std::memcpy(to, from + (i * rank + j) * size, size);
        else std::memset(to, 0, size);
      }
  return kOk;
}
