// Layout of adapters for the kernels of lora.cpp: see lora.h.
#include "lora.h"

namespace quire {
namespace {

// out[j][i] = in[i][j] of a whole block, of values of SIZE bytes; RANK: 0 if `rank` isn't a
// constant.
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

// out [columns / kLoraColumns, rounded up][rank][kLoraColumns] from b [columns, rank], or with
// `pairs` [rank / 2, rounded up][kLoraColumns][2] per block, padded with zeros.
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

// Whether no value has all bits of `exponent` set, as NaN and infinity have.
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

// See pack_outputs; b has two or four bytes per value.
extern "C" int quire_pack_lora_outputs(void* out, const void* b, int64_t columns, int64_t rank,
                                       int pairs, int size) {
  return with_size(size, [&](auto kind) {
    using T = decltype(kind);
    return pack_outputs(static_cast<T*>(out), static_cast<const T*>(b), columns, rank, pairs != 0), kOk;
  });
}

// All `rank` rows of A, see LoraLinear; a [rank, k] has two or four bytes per value.
extern "C" int quire_pack_lora_inputs(void* out, const void* a, int64_t rank, int64_t k, int size) {
  return with_size(size, [&](auto kind) {
    using T = decltype(kind);
    return pack_inputs(static_cast<T*>(out), static_cast<const T*>(a), rank, 0, rank, k), kOk;
  });
}

// Copies an adapter's values, of two or four bytes each, to the kernels' layout.
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

// 1 if all values are finite, else 0.
extern "C" int quire_all_numbers(const void* values, int64_t count, int dtype) {
  if (dtype == kF32) return all_numbers<uint32_t>(static_cast<const uint32_t*>(values), count, 0x7f800000);
  const uint16_t exponent = dtype == kBF16 ? 0x7f80 : 0x7c00;
  return all_numbers<uint16_t>(static_cast<const uint16_t*>(values), count, exponent);
}

// Memory of `bytes`, in huge pages where possible, for quire_free_lora; null if there is none.
extern "C" void* quire_allocate_lora(int64_t bytes) {
  try {
    return allocate(bytes, static_cast<size_t>(bytes) < kHugePage ? 64 : kHugePage);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

extern "C" void quire_free_lora(void* memory) { std::free(memory); }
