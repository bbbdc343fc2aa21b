// Memory for packed weights.
#pragma once

#include <cstdint>

namespace quire {

// Allocates `bytes`, aligned to 64, next to earlier ones: the matrices of a small model are smaller
// than a huge page, and in small pages every 4 KiB of weights cost an address translation. Throws
// std::bad_alloc. These two functions may be called by several threads.
char* take_weights(int64_t bytes);

// Frees them; null does nothing. Regions without other matrices return to the system at once.
void give_weights(void* data, int64_t bytes);

}  // namespace quire
