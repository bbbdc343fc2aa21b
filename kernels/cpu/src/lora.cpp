// See lora.h. Two passes: h = x A^T, then y += h B^T.
#include "lora.h"

namespace quire {
namespace {

// Maximum rows whose sums are in registers, and the number of ranks for them.
constexpr int kMostRows = W >= 16 ? 4 : 2;
constexpr int kMostExpandRows = W >= 16 ? 8 : 2;
constexpr int ranks_beside(int rows) { return rows == kMostRows ? 4 : kLoraRanks; }
constexpr int kVectors = kLoraColumns / W;
// Limits of a task: large enough that A and B are read from the cache, small enough to be
// distributed.
constexpr int64_t kLeastTaskRows = 8, kMostTaskRows = 32;
constexpr int64_t kTaskColumns = 8 * kLoraColumns;
constexpr int64_t kLeastTaskWork = 8192;

// Destination of the additions: `y` points to row `row` and column `column`.
struct Sums {
  float* y;
  int64_t ld, row, column;
};

// The part that contains `column` of y; -1 for none.
int64_t part_at(const LoraLinear& l, int64_t column) {
  for (int64_t p = 0; p < l.num_parts; p++)
    if (column >= l.parts[p].first && column < l.parts[p].first + l.parts[p].columns) return p;
  return -1;
}

// The next even number above `rank`: the last rank's pair is filled up with zeros.
int64_t half_stride(int64_t rank) { return rank + 2 - rank % 2; }

// Values of A and B are widened to float32.
template <class T>
struct Widened {
  using Value = T;
  using X = float;
  using H = float;

  // x's rows from `row` of a use on; `room` is a buffer for them.
  template <int ROWS>
  static void take_x(const X* (&x)[ROWS], const LoraCall& call, int64_t use, int64_t row, char*) {
    for (int r = 0; r < ROWS; r++) x[r] = call.row_of_x(use, row + r);
  }
  static const H* h_of(const LoraCall& call, int64_t use, int64_t row) {
    return call.between[use].h + row * call.uses[use].linear->rank;
  }

  template <int ROWS, int RANKS, int WIDE>
  QUIRE_INLINE static void shrink(vf (&acc)[ROWS][WIDE], const X* const* x, const T* a, int64_t step,
                                  int64_t k) {
    const auto add = [&](const T* from, int64_t i, int n) __attribute__((always_inline)) {
      vf of[ROWS];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) of[r] = vload_some(x[r] + i, n);
#pragma GCC unroll 16
      for (int j = 0; j < RANKS; j++) {
        const vf with = vload(from + j * kLoraLanes);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) acc[r][j] = vfma(of[r], with, acc[r][j]);
      }
    };
    int64_t i = 0;
    for (; i + kLoraLanes <= k; i += kLoraLanes, a += step)
      for (int v = 0; v < kLoraLanes; v += W) add(a + v, i + v, W);
    for (int v = 0; i + v < k; v += W)
      add(a + v, i + v, static_cast<int>(std::min<int64_t>(W, k - i - v)));
  }

  template <int ROWS>
  QUIRE_INLINE static void expand(vf (&acc)[ROWS][kVectors], const H* const* h, const T* b,
                                  int64_t rank) {
    for (int64_t j = 0; j < rank; j++, b += kLoraColumns) {
      vf of[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; v++) of[v] = vload(b + v * W);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const vf by = vset(h[r][j]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; v++) acc[r][v] = vfma(by, of[v], acc[r][v]);
      }
    }
  }

  static void round_h(const LoraCall&, const LoraTask&, int64_t, int64_t) {}
};

#ifdef QUIRE_BF16_DOT
// bf16 is multiplied directly, with x and h rounded to it.
struct Paired {
  using Value = bf16;
  using X = bf16;
  using H = bf16;

