// A step in which every sequence decodes, in one call: from the running batch's tables to the next
// tokens, which are written there. In between nothing returns to Python, whose code and data the
// weights have pushed out of the caches by then.
#include <algorithm>

#include "step.h"

namespace quire {
namespace {

struct Step {
  StepEnds ends;
  StepTables tables;
};

// Philox4x32-10 (Salmon et al. 2011) of (seed, position): the number that
// engine/sampling/uniforms.py makes.
double uniform_of(uint64_t seed, uint64_t position) {
  constexpr uint64_t kLow = 0xffffffff;
  uint64_t c0 = position & kLow, c1 = position >> 32, c2 = 0, c3 = 0;
  uint64_t k0 = seed & kLow, k1 = seed >> 32;
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = c0 * 0xD2511F53, p1 = c2 * 0xCD9E8D57;
    c0 = (p1 >> 32) ^ c1 ^ k0, c1 = p1 & kLow;
    c2 = (p0 >> 32) ^ c3 ^ k1, c3 = p0 & kLow;
    k0 = (k0 + 0x9E3779B9) & kLow, k1 = (k1 + 0xBB67AE85) & kLow;
  }
  return static_cast<double>((c0 >> 5) << 26 | c1 >> 6) * 0x1p-53;
}

// What the layers read of the batch, gathered from the tables.
struct Inputs {
  int64_t width;             // blocks of the longest sequence
  int64_t *positions, *ids;  // [count]
  int64_t* slots;            // [num_groups, count]
  int32_t* tables;           // [num_groups, count, width]
  int32_t *seq_lens, *starts;  // [count], [count + 1]
};

int check_rows(const Step& step, const int64_t* rows, int64_t count) {
  const StepTables& t = step.tables;
  const int64_t size = step.ends.decoder->shape.block_size;
  for (int64_t i = 0; i < count; i++) {
    if (rows[i] < 0 || rows[i] >= t.num_rows) return kBadRow;
    const int64_t position = t.num_computed[rows[i]];
    const bool decodes = position >= 0 && position + 1 == t.num_tokens[rows[i]];
    const bool fits = position + 1 < t.token_stride && position / size < t.table_stride;
    if (!decodes || !fits) return kBadSequence;
    const int64_t learned = position + step.ends.position_offset;
    if (step.ends.positions && learned >= step.ends.num_positions) return kBadPosition;
  }
  return kOk;
}

int64_t widest(const Step& step, const int64_t* rows, int64_t count) {
  int64_t longest = 0;
  for (int64_t i = 0; i < count; i++)
    longest = std::max(longest, step.tables.num_computed[rows[i]]);
  return longest / step.ends.decoder->shape.block_size + 1;
}

void gather(const Step& step, const int64_t* rows, int64_t count, const Inputs& in) {
  const StepTables& t = step.tables;
  const int64_t size = step.ends.decoder->shape.block_size;
  in.starts[0] = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = rows[i], position = t.num_computed[row];
    in.positions[i] = position;
    in.ids[i] = t.tokens[row * t.token_stride + position];
    in.seq_lens[i] = static_cast<int32_t>(position + 1);
    in.starts[i + 1] = static_cast<int32_t>(i + 1);
    for (int64_t g = 0; g < t.num_groups; g++) {
      const int32_t* table = t.block_tables + (g * t.num_rows + row) * t.table_stride;
      in.slots[g * count + i] = table[position / size] * size + position % size;
      std::copy(table, table + in.width, in.tables + (g * count + i) * in.width);
    }
  }
}

void scale(float* x, int64_t count, float by) {
  if (by == 1.0f) return;
  for_lanes(count, [&](int64_t i, int n) { vstore_some(x + i, vload_some(x + i, n) * vset(by), n); });
}

int embed(const StepEnds& ends, const Inputs& in, int64_t count, float* x, int threads) {
  const int64_t hidden = ends.decoder->shape.hidden;
  if (const int wrong = unpack_rows(*ends.embedding, x, in.ids, count, threads)) return wrong;
  scale(x, count * hidden, ends.embedding_scale);
  for (int64_t i = 0; i < count && ends.positions; i++) {
    const float* of = ends.positions + (in.positions[i] + ends.position_offset) * hidden;
    float* row = x + i * hidden;
    for_lanes(hidden, [&](int64_t j, int n) {
      vstore_some(row + j, vload_some(row + j, n) + vload_some(of + j, n), n);
    });
  }
  return kOk;
}

