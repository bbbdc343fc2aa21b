"""docs/features.md, made from a run of the matrix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.features.matrix import NAMES, PAIRS, Outcome

PATH = Path(__file__).parents[2] / "docs" / "features.md"
HEAD = """\
# Features together

Pairs break, not features. Here is every one with every other, made by a run of tests:

```
python -m tests.features --write
```

Six requests (prompts of 18 to 60 tokens, two greedy, four drawn with seeds, every second one asking
for the feature) go through engines over tiny random models. A ✓ means:

- Features that only change how a result comes about (prefix cache, chunks, preemption, failover,
  sleep, async scheduling, several replicas, speculation, draft model, heads) were seen at work,
  and tokens, log probabilities, vectors and finish reasons are those of a run without them, *to the
  bit*; where a model keeps a state, in words.
- Of the others the law in [laws.py](../tests/features/laws.py) holds: answers follow their schema;
  calls are the same from deltas as from the whole text; reasoning is closed by its budget; log
  probabilities are those that the same tokens have in a prompt; each of `n` outputs is what a
  request of its own gets; beams have the model's own scores; a cap holds to the token; an adapter
  says what the merged model says, and its neighbours what the base says; the bridge says what the
  native decoder says; models, formats and caches give a request what it gets alone.

A number is why two can't be had together, in the product's own words. Tests hold each cell against
this page.

Failover and several replicas are engines in one process here, one of which is lost with its
streams; `manage.py chaos --kills 40` kills processes. Quantised weights and narrow caches are
int8, windows stand in every second layer, states are LFM2's, the bridge runs Llama, pooling makes
vectors of Llama. Speculation's drafts are those of a source that mostly knows what comes; the draft
model is the model itself with slightly other weights, and heads are EAGLE's, trained on what the
requests get.

"""


def text(outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """The whole page."""
    reasons = dict.fromkeys(outcomes[pair].reason for pair in PAIRS if outcomes[pair].reason)
    numbers = {reason: str(number) for number, reason in enumerate(reasons, 1)}
    lines = [_row("", NAMES[:-1]), _row("---", ["---"] * (len(NAMES) - 1))]
    for place, name in enumerate(NAMES[1:], 1):
        cells = [numbers.get(outcomes[other, name].reason, "✓") for other in NAMES[:place]]
        lines.append(_row(name, cells + [""] * (len(NAMES) - 1 - place)))
    notes = [f"{number}. {reason}" for reason, number in numbers.items()]
    return HEAD + "\n".join([*lines, "", *notes]) + "\n"


def _row(first: str, cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join([first, *cells]) + " |"


def stated(page: str) -> dict[tuple[str, str], Outcome]:
    """What a page says of each pair. Raises KeyError for one that says nothing of some."""
    reasons = dict(re.findall(r"^(\d+)\. (.+)$", page, re.MULTILINE))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith("| ---")
    ]
    columns = rows[0][1:]
    said = {
        (column, row[0]): Outcome("" if cell == "✓" else reasons[cell])
        for row in rows[1:]
        for column, cell in zip(columns, row[1:], strict=True)
        if cell
    }
    return {pair: said[pair] for pair in PAIRS}
