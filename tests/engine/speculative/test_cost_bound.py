"""What drafts may cost is bounded by construction, whatever holds and whatever anything takes.

Time is simulated, see `simulation`: nothing here is timed.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.speculative.simulation import Follows, Simulation, line

#: What may be lost for good: so many tokens a row, so many prompts that a head follows, and a part
#: of all the time.
_CREDIT, _READINGS, _SHARE = 5.0, 3.0, 0.02

_ROWS = st.sampled_from([1, 2, 8, 16])
#: Of each stretch of steps: how many, and how often drafts hold.
_TEXTS = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])),
    min_size=1,
    max_size=6,
)
_SLOPES = st.lists(st.floats(0.0, 0.4), min_size=5, max_size=5)
#: As parts of a step of one row: a draft of a row, and what each row more takes; a look; of a head
#: what following a row takes, a prompt, and following that.
_PARTS = st.tuples(
    st.floats(0.001, 0.6),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.005),
    st.floats(0.0, 0.1),
    st.floats(0.1, 20.0),
    st.floats(0.0, 0.2),
)
_LENGTHS = st.sampled_from([(2, 6), (8, 14), (20, 60), (200, 400)])


@settings(deadline=None, max_examples=30, derandomize=True)
@given(_ROWS, _TEXTS, _SLOPES, _PARTS, _LENGTHS, st.integers(0, 3), st.booleans())
def test_no_text_and_no_machine_makes_drafts_cost_more_than_credit_and_share(
    rows: int,
    texts: list[tuple[int, float]],
    slopes: list[float],
    parts: tuple[float, ...],
    lengths: tuple[int, int],
    seed: int,
    follows: bool,
) -> None:
    points, seconds, width = [(1, 1.0)], 1.0, 1
    for slope, wider in zip(slopes, (2, 5, 16, 32, 64), strict=True):
        seconds += slope * (wider - width)
        width = wider
        points.append((wider, seconds))
    cost = line(*points)
    stretches = [p for count, p in texts for _ in range(count)]
    draw, row, lookup_s, follow, prompt, more = parts
    head = Follows(follow, prompt, more * prompt) if follows else None
    simulation = Simulation(
        cost, rows, lambda step, _: stretches[step % len(stretches)],
        draft=lambda n: draw + row * (n - 1), lookup_s=lookup_s, lengths=lengths, seed=seed,
        follows=head,
    )  # fmt: skip
    rng, token = random.Random(seed), cost(rows) / rows
    lost, of, reading = 0.0, 0.0, more * prompt / token if follows else 0.0
    for _ in range(4):
        spent = simulation.run(rng.randint(10, 60))
        lost += (spent.seconds - spent.baseline_s) / token
        of += spent.baseline_s / token
        assert lost <= _CREDIT * rows + _READINGS * reading + _SHARE * of, (lost, of, reading)