  template <int ROWS>
  static void take_x(const X* (&x)[ROWS], const LoraCall& call, int64_t use, int64_t row, char* room) {
    const int64_t k = call.uses[use].linear->k, depth = lora_depth(k);
    bf16* to = reinterpret_cast<bf16*>(room);
    for (int r = 0; r < ROWS; r++, to += depth) {
      write_row(to, 0, call.row_of_x(use, row + r), k, kBF16);
      std::fill(to + k, to + depth, bf16{});
      x[r] = to;
    }
  }
  static const H* h_of(const LoraCall& call, int64_t use, int64_t row) {
    return call.between[use].h_half + row * half_stride(call.uses[use].linear->rank);
  }

  template <int ROWS, int RANKS, int WIDE>
  QUIRE_INLINE static void shrink(vf (&acc)[ROWS][WIDE], const X* const* x, const bf16* a,
                                  int64_t step, int64_t k) {
    for (int64_t i = 0; i < k; i += kLoraLanes, a += step) {
      __m512i of[ROWS];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) of[r] = _mm512_loadu_si512(x[r] + i);
#pragma GCC unroll 16
      for (int j = 0; j < RANKS; j++) {
        const __m512i with = _mm512_loadu_si512(a + j * kLoraLanes);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) add_pairs(acc[r][j], of[r], with);
      }
    }
  }

  template <int ROWS>
  QUIRE_INLINE static void expand(vf (&acc)[ROWS][kVectors], const H* const* h, const bf16* b,
                                  int64_t rank) {
    for (int64_t j = 0; j < rank; j += 2, b += 2 * kLoraColumns) {
      __m512i of[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; v++) of[v] = _mm512_loadu_si512(b + v * 2 * W);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        int pair;
        std::memcpy(&pair, h[r] + j, sizeof(pair));
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; v++) add_pairs(acc[r][v], _mm512_set1_epi32(pair), of[v]);
      }
    }
  }

  // The task's ranks of some rows.
  static void round_h(const LoraCall& call, const LoraTask& t, int64_t row, int64_t rows) {
    const int64_t rank = call.uses[t.use].linear->rank, stride = half_stride(rank);
    for (; rows > 0; row++, rows--) {
      bf16* to = call.between[t.use].h_half + row * stride;
      write_row(to, t.first, call.between[t.use].h + row * rank + t.first, t.count, kBF16);
      if (t.first + t.count == rank) std::fill(to + rank, to + stride, bf16{});
    }
  }
};
static_assert(kLoraLanes == 2 * W, "a vector holds a piece of k");
#endif

// h[r][j] of `ROWS` rows and `RANKS` ranks, each one chain along k. `a` belongs to the first of
// these ranks, with `step` values between pieces of k; h has the distance `stride`.
template <class How, int ROWS, int RANKS>
QUIRE_INLINE void shrink_tile(const typename How::X* const* x, const typename How::Value* a,
                              int64_t step, int64_t k, float* h, int64_t stride) {
  constexpr int kFours = (RANKS + 3) / 4;
  vf acc[ROWS][4 * kFours];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int j = 0; j < 4 * kFours; j++) acc[r][j] = vset(0.0f);
  How::template shrink<ROWS, RANKS>(acc, x, a, step, k);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int f = 0; f < kFours; f++) {
      float sums[4];
      const vf* of = acc[r] + 4 * f;
      vsum4(of[0], of[1], of[2], of[3], sums);
      std::memcpy(h + r * stride + 4 * f, sums, std::min(4, RANKS - 4 * f) * sizeof(float));
    }
}

// Ranks [t.first, t.first + t.count) of `ROWS` rows; the first is the start of a block of ranks.
template <class How, int ROWS>
void shrink_rows(const LoraCall& call, const LoraTask& t, int64_t row, char* room) {
  constexpr int kMost = ranks_beside(ROWS);
  const LoraLinear& l = *call.uses[t.use].linear;
  const typename How::X* x[ROWS];
  How::take_x(x, call, t.use, row, room);
  for (int64_t block = t.first; block < t.first + t.count; block += kLoraRanks) {
    const int64_t wide = std::min<int64_t>(kLoraRanks, l.rank - block), step = wide * kLoraLanes;
    const auto* a = static_cast<const typename How::Value*>(l.a) + block * lora_depth(l.k);
    float* h = call.between[t.use].h + row * l.rank + block;
    int64_t j = 0;
    const auto tile = [&](auto ranks) {
      constexpr int kRanks = decltype(ranks)::value;
      for (; j + kRanks <= wide; j += kRanks)
        shrink_tile<How, ROWS, kRanks>(x, a + j * kLoraLanes, step, l.k, h + j, l.rank);
    };
    tile(std::integral_constant<int, kMost>{});
    tile(std::integral_constant<int, 4>{});
    tile(std::integral_constant<int, 1>{});
  }
}

