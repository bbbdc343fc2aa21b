// A step in which every sequence decodes, in one call: from the running batch's tables to the next
// tokens, which it writes there, including the verification of drafts. It doesn't return to Python
// in between, whose code and data the weights have evicted from the caches by then.
#include <algorithm>
#include <vector>

#include "step.h"

namespace quire {
namespace {

struct Step {
  StepEnds ends;
  StepTables tables;  // refers to the block tables below
  std::vector<BlockTable> block_tables;

  Step(const StepEnds& ends, const StepTables& tables)
      : ends(ends),
        tables(tables),
        block_tables(tables.block_tables, tables.block_tables + tables.num_groups) {
    this->tables.block_tables = block_tables.data();
  }
};

// Philox4x32-10 (Salmon et al. 2011) of (seed, position): the same number as in
// engine/sampling/uniforms.py.
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

// The sequences of a step. In the table of tokens each has drafts after its newest token, which are
// computed with it.
struct Rows {
  const int64_t* rows;    // [count], in the tables
  const int64_t* drafts;  // [count], or null for none
  int64_t count;
  int64_t tokens_of(int64_t i) const { return drafts ? 1 + drafts[i] : 1; }
  int64_t tokens(int64_t to) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < to; i++) sum += tokens_of(i);
    return sum;
  }
};

// The layers' inputs, gathered from the tables.
struct Inputs {
  int64_t tokens;
  int64_t width;             // blocks of the longest sequence
  int64_t *positions, *ids;  // [tokens]
  int64_t* slots;            // [num_groups, tokens]
  int32_t* tables;           // [num_groups, count, width]
  int32_t *seq_lens, *starts;  // [count], [count + 1]
  int64_t *state_blocks, *num_computed;  // [count], of a model with states
};

int check_rows(const Step& step, const Rows& all) {
  const StepTables& t = step.tables;
  const int64_t size = step.ends.decoder->shape.block_size;
  for (int64_t i = 0; i < all.count; i++) {
    const int64_t row = all.rows[i], tokens = all.tokens_of(i);
    if (row < 0 || row >= t.num_rows) return kBadRow;
    const int64_t position = t.num_computed[row];
    const bool decodes = position >= 0 && position + 1 == t.num_tokens[row];
    if (!decodes || tokens < 1 || tokens >= t.token_stride) return kBadSequence;
    const int64_t last = position + tokens - 1;
    if (last + 1 >= t.token_stride) return kBadSequence;
    for (const BlockTable& table : step.block_tables)
      if (last / size >= table.stride) return kBadSequence;
    if (t.state_blocks) {
      const int64_t block = t.state_blocks[row];
      if (tokens != 1 || block < 0 || block >= t.num_state_blocks) return kBadSequence;
      if (position && t.state_tokens[block] != position) return kBadSequence;
    }
    const int64_t learned = last + step.ends.position_offset;
    if (step.ends.positions && learned >= step.ends.num_positions) return kBadPosition;
  }
  return kOk;
}

int64_t widest(const Step& step, const Rows& all) {
  int64_t longest = 0;
  for (int64_t i = 0; i < all.count; i++)
    longest = std::max(longest, step.tables.num_computed[all.rows[i]] + all.tokens_of(i) - 1);
  return longest / step.ends.decoder->shape.block_size + 1;
}

void gather(const Step& step, const Rows& all, const Inputs& in) {
  const StepTables& t = step.tables;
  const int64_t size = step.ends.decoder->shape.block_size;
  in.starts[0] = 0;
  for (int64_t i = 0; i < all.count; i++) {
    const int64_t row = all.rows[i], first = t.num_computed[row], tokens = all.tokens_of(i);
    const int64_t start = in.starts[i];
    in.starts[i + 1] = static_cast<int32_t>(start + tokens);
    in.seq_lens[i] = static_cast<int32_t>(first + tokens);
    if (t.state_blocks) in.state_blocks[i] = t.state_blocks[row], in.num_computed[i] = first;
    for (int64_t j = 0; j < tokens; j++) {
      in.positions[start + j] = first + j + t.rope_offsets[row];
      in.ids[start + j] = t.tokens[row * t.token_stride + first + j];
    }
    for (int64_t g = 0; g < t.num_groups; g++) {
      const int32_t* table = t.block_tables[g].blocks + row * t.block_tables[g].stride;
      for (int64_t j = 0; j < tokens; j++) {
        const int64_t position = first + j;
        in.slots[g * in.tokens + start + j] = table[position / size] * size + position % size;
      }
      std::copy(table, table + in.width, in.tables + (g * all.count + i) * in.width);
    }
  }
}

