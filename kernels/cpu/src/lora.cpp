// See lora.h. Two passes: h = x A^T, then y += h B^T.
#include "lora.h"

namespace quire {
namespace {

// Rows whose sums are kept in registers at once, and ranks beside so many rows.
constexpr int kMostRows = W >= 16 ? 4 : 2;
constexpr int kMostExpandRows = W >= 16 ? 8 : 2;
constexpr int ranks_beside(int rows) { return rows == kMostRows ? 4 : kLoraRanks; }
constexpr int kVectors = kLoraColumns / W;
// Of a task: many enough that A and B are read from the cache, few enough to be shared out.
constexpr int64_t kLeastTaskRows = 8, kMostTaskRows = 32;
constexpr int64_t kTaskColumns = 8 * kLoraColumns;

struct Task {
  int64_t use, row, rows;   // which of the use's rows
  int64_t first, count;     // ranks, or columns of the part
  int64_t part;
};

// What comes of a use's rows on their way.
struct Between {
  float* h;      // [count, rank]
  bf16* x_half;  // pairs: [count, lora_depth(k)], x rounded
  bf16* h_half;  // pairs: [count, half_stride(rank)], h rounded
};

// A pair may begin with the last rank: what is behind it is zero.
int64_t half_stride(int64_t rank) { return rank + 2 - rank % 2; }

struct Call {
  float* y;
  int64_t n;
  const float* x;
  int64_t stride;
  const LoraUse* uses;
  int64_t low;
  std::vector<Between> between;  // of each use
};

const float* row_of_x(const Call& call, const LoraUse& use, int64_t row) {
  return call.x + (use.rows[row] - call.low) * call.stride;
}

// Values of A and B are widened to float32.
template <class T>
struct Widened {
  using Value = T;
  using X = float;
  using H = float;

  static const X* x_of(const Call& call, int64_t use, int64_t row) {
    return row_of_x(call, call.uses[use], row);
  }
  static const H* h_of(const Call& call, int64_t use, int64_t row) {
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

  static void round_x(const Call&, const Task&) {}
  static void round_h(const Call&, const Task&) {}
};

#ifdef QUIRE_BF16_DOT
// bf16 is multiplied as it is, by x and h rounded to it.
struct Paired {
  using Value = bf16;
  using X = bf16;
  using H = bf16;

