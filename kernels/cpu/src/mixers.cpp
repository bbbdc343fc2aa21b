// The kinds of layers with a recurrent state: engine/models/layers/mamba.py has the same layers as
// separate operations, with the same bits.
#include "mixers.h"

namespace quire {
namespace {

int64_t values_of(const StateLayer& s) { return s.heads * s.value_size; }
int64_t keys_of(const StateLayer& s) { return s.key_heads * s.key_size; }

// Clears the states of sequences at their first token.
void clear_states(const StateLayer& s, const MixerCall& call) {
  const int64_t conv = (s.width - 1) * s.channels, vectors = values_of(s);
  const int64_t scan = vectors * s.key_size * static_cast<int64_t>(size_of(s.states_dtype));
  for (int64_t i = 0; call.num_computed && i < call.of.num_seqs; i++) {
    if (call.num_computed[i]) continue;
    const int64_t block = call.of.rows[i];
    std::memset(s.conv_states + block * conv, 0, conv * sizeof(float));
    std::memset(static_cast<char*>(s.scan_states) + block * scan, 0, scan);
    if (s.scan_scales) std::memset(s.scan_scales + block * vectors, 0, vectors * sizeof(float));
  }
}

// The inner distance of a buffer is its width.
int multiply(const MixerCall& call, const LoraLinear* LoraLayer::* slot, const Packed& w,
             float* out, const float* x) {
  return adapted_linear(call.adapters, slot, w, out, x, w.k, 0, call.of.tokens, call.threads);
}

int project(const StateLayer& s, const MixerCall& call, float* out) {
  return multiply(call, &LoraLayer::state_in, *s.inputs, out, call.x);
}

int finish(const StateLayer& s, const MixerCall& call, const float* x) {
  // Of ranks each has some of the output's inputs.
  return adapted_linear(call.adapters, &LoraLayer::state_out, *s.output, call.out, x, values_of(s), 0,
                        call.of.tokens, call.threads);
}

// Copies `width` columns of each token.
void copy_columns(const MixerCall& call, float* out, int64_t out_stride, const float* x,
                  int64_t stride, int64_t width) {
  for (int64_t t = 0; t < call.of.tokens; t++)
    std::memcpy(out + t * out_stride, x + t * stride, width * sizeof(float));
}

int convolve(const StateLayer& s, const MixerCall& call, float* out, const float* x, int64_t stride,
             bool silu) {
  CausalConv c{};
  c.out = out, c.x = x, c.stride = stride;
  c.channels = s.channels, c.width = s.width, c.states = s.conv_states;
  c.weight = s.conv, c.bias = s.conv_bias, c.silu = silu, c.of = call.of;
  return causal_conv(c, call.threads);
}

// A scan of this layer; the caller adds the inputs.
LinearScan scan_of(const StateLayer& s, const MixerCall& call, float* out) {
  LinearScan l{};
  l.out = out;
  l.decay = s.decay, l.rate_bias = s.rate_bias, l.skip = s.skip;
  l.states = s.scan_states, l.state_scales = s.scan_scales, l.states_dtype = s.states_dtype;
  l.heads = s.heads, l.key_heads = s.key_heads;
  l.value_size = s.value_size, l.key_size = s.key_size;
  l.least_rate = s.least_rate, l.most_rate = s.most_rate;
  l.of = call.of;
  return l;
}

// Norms each key head separately.
void norm_by_key_head(const StateLayer& s, const MixerCall& call, float* x) {
  if (!s.norm) return;
  const int64_t tokens = call.of.tokens, values = values_of(s), size = values / s.key_heads;
  if (s.key_heads == 1) return rms_norm(x, x, s.norm, tokens, values, s.eps, call.threads);
  const int team = worth(call.threads, tokens * values, 16384);
  deal_ranges(team, tokens, 1, [&](int64_t low, int64_t high) {
    for (int64_t t = low; t < high; t++)
      for (int64_t i = 0; i < values; i += size)
        rms_norm(x + t * values + i, x + t * values + i, s.norm + i, 1, size, s.eps, 1);
  });
}

// Inputs: gate, values, keys, queries, rates.
int mamba2(const StateLayer& s, const MixerCall& call) {
  const int64_t tokens = call.of.tokens, width = s.inputs->outputs();
  const int64_t values = values_of(s), keys = keys_of(s);
  float *projected, *convolved, *scanned;
  Layout layout;
  layout.add(&projected, tokens * width);
  layout.add(&convolved, tokens * s.channels);
  layout.add(&scanned, tokens * values);
  layout.take(Scratch::kMixer);
  if (const int wrong = project(s, call, projected)) return wrong;
  for (int64_t t = 0; s.input_scales && t < tokens; t++)
    for_lanes(width, [&](int64_t i, int n) {
      float* at = projected + t * width + i;
      vstore_some(at, vload_some(at, n) * vload_some(s.input_scales + i, n), n);
    });
  if (const int wrong = convolve(s, call, convolved, projected + values, width, true)) return wrong;
  LinearScan l = scan_of(s, call, scanned);
  l.v = convolved, l.k = convolved + values, l.q = convolved + values + keys;
  l.q_stride = l.k_stride = l.v_stride = s.channels;
  l.rate = projected + values + s.channels, l.rate_stride = width;
  if (const int wrong = linear_scan(l, call.threads)) return wrong;
  if (s.norm_before_gate) norm_by_key_head(s, call, scanned);
  gate_rows<kSilu>(scanned, values, projected, width, scanned, tokens, values, call.threads);
  if (!s.norm_before_gate) norm_by_key_head(s, call, scanned);
  return finish(s, call, scanned);
}

// Inputs: values and gate. The convolution's result selects the inputs of `rates`, keys, queries.
int mamba1(const StateLayer& s, const MixerCall& call) {
  const int64_t tokens = call.of.tokens, values = values_of(s), size = s.key_size;
  const int64_t rank = s.rates->k, width = rank + 2 * size;
  float *projected, *convolved, *selected, *low, *keys, *queries, *rates, *scanned;
  Layout layout;
  layout.add(&projected, tokens * 2 * values);
  layout.add(&convolved, tokens * values);
  layout.add(&selected, tokens * width);
  layout.add(&low, tokens * rank);
  layout.add(&keys, tokens * size);
  layout.add(&queries, tokens * size);
  layout.add(&rates, tokens * values);
  layout.add(&scanned, tokens * values);
  layout.take(Scratch::kMixer);
  if (const int wrong = project(s, call, projected)) return wrong;
  if (const int wrong = convolve(s, call, convolved, projected, 2 * values, true)) return wrong;
  int wrong = multiply(call, &LoraLayer::state_selection, *s.selection, selected, convolved);
  if (wrong) return wrong;
  copy_columns(call, low, rank, selected, width, rank);
  copy_columns(call, keys, size, selected + rank, width, size);
  copy_columns(call, queries, size, selected + rank + size, width, size);
  norm(s.rates_norm, low, low, tokens, rank, s.eps, call.threads);
  norm(s.key_norm, keys, keys, tokens, size, s.eps, call.threads);
  norm(s.query_norm, queries, queries, tokens, size, s.eps, call.threads);
  wrong = multiply(call, &LoraLayer::state_rates, *s.rates, rates, low);
  if (wrong) return wrong;
  LinearScan l = scan_of(s, call, scanned);
  l.v = convolved, l.k = keys, l.q = queries, l.rate = rates;
  l.v_stride = l.rate_stride = values, l.k_stride = l.q_stride = size;
  l.decay_by_key = 1;
  if ((wrong = linear_scan(l, call.threads))) return wrong;
  gate_rows<kSilu>(scanned, values, projected + values, 2 * values, scanned, tokens, values,
                   call.threads);
  return finish(s, call, scanned);
}

// Inputs by key head: query, key, values and gates of its heads; `rates`: their betas and rates.
int delta(const StateLayer& s, const MixerCall& call) {
  const int64_t tokens = call.of.tokens, values = values_of(s), keys = keys_of(s);
  const int64_t size = s.key_size, shared = s.heads / s.key_heads, wide = shared * s.value_size;
  const int64_t width = s.inputs->outputs(), head = width / s.key_heads;
  float *projected, *mixed, *gates, *by_head, *betas, *rates, *convolved, *scanned;
  Layout layout;
  layout.add(&projected, tokens * width);
  layout.add(&mixed, tokens * s.channels);
  layout.add(&gates, tokens * values);
  layout.add(&by_head, tokens * 2 * s.heads);
  layout.add(&betas, tokens * s.heads);
  layout.add(&rates, tokens * s.heads);
  layout.add(&convolved, tokens * s.channels);
  layout.add(&scanned, tokens * values);
  layout.take(Scratch::kMixer);
  if (const int wrong = project(s, call, projected)) return wrong;
  int wrong = multiply(call, &LoraLayer::state_rates, *s.rates, by_head, call.x);
  if (wrong) return wrong;
  for (int64_t h = 0; h < s.key_heads; h++) {
    const float *from = projected + h * head, *pair = by_head + h * 2 * shared;
    copy_columns(call, mixed + h * size, s.channels, from, width, size);
    copy_columns(call, mixed + keys + h * size, s.channels, from + size, width, size);
    copy_columns(call, mixed + 2 * keys + h * wide, s.channels, from + 2 * size, width, wide);
    copy_columns(call, gates + h * wide, values, from + 2 * size + wide, width, wide);
    copy_columns(call, betas + h * shared, s.heads, pair, 2 * s.heads, shared);
    copy_columns(call, rates + h * shared, s.heads, pair + shared, 2 * s.heads, shared);
  }
  if ((wrong = convolve(s, call, convolved, mixed, s.channels, true))) return wrong;
  LinearScan l = scan_of(s, call, scanned);
  l.q = convolved, l.k = convolved + keys, l.v = convolved + 2 * keys;
  l.q_stride = l.k_stride = l.v_stride = s.channels;
  l.rate = rates, l.beta = betas, l.rate_stride = l.beta_stride = s.heads;
  l.delta = 1;
  if ((wrong = linear_scan(l, call.threads))) return wrong;
  rms_norm(scanned, scanned, s.norm, tokens * s.heads, s.value_size, s.eps, call.threads);
  gate_rows<kSilu>(scanned, values, gates, values, scanned, tokens, values, call.threads);
  return finish(s, call, scanned);
}

// Inputs: the gates before and after the convolution, and its inputs.
int short_conv(const StateLayer& s, const MixerCall& call) {
  const int64_t tokens = call.of.tokens, values = s.channels;
  float *projected, *convolved;
  Layout layout;
  layout.add(&projected, tokens * 3 * values);
  layout.add(&convolved, tokens * values);
  layout.take(Scratch::kMixer);
  if (const int wrong = project(s, call, projected)) return wrong;
  const auto times = [&](float* x, int64_t stride, const float* by) {
    const int team = worth(call.threads, tokens * values, 16384);
    deal_ranges(team, tokens, 1, [&](int64_t low, int64_t high) {
      for (int64_t t = low; t < high; t++)
        for_lanes(values, [&](int64_t i, int n) {
          float* at = x + t * stride + i;
          vstore_some(at, vload_some(at, n) * vload_some(by + t * 3 * values + i, n), n);
        });
    });
  };
  times(projected + 2 * values, 3 * values, projected);
  const float* inputs = projected + 2 * values;
  if (const int wrong = convolve(s, call, convolved, inputs, 3 * values, false)) return wrong;
  times(convolved, values, projected + values);
  return finish(s, call, convolved);
}

// Inputs: by head query, key and value, then the gates. All rates are 1 by their limits.
int lightning(const StateLayer& s, const MixerCall& call) {
  const int64_t tokens = call.of.tokens, values = values_of(s), size = s.value_size;
  const int64_t width = s.inputs->outputs();
  float *projected, *convolved, *queries, *keys, *mixed, *rates, *scanned;
  Layout layout;
  layout.add(&projected, tokens * width);
  layout.add(&convolved, tokens * s.channels);
  layout.add(&queries, tokens * values);
  layout.add(&keys, tokens * values);
  layout.add(&mixed, tokens * values);
  layout.add(&rates, s.heads);
  layout.add(&scanned, tokens * values);
  layout.take(Scratch::kMixer);
  if (const int wrong = project(s, call, projected)) return wrong;
  if (const int wrong = convolve(s, call, convolved, projected, width, true)) return wrong;
  for (int64_t h = 0; h < s.heads; h++) {
    const float* from = convolved + 3 * h * size;
    copy_columns(call, queries + h * size, values, from, s.channels, size);
    copy_columns(call, keys + h * size, values, from + size, s.channels, size);
    copy_columns(call, mixed + h * size, values, from + 2 * size, s.channels, size);
  }
  std::fill(rates, rates + s.heads, 0.0f);
  LinearScan l = scan_of(s, call, scanned);
  l.q = queries, l.k = keys, l.v = mixed, l.rate = rates;
  l.q_stride = l.k_stride = l.v_stride = values;
  if (const int wrong = linear_scan(l, call.threads)) return wrong;
  rms_norm(scanned, scanned, s.norm, tokens, values, s.eps, call.threads);
  gate_rows<kSigmoid>(scanned, values, projected + s.channels, width, scanned, tokens, values,
                      call.threads);
  return finish(s, call, scanned);
}

// Inputs: queries, keys, values, the inputs of `rates` and of `gates`, betas.
int kimi_delta(const StateLayer& s, const MixerCall& call) {
  const int64_t tokens = call.of.tokens, values = values_of(s), keys = keys_of(s);
  const int64_t rank = s.rates->k, width = s.inputs->outputs();
  float *projected, *convolved, *low, *rates, *gates, *scanned;
  Layout layout;
  layout.add(&projected, tokens * width);
  layout.add(&convolved, tokens * s.channels);
  layout.add(&low, tokens * rank);
  layout.add(&rates, tokens * keys);
  layout.add(&gates, tokens * values);
  layout.add(&scanned, tokens * values);
  layout.take(Scratch::kMixer);
  if (const int wrong = project(s, call, projected)) return wrong;
  const float* inputs = projected + s.channels;
  if (const int wrong = convolve(s, call, convolved, projected, width, true)) return wrong;
  copy_columns(call, low, rank, inputs, width, rank);
  int wrong = multiply(call, &LoraLayer::state_rates, *s.rates, rates, low);
  if (wrong) return wrong;
  copy_columns(call, low, rank, inputs + rank, width, rank);
  wrong = multiply(call, &LoraLayer::state_gates, *s.gates, gates, low);
  if (wrong) return wrong;
  LinearScan l = scan_of(s, call, scanned);
  l.q = convolved, l.k = convolved + keys, l.v = convolved + 2 * keys;
  l.q_stride = l.k_stride = l.v_stride = s.channels;
  l.rate = rates, l.rate_stride = keys;
  l.beta = inputs + 2 * rank, l.beta_stride = width;
  l.delta = l.rate_by_key = 1;
  if ((wrong = linear_scan(l, call.threads))) return wrong;
  rms_norm(scanned, scanned, s.norm, tokens * s.heads, s.value_size, s.eps, call.threads);
  gate_rows<kSigmoid>(scanned, values, gates, values, scanned, tokens, values, call.threads);
  return finish(s, call, scanned);
}

// Inputs: values and gate. The convolution's result selects each head's other gates.
int rg_lru(const StateLayer& s, const MixerCall& call) {
  const int64_t tokens = call.of.tokens, values = values_of(s), size = s.value_size;
  float *projected, *convolved, *gates, *inputs, *decays, *scanned;
  Layout layout;
  layout.add(&projected, tokens * 2 * values);
  layout.add(&convolved, tokens * values);
  layout.add(&gates, tokens * 2 * values);
  layout.add(&inputs, tokens * values);
  layout.add(&decays, tokens * values);
  layout.add(&scanned, tokens * values);
  layout.take(Scratch::kMixer);
  if (const int wrong = project(s, call, projected)) return wrong;
  if (const int wrong = convolve(s, call, convolved, projected, 2 * values, false)) return wrong;
  const HeadLinears by_head{s.head_gates, s.heads, reinterpret_cast<char*>(gates),
                            reinterpret_cast<const char*>(convolved), 2 * values, 2 * size, values,
                            size, tokens, kF32};
  if (const int wrong = linear_heads(by_head, call.threads)) return wrong;
  lru_inputs({inputs, decays, convolved, gates, s.gate_biases, s.decay, call.positions, tokens,
              s.heads, size},
             call.threads);
  float* states = static_cast<float*>(s.scan_states);
  const DiagonalScan scan{scanned, inputs, decays, states, values, call.of};
  if (const int wrong = diagonal_scan(scan, call.threads)) return wrong;
  gate_rows<kGeluTanh>(scanned, values, projected + values, 2 * values, scanned, tokens, values,
                       call.threads);
  return finish(s, call, scanned);
}

using Mixer = int (*)(const StateLayer&, const MixerCall&);
constexpr Mixer kMixers[kMixerKinds] = {mamba2, mamba1, delta, short_conv, lightning,
                                           kimi_delta, rg_lru};

}  // namespace

int run_mixer(const StateLayer& s, const MixerCall& call) {
  if (call.of.num_rows != s.num_blocks) return kBadSequence;
  clear_states(s, call);
  return kMixers[s.kind](s, call);
}

}  // namespace quire