// Converts the adapters' rows to tokens.
struct Adapters {
  std::vector<LoraGroup> groups;
  std::vector<int64_t> tokens;

  int spread(const LoraGroup* given, int64_t count, const Rows& all, const int32_t* starts) {
    std::vector<int64_t> first;
    for (int64_t g = 0; g < count; g++) {
      first.push_back(static_cast<int64_t>(tokens.size()));
      for (int64_t i = 0; i < given[g].count; i++) {
        const int64_t row = given[g].rows[i];
        if (row < 0 || row >= all.count) return kBadRow;
        for (int64_t t = starts[row]; t < starts[row + 1]; t++) tokens.push_back(t);
      }
    }
    first.push_back(static_cast<int64_t>(tokens.size()));
    for (int64_t g = 0; g < count; g++)
      groups.push_back({given[g].layers, tokens.data() + first[g], first[g + 1] - first[g]});
    return kOk;
  }
};

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

// The sampling parameters of a step's first `chosen` rows, by token.
struct Settings {
  float* temperature;
  int64_t* top_k;
  double *top_p, *min_p, *uniforms;

  Sampling fill(const StepTables& t, const Rows& all, int64_t chosen, const StepChoice& how) const {
    for (int64_t i = 0, at = 0; i < chosen; i++) {
      const int64_t generated = t.num_tokens[all.rows[i]] - t.num_prompt[all.rows[i]];
      for (int64_t j = 0; j < all.tokens_of(i); j++, at++) {
        temperature[at] = how.temperature[i], top_k[at] = how.top_k[i];
        top_p[at] = how.top_p[i], min_p[at] = how.min_p[i];
        uniforms[at] = uniform_of(how.seeds[i], generated + j);
      }
    }
    return {temperature, top_k, top_p, min_p, uniforms};
  }
};

// The tokens of a step whose logits are edited or whose log probabilities are reported.
struct Odd {
  const RowEdits* edits;
  Text text;
  int64_t token;
  float* raw;  // the original logits, if both edited and reported
};

std::vector<Odd> odd_tokens(const StepTables& t, const Rows& all, int64_t chosen,
                            const RowEdits* edits) {
  std::vector<Odd> found;
  for (int64_t i = 0, at = 0; edits && i < chosen; at += all.tokens_of(i++)) {
    if (!edits[i].changes() && edits[i].num_logprobs < 0) continue;
    const int64_t row = all.rows[i], prompt = t.num_prompt[row];
    const int32_t* tokens = t.tokens + row * t.token_stride;
    const int64_t generated = t.num_tokens[row] - prompt;
    for (int64_t j = 0; j < all.tokens_of(i); j++)
      found.push_back({edits + i, {tokens, tokens + prompt, prompt, generated + j}, at + j, nullptr});
  }
  return found;
}

// Runs body(odd token) for each.
template <class F>
int over_odd(std::vector<Odd>& odd, int64_t vocab, int threads, F&& body) {
  bool failed = false;
  const int64_t count = static_cast<int64_t>(odd.size());
  deal(worth(threads, count * vocab, 16384), count, [&](int64_t i, int) {
    try {
      body(odd[i]);
    } catch (const std::bad_alloc&) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    }
  });
  return failed ? kNoMemory : kOk;
}

