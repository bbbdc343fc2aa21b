"""docs/features.md, made from a run of the matrix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.features.matrix import NAMES, PAIRS, Outcome
from tools.docs.markdown import item

PATH = Path(__file__).parents[2] / "docs" / "features.md"
HEAD = """\
# Features together

A ✓ says that two features work together, a number leads to the reason why they don't, mostly the
product's own error message. Tests write this page and check each cell:

```
python -m tests.features --write
```

Six requests (prompts of 18 to 60 tokens, two greedy, four sampled with seeds, every second one with
the feature) go through engines with tiny random models. A ✓ means:

- Some features only change how a result is computed: prefix cache, chunks, preemption, failover,
  sleep, tier, disaggregated, async scheduling, several replicas, speculation, draft model, heads,
  ranks. They were used in the run, and tokens, log probabilities, vectors and finish reasons equal
  those of a run without them, *to the bit*. If the Transformers bridge keeps a state, only the
  tokens must be equal.
- Each other feature keeps its rule in [laws.py](../tests/features/laws.py). Answers follow their
  schema. Tool calls are the same from deltas as from the whole text. Reasoning ends at its budget.
  Log probabilities equal those of the same tokens in a prompt. Each of `n` outputs equals that of
  a request of its own. Beams have the model's own scores. A token cap ends the output at exactly
  that token. A request with an adapter gets what the merged model gives; one beside it without an
  adapter gets what the base gives. The bridge gives what the native decoder gives. With any model,
  weight format and cache, a request gets what it gets alone.

How each is tested: failover and several replicas are engines in one process, one of which is lost
with its streams (`manage.py chaos --kills 40` kills processes). Quantized weights and narrow caches
are int8. Every second layer has a window; the model with states is LFM2, with windows, too,
RecurrentGemma; the bridge runs Llama; pooling takes vectors from Llama; pictures are seen by LLaVA,
videos without a third of their tokens by Qwen2-VL, speech is heard by Whisper, texts are encoded by
mBART.
Speculation's drafts are mostly right; the draft model is the model itself with slightly different
weights; the heads are EAGLE's, trained on the requests' outputs. A tier is in host memory, and the
KV cache is empty between two runs. Of a disaggregated pair one engine computes the prompts (up to
the last picture, which it encodes), another loads what it made from a folder. Two ranks share a
model; context parallelism has longer blocks than these prompts, and
[tests of its own](../tests/engine/ranks/test_context_parallel.py).

"""


def text(outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """The whole page."""
    reasons = dict.fromkeys(outcomes[pair].reason for pair in PAIRS if outcomes[pair].reason)
    numbers = {reason: str(number) for number, reason in enumerate(reasons, 1)}
    lines = [_row("", NAMES[:-1]), _row("---", ["---"] * (len(NAMES) - 1))]
    for index, name in enumerate(NAMES[1:], 1):
        cells = [numbers.get(outcomes[other, name].reason, "✓") for other in NAMES[:index]]
        lines.append(_row(name, cells + [""] * (len(NAMES) - 1 - index)))
    notes = [item(reason, f"{number}.") for reason, number in numbers.items()]
    return HEAD + "\n".join([*lines, "", *notes]) + "\n"


def _row(first: str, cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join([first, *cells]) + " |"


def stated(page: str) -> dict[tuple[str, str], Outcome]:
    """What a page says of each pair. Raises KeyError for one that says nothing of some."""
    notes = re.findall(r"^(\d+)\. (.+(?:\n +.+)*)", page, re.MULTILINE)
    reasons = {number: " ".join(reason.split()) for number, reason in notes}
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith("| ---")
    ]
    columns = rows[0][1:]
    stated = {
        (column, row[0]): Outcome("" if cell == "✓" else reasons[cell])
        for row in rows[1:]
        for column, cell in zip(columns, row[1:], strict=True)
        if cell
    }
    return {pair: stated[pair] for pair in PAIRS}
