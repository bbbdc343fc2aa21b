"""docs/features.md, made from a run of the matrix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.features.matrix import NAMES, PAIRS, Outcome

PATH = Path(__file__).parents[2] / "docs" / "features.md"
HEAD = """\
# Features together

Which features can be combined: every one with every other. A ✓ says that the two work together; a
number leads to the reason why they can't be combined, which is the product's own error message. The
page is written by a run of tests, and tests check each cell against it:

```
python -m tests.features --write
```

Six requests (prompts of 18 to 60 tokens, two greedy, four sampled with seeds, every second one with
the feature) go through engines with tiny random models. A ✓ means:

- Features that only change how a result is computed (prefix cache, chunks, preemption, failover,
  sleep, async scheduling, several replicas, speculation, draft model, heads) were used in the run,
  and tokens, log probabilities, vectors and finish reasons are those of a run without them, *to the
  bit*; if the model keeps a state, the tokens are.
- Each of the others keeps its rule in [laws.py](../tests/features/laws.py): answers follow their
  schema; tool calls are the same from deltas as from the whole text; reasoning ends at its budget;
  log probabilities are those that the same tokens have in a prompt; each of `n` outputs is what a
  request of its own gets; beams have the model's own scores; a cap holds to the token; a request
  with an adapter gets what the merged model gives, and one beside it without what the base gives;
  the bridge gives what the native decoder gives; models, formats and caches give a request what it
  gets alone.

How each is tested: failover and several replicas are engines in one process, one of which is lost
with its streams (`manage.py chaos --kills 40` kills processes). Quantised weights and narrow caches
are int8. Windows are in every second layer, states are LFM2's, the bridge runs Llama, pooling
takes vectors from Llama. Speculation's drafts are mostly right; the draft model is the model itself
with slightly different weights; heads are EAGLE's, trained on the requests' outputs.

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