// One block of columns of `ROWS` rows: the sum along the ranks, then gain and shift.
template <class How, int ROWS>
void expand_rows(const LoraCall& call, const LoraTask& t, int64_t row, int64_t column,
                 const Sums& sums) {
  const LoraLinear& l = *call.uses[t.use].linear;
  const LoraPart& part = l.parts[t.part];
  const typename How::H* h[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) h[r] = How::h_of(call, t.use, row + r) + part.start;
  const auto* b = static_cast<const typename How::Value*>(part.b) + column * lora_width(l, part.rank);
  vf acc[ROWS][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; v++) acc[r][v] = vset(0.0f);
  How::template expand<ROWS>(acc, h, b, part.rank);
  const int64_t at = part.first + column, wide = std::min(kLoraColumns, part.columns - column);
  const vf scale = vset(part.scale);
  // Sums are indexed only by constants, so that they stay in registers.
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    float* y = sums.y + (call.uses[t.use].rows[row + r] - sums.row) * sums.ld + at - sums.column;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; v++) {
      const int64_t left = wide - v * W;
      if (left <= 0) continue;
      const int n = left < W ? static_cast<int>(left) : W;
      vf sum = vfma(acc[r][v], scale, vload_some(y + v * W, n));
      if (l.gain) sum = sum * vload_some(l.gain + at + v * W, n);
      if (l.shift) sum = sum + vload_some(l.shift + at + v * W, n);
      vstore_some(y + v * W, sum, n);
    }
  }
}

// Calls f(row, rows) for tiles of rows [0, count), the widest first.
template <int MOST, class F>
QUIRE_INLINE void for_tiles(int64_t count, F&& f) {
  int64_t row = 0;
  for (; row + MOST <= count; row += MOST) f(row, std::integral_constant<int, MOST>{});
  if constexpr (MOST > 4)
    for (; row + 4 <= count; row += 4) f(row, std::integral_constant<int, 4>{});
  if constexpr (MOST > 2)
    for (; row + 2 <= count; row += 2) f(row, std::integral_constant<int, 2>{});
  for (; row < count; row++) f(row, std::integral_constant<int, 1>{});
}

// A task's ranks of its rows; `room` is a buffer for kMostRows rows of x.
template <class How>
void shrink(const LoraCall& call, const LoraTask& t, char* room) {
  for_tiles<kMostRows>(t.rows, [&](int64_t row, auto rows) {
    constexpr int kRows = decltype(rows)::value;
    shrink_rows<How, kRows>(call, t, t.row + row, room);
    How::round_h(call, t, t.row + row, kRows);
  });
}

template <class How>
void expand(const LoraCall& call, const LoraTask& t, const Sums& sums) {
  for (int64_t column = t.first; column < t.first + t.count; column += kLoraColumns)
    for_tiles<kMostExpandRows>(t.rows, [&](int64_t row, auto rows) {
      expand_rows<How, decltype(rows)::value>(call, t, t.row + row, column, sums);
    });
}

// Calls f(how) with the type that multiplies a use's values.
template <class F>
QUIRE_INLINE void with_how(const LoraLinear& l, F&& f) {
#ifdef QUIRE_BF16_DOT
  if (l.pairs) return f(Paired{});
#endif
  with_float(l.dtype, [&](auto* type) {
    return f(Widened<std::remove_pointer_t<decltype(type)>>{}), kOk;
  });
}

// Divides `rows` times `size` columns or ranks into tasks.
void cut(std::vector<LoraTask>& tasks, int64_t use, int64_t rows, int64_t most_rows, int64_t size,
         int64_t most, int64_t part) {
  for (int64_t first = 0; first < size; first += most)
    for (int64_t row = 0; row < rows; row += most_rows)
      tasks.push_back({use, row, std::min(most_rows, rows - row), first,
                       std::min(most, size - first), part});
}