int edit(std::vector<Odd>& odd, float* logits, int64_t vocab, std::vector<float>& raw,
         int threads) {
  int64_t both = 0;
  for (const Odd& one : odd) both += one.edits->num_logprobs >= 0 && one.edits->changes();
  raw.resize(both * vocab);
  float* next = raw.data();
  for (Odd& one : odd) {
    one.raw = logits + one.token * vocab;
    if (one.edits->num_logprobs < 0 || !one.edits->changes()) continue;
    std::copy(one.raw, one.raw + vocab, next);
    one.raw = next;
    next += vocab;
  }
  return over_odd(odd, vocab, threads, [&](const Odd& one) {
    edit_row(*one.edits, one.text, logits + one.token * vocab, vocab);
  });
}

// Reports log probabilities of the chosen tokens; with broken logits the token becomes -1.
int tell(std::vector<Odd>& odd, int64_t vocab, const StepResult& result, int threads) {
  return over_odd(odd, vocab, threads, [&](const Odd& one) {
    const int64_t k = std::min(one.edits->num_logprobs, result.most), at = one.token * (1 + result.most);
    if (k < 0) return;
    int64_t* token = result.out + one.token;
    const Told told{result.ids + at, result.values + at, result.ranks + at};
    const float sum = tell_row(one.raw, vocab, std::max<int64_t>(0, *token), k, told);
    if (!std::isfinite(sum)) *token = -1;
  });
}

// Number of accepted drafts: each equals the token drawn in its place, and a token can be drawn
// after it.
int64_t held(const int32_t* drafts, int64_t count, const int64_t* out) {
  int64_t found = 0;
  while (found < count && out[found] == drafts[found] && out[found + 1] >= 0) found++;
  return found;
}

// For broken logits no token is written, and the -1 in `out` tells the caller. The rows after the
// first `chosen` get their tokens from the caller, who also removes rejected drafts.
void advance(const StepTables& t, const Rows& all, int64_t chosen, const int64_t* out,
             int64_t* got) {
  for (int64_t i = 0; i < all.count; i++) {
    const int64_t row = all.rows[i], at = t.num_tokens[row], count = all.tokens_of(i);
    if (i >= chosen) {
      t.num_computed[row] = at + count - 1;
      continue;
    }
    int32_t* next = t.tokens + row * t.token_stride + at;
    const int64_t more = out[0] < 0 ? 0 : held(next, count - 1, out);
    if (out[0] >= 0) next[more] = static_cast<int32_t>(out[more]);
    t.num_computed[row] = at + more;
    t.num_tokens[row] = at + more + 1;
    if (got) got[i] = out[0] < 0 ? 0 : 1 + more;
    out += count;
  }
}

