// A step in which every sequence decodes, in one call: from the running batch's tables to the next
// tokens, which are written there. In between nothing returns to Python, whose code and data the
// weights have pushed out of the caches by then.
#include <algorithm>

#include "decoder.h"

namespace quire {
namespace {

// kernels/cpu/step.py has the same fields in the same order.
struct StepEnds {
  const Decoder* decoder;
  const Packed *embedding, *head;
  const float* positions;  // [num_positions, hidden], added to the embeddings; or null
  int64_t num_positions, position_offset;
  float embedding_scale, logit_scale;
};

struct StepTables {
  int32_t* tokens;  // [num_rows, token_stride]
  int64_t token_stride;
  const int32_t* block_tables;  // [num_groups, num_rows, table_stride]
  int64_t num_groups, table_stride;
  const int64_t* num_prompt;           // [num_rows]
  int64_t *num_tokens, *num_computed;  // [num_rows]
  int64_t num_rows;
};

struct Step {
  StepEnds ends;
  StepTables tables;
};

// For each of the step's rows; without temperatures all take the likeliest token.
struct StepChoice {
  const float* temperature;
  const int64_t* top_k;
  const double *top_p, *min_p;
  const uint64_t* seeds;
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
  int64_t *positions, *ids, *slots;  // slots [num_groups, count]
  int32_t *tables, *seq_lens, *starts;
  int64_t width;  // blocks of the longest sequence
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

// A row whose logits are broken keeps its token; whoever asked for it is told by -1.
void advance(const StepTables& t, const int64_t* rows, int64_t count, const int64_t* chosen) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = rows[i], at = t.num_tokens[row]++;
    t.num_computed[row] = at;
    if (chosen[i] >= 0) t.tokens[row * t.token_stride + at] = static_cast<int32_t>(chosen[i]);
  }
}

int run_step(const Step& step, const int64_t* rows, int64_t count, const StepChoice* how,
             int64_t* out, int threads) {
  const StepEnds& ends = step.ends;
  const int64_t groups = step.tables.num_groups;
  const int64_t hidden = ends.decoder->shape.hidden, vocab = ends.head->n;
  if (const int wrong = check_rows(step, rows, count)) return wrong;
  const int64_t width = widest(step, rows, count);
  Layout layout;
  const size_t positions = layout.add(count * sizeof(int64_t));
  const size_t ids = layout.add(count * sizeof(int64_t));
  const size_t slots = layout.add(groups * count * sizeof(int64_t));
  const size_t tables = layout.add(groups * count * width * sizeof(int32_t));
  const size_t seq_lens = layout.add(count * sizeof(int32_t));
  const size_t starts = layout.add((count + 1) * sizeof(int32_t));
  const size_t described = layout.add(groups * sizeof(DecoderGroup));
  const size_t uniforms = layout.add(count * sizeof(double));
  const size_t residual = layout.add(count * hidden * sizeof(float));
  const size_t x = layout.add(count * hidden * sizeof(float));
  const size_t logits = layout.add(count * vocab * sizeof(float));
  char* base = Scratch::get(4, layout.total());
  auto ints = [&](size_t at) { return reinterpret_cast<int32_t*>(base + at); };
  auto longs = [&](size_t at) { return reinterpret_cast<int64_t*>(base + at); };
  auto floats = [&](size_t at) { return reinterpret_cast<float*>(base + at); };
  const Inputs in{longs(positions), longs(ids),    longs(slots), ints(tables),
                  ints(seq_lens),   ints(starts), width};
  gather(step, rows, count, in);
  DecoderGroup* group = reinterpret_cast<DecoderGroup*>(base + described);
  for (int64_t g = 0; g < groups; g++)
    group[g] = DecoderGroup{in.slots + g * count, in.tables + g * count * width, width};
  int wrong = embed(ends, in, count, floats(residual), threads);
  const DecoderBatch batch{count,     in.positions, group,   groups, in.seq_lens,
                           in.starts, count,        nullptr, -1};
  if (!wrong) wrong = run_decoder(*ends.decoder, batch, floats(residual), floats(x), threads);
  if (!wrong) wrong = linear(*ends.head, floats(logits), floats(x), hidden, count, kF32, threads);
  if (wrong) return wrong;
  scale(floats(logits), count * vocab, ends.logit_scale);
  wrong = choose(step, rows, count, floats(logits), how,
                 reinterpret_cast<double*>(base + uniforms), out, threads);
  if (!wrong) advance(step.tables, rows, count, out);
  return wrong;
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" void* quire_step_new(const StepEnds* ends, const StepTables* tables) {
  return new (std::nothrow) Step{*ends, *tables};
}

extern "C" void quire_step_free(void* step) { delete static_cast<Step*>(step); }

// out [count]: the next token of each of `rows`, or -1 where its logits are no numbers to choose by.
// choice: null for the likeliest of each. Counts go on by one token.
extern "C" int quire_step_run(const void* step, const int64_t* rows, int64_t count,
                              const StepChoice* choice, int64_t* out, int threads) {
  return guarded([&] {
    return run_step(*static_cast<const Step*>(step), rows, count, choice, out, threads);
  });
}