// Multiplications of x and A.
int64_t shrink_work(const LoraUse& use) { return use.count * use.linear->rank * use.linear->k; }

// Rows of a task, such that each thread finds a few tasks if there are enough rows.
int64_t rows_of_task(int64_t rows, int threads) {
  const int64_t each = rows / (4 * threads) / kLeastTaskRows * kLeastTaskRows;
  return std::max(kLeastTaskRows, std::min(kMostTaskRows, each));
}

// Ranks of a task, such that each of `threads` finds two tasks of the `total` work, none of them
// too small.
int64_t ranks_of_task(const LoraUse& use, int64_t total, int threads) {
  const int64_t rank = use.linear->rank, work = shrink_work(use);
  const int64_t wanted = (2 * threads * work + total - 1) / std::max<int64_t>(1, total);
  const int64_t pieces = std::max<int64_t>(1, std::min(wanted, work / kLeastTaskWork));
  return ((rank + pieces - 1) / pieces + kLoraRanks - 1) / kLoraRanks * kLoraRanks;
}

}  // namespace

void LoraCall::begin(const float* of, int64_t distance, const LoraUse* some, int64_t count,
                     int64_t first, int threads) {
  x = of, stride = distance, uses = some, num_uses = count, low = first;
  tasks.clear(), between.clear();
  const auto rounded = [](int64_t bytes) { return (bytes + 63) & ~int64_t{63}; };
  const auto bytes_of = [&](const LoraUse& use, int64_t (&bytes)[2]) {
    const LoraLinear& l = *use.linear;
    bytes[0] = rounded(use.count * l.rank * static_cast<int64_t>(sizeof(float)));
    bytes[1] = l.pairs ? rounded(use.count * half_stride(l.rank) * static_cast<int64_t>(sizeof(bf16))) : 0;
  };
  int64_t bytes[2], total = 0, work = 0;
  room_bytes = 0;
  for (const LoraUse* use = uses; use < uses + num_uses; use++) {
    bytes_of(*use, bytes);
    total += bytes[0] + bytes[1], work += shrink_work(*use);
    const int64_t room = kMostRows * lora_depth(use->linear->k) * static_cast<int64_t>(sizeof(bf16));
    if (use->linear->pairs) room_bytes = std::max(room_bytes, rounded(room));
  }
  char* at = scratch_for(Scratch::kLora, total + threads * room_bytes);
  rooms = at + total;
  for (int64_t u = 0; u < num_uses; u++) {
    bytes_of(uses[u], bytes);
    between.push_back({reinterpret_cast<float*>(at), reinterpret_cast<bf16*>(at + bytes[0])});
    at += bytes[0] + bytes[1];
    cut(tasks, u, uses[u].count, kMostTaskRows, uses[u].linear->rank,
        ranks_of_task(uses[u], work, threads), 0);
  }
}

void LoraCall::shrink(int64_t task, int slot) const {
  const LoraTask& t = tasks[task];
  with_how(*uses[t.use].linear, [&](auto how) {
    quire::shrink<decltype(how)>(*this, t, rooms + slot * room_bytes);
  });
}

void LoraCall::add(float* sums, int64_t ld, int64_t row, int64_t rows, int64_t column) const {
  for (int64_t u = 0; u < num_uses; u++) {
    const LoraUse& use = uses[u];
    const int64_t* end = use.rows + use.count;
    const int64_t* from = std::lower_bound(use.rows, end, low + row);
    const int64_t* to = std::lower_bound(from, end, low + row + rows);
    const int64_t part = from < to ? part_at(*use.linear, column) : -1;
    if (part < 0) continue;
    const LoraTask t{u, from - use.rows, to - from, column - use.linear->parts[part].first, 1, part};
    with_how(*use.linear, [&](auto how) {
      expand<decltype(how)>(*this, t, Sums{sums, ld, low + row, column});
    });
  }
}

