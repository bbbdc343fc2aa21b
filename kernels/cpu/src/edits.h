// What a request wishes of its logits before a token is chosen, and what is told of them.
#pragma once

#include "runtime.h"

namespace quire {

// In the order in which they act. Ids are those of the vocabulary, biased ones named once.
struct RowEdits {
  const int32_t* allowed;    // a bit a token, those that may come; null: all
  const int32_t* forbidden;  // [num_forbidden]
  int64_t num_forbidden;
  // Bad words of two tokens and more, one behind the other; word i begins at word_starts[i].
  const int32_t* words;
  const int64_t* word_starts;  // [num_words + 1]
  int64_t num_words;
  const int32_t* ends;  // [num_ends], forbidden before there are min_tokens
  int64_t num_ends, min_tokens;
  const int32_t* biased;  // [num_biased]
  const float* biases;
  int64_t num_biased;
  float repetition, frequency, presence;  // 1, 0, 0: no penalty
  int32_t counts_prompt;                  // for the repetition penalty
  int64_t num_logprobs;                   // told of the likeliest tokens; -1: of none, nor the chosen

  bool penalises() const { return repetition != 1.0f || frequency != 0.0f || presence != 0.0f; }
  bool changes() const {
    return allowed || num_forbidden || num_words || num_ends || num_biased || penalises();
  }
};

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