int run_step(const Step& step, const Rows& all, int64_t chosen, const StepChoice* how,
             const StepResult& result, const LoraGroup* adapters, int64_t num_adapters,
             int threads) {
  const StepEnds& ends = step.ends;
  const int64_t groups = step.tables.num_groups, count = all.count;
  const int64_t hidden = ends.decoder->shape.hidden, vocab = ends.head->outputs();
  if (const int wrong = check_rows(step, all)) return wrong;
  const int64_t tokens = all.tokens(count), drawn = all.tokens(chosen);
  Inputs in{tokens, widest(step, all)};
  Settings settings;
  DecoderGroup* group;
  float *residual, *x, *logits;
  Layout layout;
  layout.add(&in.positions, tokens);
  layout.add(&in.ids, tokens);
  layout.add(&in.slots, groups * tokens);
  layout.add(&in.tables, groups * count * in.width);
  layout.add(&in.seq_lens, count);
  layout.add(&in.starts, count + 1);
  layout.add(&group, groups);
  layout.add(&in.state_blocks, step.tables.state_blocks ? 2 * count : 0);
  layout.add(&settings.temperature, drawn);
  layout.add(&settings.top_k, drawn);
  layout.add(&settings.top_p, drawn);
  layout.add(&settings.min_p, drawn);
  layout.add(&settings.uniforms, drawn);
  layout.add(&residual, tokens * hidden);
  layout.add(&x, tokens * hidden);
  layout.add(&logits, chosen ? tokens * vocab : 0);
  layout.take(Scratch::kStep);
  in.num_computed = in.state_blocks + count;
  if (!chosen) logits = result.open;  // all tokens belong to the caller's rows
  gather(step, all, in);
  for (int64_t g = 0; g < groups; g++)
    group[g] = DecoderGroup{in.slots + g * tokens, in.tables + g * count * in.width, in.width};
  Adapters spread;
  if (num_adapters && all.drafts) {
    if (const int wrong = spread.spread(adapters, num_adapters, all, in.starts)) return wrong;
    adapters = spread.groups.data();
  }
  int wrong = embed(ends, in, tokens, residual, threads);
  const bool tapped = result.hidden && ends.num_taps;
  const StateRows states{in.starts, in.state_blocks, nullptr, count, tokens,
                         step.tables.num_state_blocks, 0};
  const DecoderBatch batch{tokens,    in.positions, group,   groups, in.seq_lens,
                           in.starts, count,        nullptr, -1,     adapters,
                           num_adapters, ends.taps, tapped ? ends.num_taps : 0, result.hidden,
                           step.tables.state_blocks ? &states : nullptr, in.num_computed};
  // If a step fails, the states of some layers are ahead of others.
  const auto set_state_tokens = [&](bool done) {
    for (int64_t i = 0; step.tables.state_blocks && i < count; i++)
      step.tables.state_tokens[in.state_blocks[i]] = done ? in.num_computed[i] + 1 : -1;
  };
  set_state_tokens(false);
  if (!wrong) wrong = run_decoder(*ends.decoder, batch, residual, x, threads);
  if (!wrong) set_state_tokens(true);
  if (!wrong) wrong = linear(*ends.head, logits, x, hidden, tokens, kF32, threads);
  if (wrong) return wrong;
  if (result.hidden && !tapped) std::copy(x, x + tokens * hidden, result.hidden);
  scale(logits, tokens * vocab, ends.logit_scale);
  if (chosen) std::copy(logits + drawn * vocab, logits + tokens * vocab, result.open);
  if (chosen && !how) wrong = choose_likeliest(result.out, logits, drawn, vocab, threads);
  if (chosen && how) {
    const Sampling sampling = settings.fill(step.tables, all, chosen, *how);
    std::vector<Odd> odd = odd_tokens(step.tables, all, chosen, how->edits);
    std::vector<float> raw;
    wrong = edit(odd, logits, vocab, raw, threads);
    if (!wrong) wrong = choose_sampled(result.out, logits, drawn, vocab, sampling, threads);
    if (!wrong) wrong = tell(odd, vocab, result, threads);
  }
  if (!wrong) advance(step.tables, all, chosen, result.out, result.got);
  return wrong;
}

}  // namespace
}  // namespace quire

extern "C" void* quire_step_new(const StepEnds* ends, const StepTables* tables) {
  return new (std::nothrow) Step(*ends, *tables);
}

extern "C" void quire_step_free(void* step) { delete static_cast<Step*>(step); }

// Row i has drafts[i] drafts after its newest token; null drafts for none. For each of its tokens
// result.out receives the next one, or -1 for broken logits (NaN, or no finite maximum); null choice
// for the most likely ones. Drafts that equal the next token are accepted, and counts advance by
// those plus one. For the rows after the first `chosen`, result.open receives the logits of each
// token, and only num_computed advances. result.hidden receives the output layer's inputs of all
// tokens, or the inputs of the taps' layers.
extern "C" int quire_step_run(const void* step, const int64_t* rows, const int64_t* drafts,
                              int64_t count, int64_t chosen, const StepChoice* choice,
                              const StepResult* result, const LoraGroup* adapters,
                              int64_t num_adapters, int threads) {
  return guarded([&] {
    return run_step(*static_cast<const Step*>(step), Rows{rows, drafts, count}, chosen, choice,
                    *result, adapters, num_adapters, threads);
  });
}
