"""docs/models.md from results."""

from __future__ import annotations

from engine.models.survey.architectures import EXPECTED
from engine.models.survey.run import LENGTHS, OUTPUT, TOLERANCE, Result, refusal

_HEAD = """# Models

One native decoder serves every architecture below. Its wiring is data: a `DecoderSpec` says which
norms, projections, rotary embedding, windows, biases and experts a family has, and a family is a
small function from `config.json` to that data (`engine/models/families/`). A setting that a family
has and the decoder doesn't do is refused by name when the model loads, never ignored.

This page is written by a command, and each result in it comes from a run:

```
python -m engine.models.survey
```

For each recipe (`engine/models/survey/recipes.py`) it makes a tiny random float32 checkpoint with
`transformers` {version}, runs {count} prompts of {shortest} to {longest} tokens together through
the engine with chunked prefill, and compares {output} greedy tokens of each, and the log
probabilities of the longest prompt, with `transformers`. A recipe passes when all tokens are equal
and no log probability is off by more than {tolerance:g}; its largest difference is given.

Where `transformers` has no class of an architecture, the model is made by one that computes the
same (`engine/models/survey/foreign.py`), and its tensors and config.json are rewritten the way the
architecture's published checkpoints have them.

Random weights prove the arithmetic, not how well a model does. Tensors go by the names that
`save_pretrained` writes; a prefix that older checkpoints leave out may be missing. Weights must be
safetensors and not quantised.

## Expected architectures

{passed} of {total} pass.

| architecture | models | result |
|---|---|---|
"""
_FURTHER = """
## Further architectures

| architecture | recipe | result |
|---|---|---|
"""
_NOTES = """
## Notes

- **LongRoPE** (Phi-3) and **dynamic** scaling choose their factors once, by `max_model_len`, not by
  each request's length: a cached key must not change when its sequence grows.
- **Falcon with ALiBi**: `transformers` rounds slope times position to bfloat16, which shows beyond
  256 tokens; the engine computes it in float32.
- **OPT-350m** (norms after the blocks, projected embedding) is refused.
- **gpt-oss**: unpacked weights only; the published MXFP4 checkpoints are refused as quantised.
- Sliding windows are kept by masking: blocks outside a window are not freed yet.

## An architecture from outside

```python
from engine.models.registry import register_decoder

register_decoder("MineForCausalLM", lambda config: {"qk_norm": "rms_head"}, {"head_dim": 128})
```

The function gets config.json with older names resolved and the defaults filled in, and returns the
fields of `DecoderSpec` that aren't common to all families.
"""


def page(results: dict[str, Result], version: str) -> str:
    """The whole page."""
    rows = [_expected_row(name, results) for name in EXPECTED]
    head = _HEAD.format(
        version=version,
        count=len(LENGTHS),
        shortest=min(LENGTHS),
        longest=max(LENGTHS),
        output=OUTPUT,
        tolerance=TOLERANCE,
        passed=sum(_passes(name, results) for name in EXPECTED),
        total=len(EXPECTED),
    )
    further = [
        f"| {result.architecture} | {recipe} | {result.text} |\n"
        for recipe, result in results.items()
        if result.architecture not in EXPECTED
    ]
    return head + "".join(rows) + _FURTHER + "".join(further) + _NOTES


def _of(architecture: str, results: dict[str, Result]) -> dict[str, Result]:
    """Results of one architecture's recipes."""
    return {name: r for name, r in results.items() if r.architecture == architecture}


def _passes(architecture: str, results: dict[str, Result]) -> bool:
    found = _of(architecture, results)
    return bool(found) and all(result.passed for result in found.values())


def _expected_row(architecture: str, results: dict[str, Result]) -> str:
    models, reason = EXPECTED[architecture]
    found = _of(architecture, results)
    cells = [f"{name}: {result.text}" for name, result in found.items()]
    if not cells:
        cells = [f"refused: {refusal(architecture)} ({reason})"]
    return f"| {architecture} | {models} | {'<br>'.join(cells)} |\n"
