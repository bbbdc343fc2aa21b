#include "weights.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <vector>

#include "runtime.h"

namespace quire {
namespace {

constexpr int64_t kPage = kHugePage;
// Bytes that are mapped at a time; only written pages take memory.
constexpr int64_t kRegion = 64 << 20;
// Smaller allocations don't use the regions.
constexpr int64_t kLeast = 64 << 10;

struct Region {
  char* base;
  int64_t bytes, used;
  int64_t pieces;  // number of allocated pieces

  bool holds(const char* p) const { return p >= base && p < base + bytes; }
};

std::mutex mutex;
// Never destroyed: weights may outlive static objects.
std::vector<Region>& regions() {
  static auto* all = new std::vector<Region>;
  return *all;
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Maps more than needed and unmaps the ends, for alignment; null if the system refuses.
char* map_pages(int64_t bytes) {
  void* found = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                     -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(found);
  const int64_t before = -reinterpret_cast<intptr_t>(start) & (kPage - 1);
  if (before) munmap(start, before);
  munmap(start + before + bytes, kPage - before);
#ifdef MADV_HUGEPAGE
  madvise(start + before, bytes, MADV_HUGEPAGE);
#endif
  return start + before;
}

// The region with room for `bytes`: the latest or a new one.
Region& region_for(int64_t bytes) {
  auto& all = regions();
  if (!all.empty() && all.back().bytes - all.back().used >= bytes) return all.back();
  const int64_t size = std::max(kRegion, round_up(bytes, kPage));
  all.reserve(all.size() + 1);
  char* base = map_pages(size);
  if (!base) throw std::bad_alloc();
  all.push_back(Region{base, size, 0, 0});
  return all.back();
}

// Returns the pages entirely within [data, data + bytes) to the system.
void drop_pages(char* data, int64_t bytes) {
  const int64_t before = -reinterpret_cast<intptr_t>(data) & (kPage - 1);
  const int64_t whole = (bytes - before) / kPage * kPage;
  if (whole > 0) madvise(data + before, whole, MADV_DONTNEED);
}

}  // namespace

char* take_weights(int64_t bytes) {
  if (bytes < kLeast) return allocate(bytes);
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t wanted = round_up(bytes, 64);
  Region& region = region_for(wanted);
  char* data = region.base + region.used;
  region.used += wanted;
  region.pieces++;
  return data;
}

void give_weights(void* data, int64_t bytes) {
  char* at = static_cast<char*>(data);
  const std::lock_guard<std::mutex> lock(mutex);
  auto& all = regions();
  for (size_t i = 0; i < all.size(); i++) {
    if (!all[i].holds(at)) continue;
    if (--all[i].pieces) return drop_pages(at, bytes);
    munmap(all[i].base, all[i].bytes);
    all.erase(all.begin() + i);
    return;
  }
  std::free(data);
}

}  // namespace quire
