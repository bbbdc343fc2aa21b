// What a request wishes of its logits before a token is chosen, and what is told of them.
#pragma once

#include "runtime.h"

namespace quire {

inline bool RowEdits::penalises() const { return repetition != 1.0f || frequency != 0.0f || presence != 0.0f; }
inline bool RowEdits::changes() const {
  return allowed || num_forbidden || num_words || num_ends || num_biased || penalises();
}

// What a sequence has so far: its prompt, and what was generated.
struct Text {
  const int32_t *prompt, *output;
  int64_t num_prompt, num_output;
};

// Throws std::bad_alloc.
void edit_row(const RowEdits& edits, const Text& text, float* logits, int64_t vocab);

// Log probabilities of a row's chosen token, and of its k likeliest, best first.
struct Told {
  int64_t* ids;    // [1 + k]
  float* values;   // [1 + k]
  int64_t* ranks;  // [1 + k], equal ones share the best
};

// Returns the normalizer; NaN, as the values, where the row's logits are no numbers to choose by.
// Throws std::bad_alloc.
float tell_row(const float* logits, int64_t vocab, int64_t token, int64_t k, const Told& told);

}  // namespace quire
