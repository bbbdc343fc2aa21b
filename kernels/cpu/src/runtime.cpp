#include "runtime.h"

#include <sys/mman.h>

#include <cstdlib>
#include <memory>

namespace quire {

namespace {
struct Free {
  void operator()(char* p) const { std::free(p); }
};
struct Block {
  std::unique_ptr<char, Free> memory;
  size_t bytes = 0;
};
thread_local Block blocks[static_cast<int>(Scratch::kCount)];
}  // namespace

char* allocate(size_t bytes, size_t align) {
  char* memory = static_cast<char*>(std::aligned_alloc(align, (bytes + align - 1) & ~(align - 1)));
  if (!memory) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  const auto at = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t from = (at + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t to = (at + bytes) & ~(kHugePage - 1);
  if (from < to) {
    madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
  }
#endif
  return memory;
}

char* scratch_for(Scratch whose, size_t bytes) {
  Block& block = blocks[static_cast<int>(whose)];
  if (block.bytes < bytes) {
    const size_t page = bytes >= 2 * kHugePage ? kHugePage : 4096;
    const size_t wanted = (bytes + bytes / 4 + page - 1) & ~(page - 1);
    block.memory.reset();
    block.bytes = 0;
    block.memory.reset(allocate(wanted, page));
    block.bytes = wanted;
  }
  return block.memory.get();
}

void read_row(float* out, const void* p, int64_t offset, int64_t n, int dtype) {
  with_float(dtype, [&](auto* tag) {
    const auto* in = static_cast<decltype(tag)>(const_cast<void*>(p)) + offset;
    for_lanes(n, [&](int64_t i, int lanes) {
      vstore_some(out + i, vload_some(in + i, lanes), lanes);
    });
    return 0;
  });
}

void write_row(void* p, int64_t offset, const float* x, int64_t n, int dtype) {
  with_float(dtype, [&](auto* tag) {
    auto* out = static_cast<decltype(tag)>(p) + offset;
    for_lanes(n, [&](int64_t i, int lanes) {
      vstore_some(out + i, vload_some(x + i, lanes), lanes);
    });
    return 0;
  });
}

}  // namespace quire

extern "C" {
// The instruction set of this build, 512, 256 or 128 bits, and its extras.
int quire_vector_bits() { return quire::W * 32; }
int quire_has_bf16() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}
int quire_has_vnni() {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return 1;
#else
  return 0;
#endif
}
// Makes the system map the pages of `bytes` bytes now. Others may write there meanwhile: atomically
// adding nothing counts as a write, and preserves their values.
void quire_map_pages(void* memory, int64_t bytes) {
  auto* at = static_cast<unsigned char*>(memory);
  for (int64_t i = 0; i < bytes; i += 4096) __atomic_fetch_add(at + i, 0, __ATOMIC_RELAXED);
  if (bytes > 0) __atomic_fetch_add(at + bytes - 1, 0, __ATOMIC_RELAXED);
}
// Does nothing, to measure the cost of a call.
int quire_nothing(const void*, const void*, int64_t, int64_t, float, int) { return 0; }
}
