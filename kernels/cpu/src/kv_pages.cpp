#include "kv_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "runtime.h"

namespace quire {
namespace {

constexpr int64_t kPage = kHugePage;
constexpr int64_t kSmallPage = 4096;

#ifdef MADV_POPULATE_WRITE
constexpr bool kCanMap = true;
#else
constexpr bool kCanMap = false;
#endif

}  // namespace

KvPages::KvPages(std::vector<char*> caches, int64_t num_blocks, int64_t block_size,
                 int64_t block_bytes)
    : caches_(std::move(caches)),
      block_size_(block_size),
      block_bytes_(block_bytes),
      bytes_(num_blocks * block_bytes),
      mapped_((bytes_ + kPage - 1) / kPage) {
  // Caches of one or two pages are mapped by their first writes.
  if (bytes_ <= 2 * kPage) mapped_.clear();
}

void KvPages::want(int64_t page, int64_t caches) {
  for (; mapped_[page] < caches; mapped_[page]++)
    wanted_.push_back({page, caches_[mapped_[page]]});
}

void KvPages::map(const Piece& piece) const {
#ifdef MADV_POPULATE_WRITE
  const int64_t from = piece.page * kPage, to = std::min(bytes_, from + kPage);
  const int64_t before = reinterpret_cast<intptr_t>(piece.cache + from) & (kSmallPage - 1);
  madvise(piece.cache + from - before, to - from + before, MADV_POPULATE_WRITE);
#endif
}

void KvPages::prepare(const int64_t* slots, int64_t count, int threads) {
  if (mapped_.empty() || !kCanMap) return;
  const int64_t all = static_cast<int64_t>(caches_.size());
  int64_t end = 0;
  wanted_.clear();
  for (int64_t i = 0; i < count; i++) {
    if (slots[i] < 0) continue;
    const int64_t block = slots[i] / block_size_ * block_bytes_;
    end = std::max(end, block + block_bytes_);
    for (int64_t page = block / kPage; page * kPage < block + block_bytes_; page++) want(page, all);
  }
  const int64_t next = (end + kPage - 1) / kPage;
  if (end && next < static_cast<int64_t>(mapped_.size())) {
    const int64_t full = end - (next - 1) * kPage;
    want(next, all * full / kPage);
  }
  deal(threads, static_cast<int64_t>(wanted_.size()),
       [&](int64_t i, int) { map(wanted_[i]); });
}

}  // namespace quire
