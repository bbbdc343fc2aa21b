// Has new pages of KV caches mapped by all threads together, a little before they are written.
#pragma once

#include <cstdint>
#include <vector>

namespace quire {

// The caches of layers that keep the same slots: with the same token they all come to a new huge page.
// Left to the write, one thread would clear page after page while the others wait for it, 48 MiB of
// them in one step of a small model.
class KvPages {
 public:
  KvPages(std::vector<char*> caches, int64_t num_blocks, int64_t block_size, int64_t block_bytes);

  // Maps what the slots need, and of the page that comes next as large a part of the caches' as the
  // latest one is full: as long as there are blocks that nobody has used, the pool hands them out in
  // ascending order. Negative slots are skipped. Where the system can't, nothing happens.
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
  std::vector<int64_t> mapped_;  // of each page, how many caches have it
  std::vector<Piece> wanted_;
};

}  // namespace quire
