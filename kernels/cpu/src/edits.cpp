// Lists, bad words, biases and penalties on one row of logits, bitwise equal to engine/sampling.
#include <limits>
#include <vector>

#include "edits.h"

namespace quire {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void keep_allowed(const int32_t* bits, float* logits, int64_t vocab) {
  for (int64_t t = 0; t < vocab; t++)
    if (!(static_cast<uint32_t>(bits[t / 32]) >> (t % 32) & 1)) logits[t] = kNever;
}

void forbid(const int32_t* ids, int64_t count, float* logits) {
  for (int64_t i = 0; i < count; i++) logits[ids[i]] = kNever;
}

// The last tokens of bad words whose other tokens end the output.
void forbid_words(const RowEdits& edits, const Text& text, float* logits) {
  for (int64_t i = 0; i < edits.num_words; i++) {
    const int32_t* word = edits.words + edits.word_starts[i];
    const int64_t before = edits.word_starts[i + 1] - edits.word_starts[i] - 1;
    if (before > text.num_output) continue;
    const int32_t* end = text.output + text.num_output;
    if (std::equal(end - before, end, word)) logits[word[before]] = kNever;
  }
}

// How often each token was generated, and which occur only in the prompt.
class Counts {
 public:
  Counts(const RowEdits& edits, const Text& text, int64_t vocab) : vocab_(vocab) {
    if (static_cast<int64_t>(seen_.size()) < vocab) seen_.resize(vocab);
    ids_.clear();
    if (edits.counts_prompt && edits.repetition != 1.0f) add(text.prompt, text.num_prompt, 0);
    add(text.output, text.num_output, 1);
  }
  ~Counts() {
    for (const int32_t id : ids_) seen_[id] = 0;
  }
  // Calls f(id, count).
  template <class F>
  void each(F&& f) const {
    for (const int32_t id : ids_) f(id, static_cast<float>(seen_[id] - 1));
  }

 private:
  void add(const int32_t* tokens, int64_t count, int32_t times) {
    for (int64_t i = 0; i < count; i++) {
      const int32_t id = tokens[i];
      if (id < 0 || id >= vocab_) continue;
      if (!seen_[id]) {
        ids_.push_back(id);
        seen_[id] = 1;
      }
      seen_[id] += times;
    }
  }
  static thread_local std::vector<int32_t> seen_;  // by token: 1 plus its count; 0 if absent
  static thread_local std::vector<int32_t> ids_;
  int64_t vocab_;
};

thread_local std::vector<int32_t> Counts::seen_;
thread_local std::vector<int32_t> Counts::ids_;

void penalise(const RowEdits& edits, const Text& text, float* logits, int64_t vocab) {
  Counts(edits, text, vocab).each([&](int32_t id, float count) {
    const float x = logits[id];
    const float repeated = x > 0 ? x / edits.repetition : x * edits.repetition;
    const float present = count > 0 ? edits.presence : edits.presence * 0.0f;
    logits[id] = repeated - (edits.frequency * count + present);
  });
}

}  // namespace

void edit_row(const RowEdits& edits, const Text& text, float* logits, int64_t vocab) {
  if (edits.allowed) keep_allowed(edits.allowed, logits, vocab);
  forbid(edits.forbidden, edits.num_forbidden, logits);
  forbid_words(edits, text, logits);
  if (text.num_output < edits.min_tokens) forbid(edits.ends, edits.num_ends, logits);
  for (int64_t i = 0; i < edits.num_biased; i++) logits[edits.biased[i]] += edits.biases[i];
  if (edits.penalises()) penalise(edits, text, logits, vocab);
}

}  // namespace quire