int choose(const Step& step, const int64_t* rows, int64_t count, const float* logits,
           const StepChoice* how, double* uniforms, int64_t* out, int threads) {
  const int64_t vocab = step.ends.head->n;
  if (!how) return choose_likeliest(out, logits, count, vocab, threads);
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = rows[i];
    uniforms[i] =
        uniform_of(how->seeds[i], step.tables.num_tokens[row] - step.tables.num_prompt[row]);
  }
  const Sampling sampling{how->temperature, how->top_k, how->top_p, how->min_p, uniforms};
  return choose_sampled(out, logits, count, vocab, sampling, threads);
}

// A row whose logits are broken keeps its token; whoever asked for it is told by -1. The rows behind
// the first `chosen` get theirs from the caller.
void advance(const StepTables& t, const int64_t* rows, int64_t count, const int64_t* out,
             int64_t chosen) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = rows[i], at = t.num_tokens[row];
    t.num_computed[row] = at;
    if (i >= chosen) continue;
    t.num_tokens[row]++;
    if (out[i] >= 0) t.tokens[row * t.token_stride + at] = static_cast<int32_t>(out[i]);
  }
}

int run_step(const Step& step, const int64_t* rows, int64_t count, int64_t chosen,
             const StepChoice* how, int64_t* out, float* open, const LoraGroup* adapters,
             int64_t num_adapters, int threads) {
  const StepEnds& ends = step.ends;
  const int64_t groups = step.tables.num_groups;
  const int64_t hidden = ends.decoder->shape.hidden, vocab = ends.head->n;
  if (const int wrong = check_rows(step, rows, count)) return wrong;
  const int64_t width = widest(step, rows, count);
  Inputs in{width};
  DecoderGroup* group;
  double* uniforms;
  float *residual, *x, *logits;
  Layout layout;
  layout.add(&in.positions, count);
  layout.add(&in.ids, count);
  layout.add(&in.slots, groups * count);
  layout.add(&in.tables, groups * count * width);
  layout.add(&in.seq_lens, count);
  layout.add(&in.starts, count + 1);
  layout.add(&group, groups);
  layout.add(&uniforms, count);
  layout.add(&residual, count * hidden);
  layout.add(&x, count * hidden);
  layout.add(&logits, chosen ? count * vocab : 0);
  layout.take(Scratch::kStep);
  if (!chosen) logits = open;  // all of them are the caller's
  gather(step, rows, count, in);
  for (int64_t g = 0; g < groups; g++)
    group[g] = DecoderGroup{in.slots + g * count, in.tables + g * count * width, width};
  int wrong = embed(ends, in, count, residual, threads);
  const DecoderBatch batch{count,     in.positions, group,   groups, in.seq_lens,
                           in.starts, count,        nullptr, -1,     adapters,
                           num_adapters};
  if (!wrong) wrong = run_decoder(*ends.decoder, batch, residual, x, threads);
  if (!wrong) wrong = linear(*ends.head, logits, x, hidden, count, kF32, threads);
  if (wrong) return wrong;
  scale(logits, count * vocab, ends.logit_scale);
  if (chosen) {
    std::copy(logits + chosen * vocab, logits + count * vocab, open);
    wrong = choose(step, rows, chosen, logits, how, uniforms, out, threads);
  }
  if (!wrong) advance(step.tables, rows, count, out, chosen);
  return wrong;
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" void* quire_step_new(const StepEnds* ends, const StepTables* tables) {
  return new (std::nothrow) Step{*ends, *tables};
}

extern "C" void quire_step_free(void* step) { delete static_cast<Step*>(step); }

// out [chosen]: the next token of each of the first `chosen` rows, or -1 where its logits are no
// numbers to choose by; choice: null for the likeliest of each. Their counts go on by one token. Of
// the other rows, `open` [count - chosen, vocab] gets the logits, and only what is computed goes on.
extern "C" int quire_step_run(const void* step, const int64_t* rows, int64_t count, int64_t chosen,
                              const StepChoice* choice, int64_t* out, float* open,
                              const LoraGroup* adapters, int64_t num_adapters, int threads) {
  return guarded([&] {
    return run_step(*static_cast<const Step*>(step), rows, count, chosen, choice, out, open,
                    adapters, num_adapters, threads);
  });
}