  static const X* x_of(const Call& call, int64_t use, int64_t row) {
    return call.between[use].x_half + row * lora_depth(call.uses[use].linear->k);
  }
  static const H* h_of(const Call& call, int64_t use, int64_t row) {
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

  static void round_x(const Call& call, const Task& t) {
    const LoraUse& use = call.uses[t.use];
    const int64_t k = use.linear->k, depth = lora_depth(k);
    for (int64_t row = t.row; row < t.row + t.rows; row++) {
      bf16* to = call.between[t.use].x_half + row * depth;
      write_row(to, 0, row_of_x(call, use, row), k, kBF16);
      std::fill(to + k, to + depth, bf16{});
    }
  }
  static void round_h(const Call& call, const Task& t) {
    const int64_t rank = call.uses[t.use].linear->rank, stride = half_stride(rank);
    for (int64_t row = t.row; row < t.row + t.rows; row++) {
      bf16* to = call.between[t.use].h_half + row * stride;
      write_row(to, 0, call.between[t.use].h + row * rank, rank, kBF16);
      std::fill(to + rank, to + stride, bf16{});
    }
  }
};
static_assert(kLoraLanes == 2 * W, "a vector holds a piece of k");
#endif

// h[r][j] of `ROWS` rows and `RANKS` ranks, each one chain along k. `a`: of the first of these ranks,
// `step` values from one piece of k to the next; h has the distance `stride`.
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

// Ranks [t.first, t.first + t.count) of `ROWS` rows; the first is the start of a block of them.
template <class How, int ROWS>
void shrink_rows(const Call& call, const Task& t, int64_t row) {
  constexpr int kMost = ranks_beside(ROWS);
  const LoraLinear& l = *call.uses[t.use].linear;
  const typename How::X* x[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) x[r] = How::x_of(call, t.use, row + r);
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
void expand_rows(const Call& call, const Task& t, int64_t row, int64_t column) {
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
  // Only constants number the sums: they stay in registers.
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    float* y = call.y + (call.uses[t.use].rows[row + r] - call.low) * call.n + at;
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

template <class How>
void shrink(const Call& call, const Task& t) {
  for_tiles<kMostRows>(t.rows, [&](int64_t row, auto rows) {
    shrink_rows<How, decltype(rows)::value>(call, t, t.row + row);
  });
}

template <class How>
void expand(const Call& call, const Task& t) {
  for (int64_t column = t.first; column < t.first + t.count; column += kLoraColumns)
    for_tiles<kMostExpandRows>(t.rows, [&](int64_t row, auto rows) {
      expand_rows<How, decltype(rows)::value>(call, t, t.row + row, column);
    });
}

// Both passes of some rows.
template <class How>
void add_rows(const Call& call, Task t) {
  const LoraLinear& l = *call.uses[t.use].linear;
  t.first = 0, t.count = l.rank;
  How::round_x(call, t);
  shrink<How>(call, t);
  How::round_h(call, t);
  for (t.part = 0; t.part < l.num_parts; t.part++) {
    t.count = l.parts[t.part].columns;
    expand<How>(call, t);
  }
}

// Cuts [0, total) of a use's rows and of `size` things beside them into tasks.
void cut(std::vector<Task>& tasks, int64_t use, int64_t rows, int64_t most_rows, int64_t size,
         int64_t most, int64_t part) {
  for (int64_t first = 0; first < size; first += most)
    for (int64_t row = 0; row < rows; row += most_rows)
      tasks.push_back({use, row, std::min(most_rows, rows - row), first,
                       std::min(most, size - first), part});
}

// Calls f(task, how) for each task; `how` says how its adapter's values are multiplied.
template <class F>
void run(const Call& call, const std::vector<Task>& tasks, int threads, F&& f) {
  deal(threads, static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
    const Task& t = tasks[i];
    const LoraLinear& l = *call.uses[t.use].linear;
#ifdef QUIRE_BF16_DOT
    if (l.pairs) return f(t, Paired{});
#endif
    with_float(l.dtype, [&](auto* type) {
      return f(t, Widened<std::remove_pointer_t<decltype(type)>>{}), kOk;
    });
  });
}

// So many rows that each thread finds a few tasks, where there are as many.
int64_t rows_of_task(int64_t rows, int threads) {
  const int64_t each = rows / (4 * threads) / kLeastTaskRows * kLeastTaskRows;
  return std::max(kLeastTaskRows, std::min(kMostTaskRows, each));
}

// Places for what is between the passes, which the calling thread keeps.
void lay_out(Call& call, int64_t num_uses) {
  const auto bytes_of = [](const LoraUse& use, int64_t (&bytes)[3]) {
    const LoraLinear& l = *use.linear;
    const int64_t halves = l.pairs ? use.count * static_cast<int64_t>(sizeof(bf16)) : 0;
    bytes[0] = use.count * l.rank * static_cast<int64_t>(sizeof(float));
    bytes[1] = halves * lora_depth(l.k), bytes[2] = halves * half_stride(l.rank);
    int64_t total = 0;
    for (int64_t& each : bytes) total += each = (each + 63) & ~int64_t{63};
    return total;
  };
  int64_t bytes[3], total = 0;
  for (int64_t u = 0; u < num_uses; u++) total += bytes_of(call.uses[u], bytes);
  char* at = scratch_for(Scratch::kLora, total);
  call.between.clear();
  for (int64_t u = 0; u < num_uses; u++) {
    const int64_t whole = bytes_of(call.uses[u], bytes);
    call.between.push_back({reinterpret_cast<float*>(at), reinterpret_cast<bf16*>(at + bytes[0]),
                            reinterpret_cast<bf16*>(at + bytes[0] + bytes[1])});
    at += whole;
  }
}

}  // namespace

void add_lora(float* y, int64_t n, const float* x, int64_t stride, const LoraUse* uses,
              int64_t num_uses, int64_t low, int threads) {
  // Kept from call to call, and reached by reference: a thread that helps has others of these names.
  thread_local std::vector<Task> kept_wholes, kept_shrinks, kept_expands;
  thread_local Call kept_call;
  std::vector<Task>&wholes = kept_wholes, &shrinks = kept_shrinks, &expands = kept_expands;
  Call& call = kept_call;
  call.y = y, call.n = n, call.x = x, call.stride = stride, call.uses = uses, call.low = low;
  wholes.clear(), shrinks.clear(), expands.clear();
  int64_t rows = 0, down = 0, up = 0;
  for (int64_t u = 0; u < num_uses; u++) {
    const LoraLinear& l = *uses[u].linear;
    rows += uses[u].count, down += uses[u].count * l.rank * l.k;
    for (int64_t p = 0; p < l.num_parts; p++)
      up += uses[u].count * (l.parts[p].rank + 1) * l.parts[p].columns;
  }
  lay_out(call, num_uses);
  // A thread that is woken should find some microseconds of work.
  const int team = worth(threads, down + up, 16384);
  for (int64_t u = 0; u < num_uses; u++)
    cut(wholes, u, uses[u].count, rows_of_task(rows, team), 1, 1, 0);
  if (static_cast<int64_t>(wholes.size()) >= team) {
    // Rows enough for everybody: nobody waits between the passes.
    return run(call, wholes, team, [&](const Task& t, auto how) { add_rows<decltype(how)>(call, t); });
  }
  for (int64_t u = 0; u < num_uses; u++) {
    const LoraLinear& l = *uses[u].linear;
    cut(shrinks, u, uses[u].count, kMostTaskRows, l.rank, kLoraRanks, 0);
    for (int64_t p = 0; p < l.num_parts; p++)
      cut(expands, u, uses[u].count, kMostTaskRows, l.parts[p].columns, kTaskColumns, p);
  }
  run(call, wholes, 1, [&](const Task& t, auto how) { decltype(how)::round_x(call, t); });
  run(call, shrinks, worth(threads, down, 16384),
      [&](const Task& t, auto how) { shrink<decltype(how)>(call, t); });
  run(call, wholes, 1, [&](const Task& t, auto how) { decltype(how)::round_h(call, t); });
  run(call, expands, worth(threads, up, 16384),
      [&](const Task& t, auto how) { expand<decltype(how)>(call, t); });
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

namespace quire {
namespace {

// out[j][i] = in[i][j] of a whole block, of values of SIZE bytes wherever they lie; RANK: 0 where `rank`
// isn't known beforehand.
template <int64_t RANK, int SIZE>
void turn_block(char* __restrict out, const char* __restrict in, int64_t rank) {
  const int64_t ranks = RANK ? RANK : rank;
  for (int64_t j = 0; j < ranks; j++)
    for (int64_t i = 0; i < kLoraColumns; i++)
      std::memcpy(out + (j * kLoraColumns + i) * SIZE, in + (i * ranks + j) * SIZE, SIZE);
}

template <int SIZE>
void turn(void* out, const void* in, int64_t rank) {
  char* to = static_cast<char*>(out);
  const char* from = static_cast<const char*>(in);
  if (rank == 4) return turn_block<4, SIZE>(to, from, rank);
  if (rank == 8) return turn_block<8, SIZE>(to, from, rank);
  if (rank == 16) return turn_block<16, SIZE>(to, from, rank);
  turn_block<0, SIZE>(to, from, rank);
}

// out [columns / kLoraColumns, rounded up][rank][kLoraColumns] from b [columns, rank], or with `pairs`
// [rank / 2, rounded up][kLoraColumns][2] of each block; what there is no value for is zero.
template <class T>
void pack_outputs(T* out, const T* b, int64_t columns, int64_t rank, bool pairs) {
  const int64_t width = pairs ? rank + rank % 2 : rank;
  for (int64_t first = 0; first < columns; first += kLoraColumns, out += width * kLoraColumns) {
    const int64_t wide = std::min(kLoraColumns, columns - first);
    const T* from = b + first * rank;
    if (wide == kLoraColumns && !pairs) {
      turn<sizeof(T)>(out, from, rank);
    } else if (wide == kLoraColumns && width == rank) {  // a pair is moved as one value
      turn<2 * sizeof(T)>(out, from, rank / 2);
    } else {
      std::fill(out, out + width * kLoraColumns, T{});
      for (int64_t i = 0; i < wide; i++)
        for (int64_t j = 0; j < rank; j++)
          out[pairs ? (j / 2 * kLoraColumns + i) * 2 + j % 2 : j * kLoraColumns + i] =
              from[i * rank + j];
    }
  }
}

// Rows [first, first + count) of `rank` in `out`, see LoraLinear, from a [count, k].
template <class T>
void pack_inputs(T* out, const T* a, int64_t rank, int64_t first, int64_t count, int64_t k) {
  const int64_t depth = lora_depth(k);
  for (int64_t j = first; j < first + count; j++, a += k) {
    const int64_t block = j / kLoraRanks * kLoraRanks;
    const int64_t step = std::min<int64_t>(kLoraRanks, rank - block) * kLoraLanes;
    T* to = out + block * depth + (j - block) * kLoraLanes;
    int64_t i = 0;
    for (; i + kLoraLanes <= k; i += kLoraLanes, to += step)
      std::memcpy(to, a + i, kLoraLanes * sizeof(T));
    if (i == k) continue;
    std::fill(to, to + kLoraLanes, T{});
    std::memcpy(to, a + i, (k - i) * sizeof(T));
  }
}

// Whether no value has all bits of `exponent`, which NaN and infinity have.
template <class T>
bool all_numbers(const T* values, int64_t count, T exponent) {
  T found = 0;
  for (int64_t i = 0; i < count; i++) found |= (values[i] & exponent) == exponent;
  return !found;
}

// Calls f(T{}) with an unsigned integer of `size` bytes.
template <class F>
int with_size(int size, F&& f) {
  if (size == 2) return f(uint16_t{});
  return size == 4 ? f(uint32_t{}) : kBadDType;
}

}  // namespace
}  // namespace quire

// See pack_outputs; b of two bytes or four a value.
extern "C" int quire_pack_lora_outputs(void* out, const void* b, int64_t columns, int64_t rank,
                                       int pairs, int size) {
  return with_size(size, [&](auto kind) {
    using T = decltype(kind);
    return pack_outputs(static_cast<T*>(out), static_cast<const T*>(b), columns, rank, pairs != 0), kOk;
  });
}

// All of `rank` rows of A, see LoraLinear; a [rank, k] of two bytes or four a value.
extern "C" int quire_pack_lora_inputs(void* out, const void* a, int64_t rank, int64_t k, int size) {
  return with_size(size, [&](auto kind) {
    using T = decltype(kind);
    return pack_inputs(static_cast<T*>(out), static_cast<const T*>(a), rank, 0, rank, k), kOk;
  });
}

// Moves an adapter's values, of two bytes or four each, to where kernels want them.
extern "C" int quire_fill_lora(void* out, const void* values, const LoraInputs* inputs,
                               int64_t num_inputs, const LoraOutputs* outputs, int64_t num_outputs,
                               int size) {
  return with_size(size, [&](auto kind) {
    using T = decltype(kind);
    T* to = static_cast<T*>(out);
    const T* from = static_cast<const T*>(values);
    for (const LoraInputs* p = inputs; p < inputs + num_inputs; p++)
      pack_inputs(to + p->to, from + p->from, p->rank, p->first, p->count, p->k);
    for (const LoraOutputs* p = outputs; p < outputs + num_outputs; p++)
      pack_outputs(to + p->to, from + p->from, p->columns, p->rank, p->pairs != 0);
    return kOk;
  });
}

// 1 where all values are numbers, else 0.
extern "C" int quire_all_numbers(const void* values, int64_t count, int dtype) {
  if (dtype == kF32) return all_numbers<uint32_t>(static_cast<const uint32_t*>(values), count, 0x7f800000);
  const uint16_t exponent = dtype == kBF16 ? 0x7f80 : 0x7c00;
  return all_numbers<uint16_t>(static_cast<const uint16_t*>(values), count, exponent);
}

// Memory of `bytes` in huge pages as far as they cover it, for quire_free_lora; null: there is none.
extern "C" void* quire_allocate_lora(int64_t bytes) {
  try {
    return allocate(bytes, static_cast<size_t>(bytes) < kHugePage ? 64 : kHugePage);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

extern "C" void quire_free_lora(void* memory) { std::free(memory); }
