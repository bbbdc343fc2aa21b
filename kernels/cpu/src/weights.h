// Memory for packed weights.
#pragma once

#include <cstdint>

namespace quire {

// `bytes`, aligned to 64, beside those of earlier calls: the matrices of a small model are smaller
// than a huge page, and in small pages every 4 KiB of weights costs an address translation. Throws
// std::bad_alloc. These two may be called from several threads.
char* take_weights(int64_t bytes);

// Gives them back; null is nothing. What they alone lay in goes back to the system at once.
void give_weights(void* data, int64_t bytes);

}  // namespace quire