void LoraCall::fetch(int64_t row, int64_t rows, int64_t column) const {
  for (const LoraUse* use = uses; use < uses + num_uses; use++) {
    const LoraLinear& l = *use->linear;
    const int64_t part = use->rows[0] < low + row + rows ? part_at(l, column) : -1;
    if (part < 0) continue;
    const int64_t width = lora_width(l, l.parts[part].rank) * static_cast<int64_t>(size_of(l.dtype));
    const char* from = static_cast<const char*>(l.parts[part].b) + (column - l.parts[part].first) * width;
    for (int64_t at = 0; at < kLoraColumns * width; at += 64) __builtin_prefetch(from + at);
  }
}

bool adds_by_panels(const LoraUse* uses, int64_t num_uses) {
  if (NR != kLoraColumns) return false;
  for (const LoraUse* use = uses; use < uses + num_uses; use++)
    for (int64_t p = 0; p < use->linear->num_parts; p++)
      if (use->linear->parts[p].first % kLoraColumns) return false;
  return true;
}

void add_lora(float* y, int64_t n, const float* x, int64_t stride, const LoraUse* uses,
              int64_t num_uses, int64_t low, int threads) {
  // Reused between calls. The references make helper threads use these instead of their own
  // thread_locals.
  thread_local std::vector<LoraTask> kept_wholes, kept_expands;
  thread_local LoraCall kept_call;
  std::vector<LoraTask>&wholes = kept_wholes, &expands = kept_expands;
  LoraCall& call = kept_call;
  call.begin(x, stride, uses, num_uses, low, threads);
  wholes.clear(), expands.clear();
  int64_t rows = 0, down = 0, up = 0;
  for (int64_t u = 0; u < num_uses; u++) {
    const LoraLinear& l = *uses[u].linear;
    rows += uses[u].count, down += shrink_work(uses[u]);
    for (int64_t p = 0; p < l.num_parts; p++)
      up += uses[u].count * (l.parts[p].rank + 1) * l.parts[p].columns;
  }
  const Sums all{y, n, low, 0};
  // A thread that is woken should find some microseconds of work.
  const int team = worth(threads, down + up, 16384);
  for (int64_t u = 0; u < num_uses; u++)
    cut(wholes, u, uses[u].count, rows_of_task(rows, team), uses[u].linear->rank,
        uses[u].linear->rank, 0);
  if (static_cast<int64_t>(wholes.size()) >= team) {
    // With enough rows for all threads, none waits between the passes.
    return deal(team, static_cast<int64_t>(wholes.size()), [&](int64_t i, int slot) {
      LoraTask t = wholes[i];
      const LoraLinear& l = *uses[t.use].linear;
      with_how(l, [&](auto how) {
        shrink<decltype(how)>(call, t, call.rooms + slot * call.room_bytes);
        t.first = 0;
        for (t.part = 0; t.part < l.num_parts; t.part++) {
          t.count = l.parts[t.part].columns;
          expand<decltype(how)>(call, t, all);
        }
      });
    });
  }
  for (int64_t u = 0; u < num_uses; u++) {
    const LoraLinear& l = *uses[u].linear;
    for (int64_t p = 0; p < l.num_parts; p++)
      cut(expands, u, uses[u].count, kMostTaskRows, l.parts[p].columns, kTaskColumns, p);
  }
  deal(worth(threads, down, 16384), static_cast<int64_t>(call.tasks.size()),
       [&](int64_t i, int slot) { call.shrink(i, slot); });
  deal(worth(threads, up, 16384), static_cast<int64_t>(expands.size()), [&](int64_t i, int) {
    with_how(*uses[expands[i].use].linear,
             [&](auto how) { expand<decltype(how)>(call, expands[i], all); });
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

// Rows of `uses` must be in [0, rows).
extern "C" int quire_add_lora(float* y, int64_t n, const float* x, int64_t stride, int64_t rows,
                              const LoraUse* uses, int64_t num_uses, int threads) {
  for (int64_t u = 0; u < num_uses; u++)
    for (int64_t i = 0; i < uses[u].count; i++)
      if (uses[u].rows[i] < 0 || uses[u].rows[i] >= rows) return kBadRow;
  return guarded([&] { return add_lora(y, n, x, stride, uses, num_uses, 0, threads), kOk; });
}
