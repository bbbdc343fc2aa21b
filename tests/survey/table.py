"""docs/models.md from results."""

from __future__ import annotations

from collections.abc import Callable

from tests.survey.architectures import EXPECTED
from tests.survey.run import CUT, LENGTHS, OUTPUT, TOLERANCE, Result, refusal

_HEAD = """# Models

A checkpoint runs in one of three ways:

1. **The native decoder**, one implementation for the mainstream families: a `DecoderSpec` says
   which norms, projections, rotary embedding, windows, biases and experts a family has, and a
   family is a small function from `config.json` to such a description
   (`engine/models/families/`). A setting that the decoder doesn't support is refused by name when
   the model loads, never ignored.
2. **The Transformers bridge**, any other causal language model of `transformers` whose attention
   goes through its attention interface ([below](#the-transformers-bridge)).
3. **A class from outside** ([below](#a-model-from-outside)).

`--model-impl quire` insists on the native decoder, `--model-impl transformers` on the bridge;
`auto`, the default, takes a registered class, else the native decoder, else the bridge.
`--hf-overrides` takes JSON that overrides config.json; `--rope-scaling` and `--rope-theta` replace
the rotary embedding's (where layers rotate in different ways, that of full attention).

The tables on this page are written by a command from the results of its run:

```
python -m tests.survey
```

For each recipe (`tests/survey/`) it makes a tiny random float32 checkpoint with
`transformers` {version}, runs {count} prompts of {shortest} to {longest} tokens together through
the engine with chunked prefill, and compares {output} greedy tokens of each, and the log
probabilities of the longest prompt, with `transformers`. A recipe passes when all tokens are equal
and no log probability is off by more than {tolerance:g}; its largest difference is given.

**One result** says whether a position's logits are the same to the bit however they are computed:
{cut} positions behind the longest prompt are decoded one by one, and then computed again in chunks
of several sizes, beside other sequences, from the prefix cache and by two threads. If it says
"no", a sequence that is preempted or resumed may continue with another text.

If `transformers` has no class for an architecture, the model is made by one that computes the
same (`foreign.py`), and its tensors and config.json are rewritten the way the architecture's
published checkpoints have them; if there is none either, the reference is written in plain torch
(`published.py`: Arctic, Baichuan 2 13B, DeciLM, Jais, Phi-3 small).

Random weights test the arithmetic, not the quality of a model. Tensors go by the names that
`save_pretrained` writes; a prefix that older checkpoints leave out may be missing. Weights are read
from safetensors or [another format](load-formats.md).

## Expected architectures

{passed} of {total} pass.

| architecture | models | runs on | result | one result |
|---|---|---|---|---|
"""
_NATIVE = """
## Further native architectures

| architecture | recipe | result | one result |
|---|---|---|---|
"""
_BRIDGED = """
## Through the Transformers bridge

Architectures that the native decoder doesn't have, or with settings that it doesn't support.

| architecture | recipe | result | one result |
|---|---|---|---|
"""
_CROSS = """
Native ones, run by the bridge for comparison (`--model-impl transformers`):

| architecture | recipe | result | one result |
|---|---|---|---|
"""
_REFUSED = """
## Refused

What the bridge can't serve says why when it loads.

| architecture | recipe | result | one result |
|---|---|---|---|
"""
_NOTES = """
## Notes

- **LongRoPE** (Phi-3) and **dynamic** scaling choose their factors once, by `max_model_len`, not by
  each request's length: a cached key must not change when its sequence grows.
- **Falcon with ALiBi**: `transformers` rounds slope times position to bfloat16, which shows beyond
  256 tokens; the engine computes it in float32.
- What the native decoder doesn't do of a family, `auto` gives to the bridge: OPT-350m (norms after
  the blocks, projected embedding), GPT-2 with scores scaled by layer, GLM-4.5 with groups of
  experts, DeepSeek V2 whose experts' weights are brought to sum 1; and on a GPU Granite 4 and
  Qwen3-Next, which are natively a CPU's.
- **Granite 4, Qwen3-Next**: a sequence's state (Mamba 2, gated delta rule) is float32, a row for
  each sequence that runs, beside the keys and values of the layers that attend. It's in no block:
  prefixes aren't cached, a preempted sequence starts anew, drafts are refused. As many sequences
  run at once as a quarter of the free memory holds states of. Layers run one by one. Random models
  of both (float32, hidden size 512, 8 layers, one thread) take 0.62 and 0.55 of the bridge's
  processor time for a prompt of 512 tokens, 0.37 and 0.36 for a token of one stream, 0.22 and 0.34
  for one of eight.
- **DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7 Flash, MiniCPM 3, Youtu**, whose attention is over
  latents: a token keeps one latent a layer and what is rotated beside it, and no keys and
  values (of V2 Lite 31 KB in bfloat16, by the bridge 332 KB). What makes them of latents
  (`kv_b_proj`) is taken into queries and results, for prompts too; it is kept in the model's dtype
  whatever the checkpoint or `--quantization` has, and adapters of it are refused. Layers run one by
  one. A random model of V2 Lite's shape (float32, 131 M parameters, 8 layers, one thread) takes
  0.94 of the bridge's processor time for a prompt of 512 tokens, 0.62 for a token of one stream,
  0.51 for one of eight.
- **OLMo 3**: an older config.json has one rotary base, which windowed layers have too; its scaling
  is that of full attention alone.
- **gpt-oss**: plain weights, and the published MXFP4 checkpoints.
- **Phi-3 small**: on a CPU. Blocks that a query doesn't see are masked, not skipped, so that its
  block-sparse layers cost what dense ones do. Tokens that its tokenizer never means never come. The
  tokenizer is code that comes with the checkpoint.
- **DeciLM**: layers with fewer KV heads keep each as often as the layer with the most has them.

## The Transformers bridge

`transformers` lets a registered function stand in for a model's attention. Ours
(`engine/transformers_backend/`) writes the step's keys and values to the paged cache and attends
over it
with the same kernels as the native decoder, so prefix caching, chunked prefill, batching, KV cache
groups for sliding windows, preemption and sampling are the engine's own. All tokens of a step go
through the model as one sequence without padding; linear layers are packed by the kernels.

At load a model is

1. **explored**: one pass over 8 tokens finds its attention calls (heads, sizes, in order) and asks
   the model's own mask functions, for whole rows of a context of `max_model_len` tokens, which
   window each layer has. A mask that is neither causal nor a window (chunks shorter than the
   context, say) is refused;
2. **proven**: a few short texts go through the model's own attention, and then together and in
   pieces through the paged one. Logits that differ, for whatever reason, refuse the model.

Both cost passes over some 60 tokens.

Models that carry a **state** from token to token (state-space layers, linear attention, short
convolutions) keep it by sequence, beside the pages of their attention layers. For these a step is
one pass for each prompt and one for all sequences that decode; a state is no block, so prefixes
aren't cached, and a preempted sequence starts anew. Where `transformers` can't continue a state by
several tokens at once (Mamba 1, Jamba), chunks after the first go token by token.

`--quantization` rounds linear layers and tables as it does natively.

Limits: the bridge runs on the CPU, with float32 activations (linear layers keep the checkpoint's
dtype; norms, biases and experts that are fused into one tensor become float32); values shorter than
keys (MLA) are padded in the cache; attention that chooses tokens (sparse indexers), biases its
scores (T5-like, ALiBi outside of the native families) or sees other inputs (images, encoders) is
refused. Code that a model folder brings runs only with `--trust-remote-code`.

## A model from outside

```python
from engine import ModelRegistry

ModelRegistry.register_model("MineForCausalLM", "my_package.model:MineForCausalLM")
```

takes a class or, to import it only when a checkpoint asks for it, `"package.module:Class"`. The
class is either a `transformers.PreTrainedModel` whose attention goes through the attention
interface, and then it runs through the bridge; or it keeps to `engine.models.interface`:
`make_spec(config)` gives the facts that the engine plans with, then it's made with `(spec, ops,
weight_dtype, max_model_len)`, and `load`, `allocate_kv`, `forward(token_ids, context)` and `logits`
are called. Subclasses of `NativeDecoder` have all but `make_spec`. A known architecture is taken
over, with a warning.

An installed package registers by entry points: group `quire.models` maps architectures to such
strings; a function in group `quire.general_plugins` is called once before a model is loaded.
`QUIRE_PLUGINS` names those wanted, with commas between; empty means none.

A new family of the native decoder is a function from config.json (older names resolved, defaults
filled in) to the fields of `DecoderSpec` that aren't common to all:

```python
from engine.models.registry import register_decoder

register_decoder("MineForCausalLM", lambda config: {"qk_norm": "rms_head"}, {"head_dim": 128})
```
"""

