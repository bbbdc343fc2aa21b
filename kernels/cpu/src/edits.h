// A request's edits of its logits before a token is chosen, and the reported log probabilities.
#pragma once

#include "runtime.h"

namespace quire {

inline bool RowEdits::penalises() const { return repetition != 1.0f || frequency != 0.0f || presence != 0.0f; }
inline bool RowEdits::changes() const {
  return allowed || num_forbidden || num_words || num_ends || num_biased || penalises();
}

// The tokens of a sequence so far: prompt and output.
struct Text {
  const int32_t *prompt, *output;
  int64_t num_prompt, num_output;
};

// Throws std::bad_alloc.
void edit_row(const RowEdits& edits, const Text& text, float* logits, int64_t vocab);

// Log probabilities of a row's chosen token and of its k most likely tokens, best first.
struct Told {
  int64_t* ids;    // [1 + k]
  float* values;   // [1 + k]
  int64_t* ranks;  // [1 + k], equal logits share the best rank
};

// Returns the normalizer; NaN, like the values, if the row has NaN or its maximum isn't finite.
// Throws std::bad_alloc.
float tell_row(const float* logits, int64_t vocab, int64_t token, int64_t k, const Told& told);

}  // namespace quire
