// The C interface of decoders.
#include <algorithm>
#include <utility>

#include "decoder.h"

namespace quire {
namespace {

std::vector<KvPages> pages_of(const DecoderShape& s, const std::vector<DecoderLayer>& layers) {
  int64_t groups = 0;
  for (const DecoderLayer& layer : layers)
    if (attends(layer)) groups = std::max(groups, layer.group + 1);
  const int64_t row = s.head_size * static_cast<int64_t>(size_of(s.cache_dtype));
  std::vector<KvPages> pages;
  for (int64_t group = 0; group < groups; group++) {
    std::vector<char*> caches;
    for (const DecoderLayer& layer : layers) {
      if (!attends(layer) || layer.group != group) continue;
      caches.push_back(static_cast<char*>(layer.key_cache));
      if (layer.value_cache != layer.key_cache)
        caches.push_back(static_cast<char*>(layer.value_cache));
    }
    const int64_t size = local_tokens(s);
    pages.emplace_back(std::move(caches), s.num_blocks, size, s.kv_heads * size * row);
  }
  return pages;
}

}  // namespace
}  // namespace quire

extern "C" void* quire_decoder_new(const DecoderShape* shape, const DecoderLayer* layers,
                                   int64_t count, const Norm* final_norm) {
  try {
    std::vector<DecoderLayer> all(layers, layers + count);
    std::vector<KvPages> pages = pages_of(*shape, all);
    return new Decoder{*shape, std::move(all), *final_norm, std::move(pages)};
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

extern "C" void quire_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }

extern "C" int quire_decoder_run(const void* decoder, float* out, float* residual, int64_t tokens,
                                 const int64_t* positions, const DecoderGroup* groups,
                                 int64_t num_groups, const int32_t* seq_lens,
                                 const int32_t* starts, int64_t num_seqs,
                                 const int64_t* rows, int64_t num_rows, const LoraGroup* adapters,
                                 int64_t num_adapters, const int64_t* taps, int64_t num_taps,
                                 float* tapped, const StateRows* states, int threads) {
  const DecoderBatch batch{tokens, positions, groups,   num_groups, seq_lens,     starts, num_seqs,
                           rows,   num_rows,  adapters, num_adapters, taps, num_taps, tapped,
                           states, nullptr};
  return guarded([&] {
    return run_decoder(*static_cast<const Decoder*>(decoder), batch, residual, out, threads);
  });
}