#: After the names of recipes that run by the bridge although they needn't.
CROSS_SUFFIX = " (bridge)"


def page(results: dict[str, Result], version: str) -> str:
    """The whole page."""
    rows = [_expected_row(name, results) for name in EXPECTED]
    head = _HEAD.format(
        version=version,
        count=len(LENGTHS),
        shortest=min(LENGTHS),
        longest=max(LENGTHS),
        output=OUTPUT,
        cut=CUT,
        tolerance=TOLERANCE,
        passed=sum(_passes(name, results) for name in EXPECTED),
        total=len(EXPECTED),
    )
    parts = [head, *rows]
    others = {n: r for n, r in results.items() if r.architecture not in EXPECTED or _crossed(n)}
    for title, wanted in _SECTIONS:
        found = {name: result for name, result in others.items() if wanted(name, result)}
        parts += [title, *(_row(name, result) for name, result in found.items())]
    return "".join(parts) + _NOTES


def _crossed(name: str) -> bool:
    return name.endswith(CROSS_SUFFIX)


_SECTIONS: tuple[tuple[str, Callable[[str, Result], bool]], ...] = (
    (_NATIVE, lambda name, r: r.runner == "native"),
    (_BRIDGED, lambda name, r: r.runner == "bridge" and not _crossed(name)),
    (_CROSS, lambda name, r: r.runner == "bridge" and _crossed(name)),
    (_REFUSED, lambda name, r: not r.runner),
)


def _row(name: str, result: Result) -> str:
    recipe = name.removesuffix(CROSS_SUFFIX)
    return f"| {result.architecture} | {recipe} | {result.text} | {result.one_result} |\n"


def _of(architecture: str, results: dict[str, Result]) -> dict[str, Result]:
    """Results of one architecture's recipes."""
    return {
        name: result
        for name, result in results.items()
        if result.architecture == architecture and not _crossed(name)
    }


def _passes(architecture: str, results: dict[str, Result]) -> bool:
    found = _of(architecture, results)
    return bool(found) and all(result.passed for result in found.values())


def _expected_row(architecture: str, results: dict[str, Result]) -> str:
    models, reason = EXPECTED[architecture]
    found = _of(architecture, results)
    cells = [f"{name}: {result.text}" for name, result in found.items()]
    if not cells:
        cells = [f"refused: {refusal(architecture)} ({reason})"]
    runners = sorted({result.runner for result in found.values()} - {""})
    runs_on = ", ".join(runners) or "-"
    bits = "<br>".join(result.one_result for result in found.values()) or "-"
    return f"| {architecture} | {models} | {runs_on} | {'<br>'.join(cells)} | {bits} |\n"
