// Maps new pages of KV caches, by all threads together, shortly before they are written.
#pragma once

#include <cstdint>
#include <vector>

namespace quire {

// The caches of layers with the same slots. They all reach a new huge page with the same token. If
// that were left to the write, one thread would clear page after page while the others wait: 48 MiB
// in one step of a small model.
class KvPages {
 public:
  KvPages(std::vector<char*> caches, int64_t num_blocks, int64_t block_size, int64_t block_bytes);

  // Maps the pages that the slots need, and of each cache's next page as large a part as the latest
  // page is full: while there are unused blocks, the pool allocates them in ascending order.
  // Negative slots are skipped. Does nothing if the system can't map pages.
  void prepare(const int64_t* slots, int64_t count, int threads);

 private:
  struct Piece {
    int64_t page;
    char* cache;
  };
  void want(int64_t page, int64_t caches);
  void map(const Piece& piece) const;

  std::vector<char*> caches_;
  int64_t block_size_, block_bytes_, bytes_;
  std::vector<int64_t> mapped_;  // for each page, how many caches have it
  std::vector<Piece> wanted_;
};

}  // namespace quire
