"""Drafts never cost more than they bring: whatever is said, however many say it, and on a machine
whose speed is never the same twice.

Time is simulated: see `simulation`. What counts is the time without the machine's noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from tests.engine.speculative.simulation import Cost, Follows, Simulation, Text, line

#: The least that may be left of the speed without drafts, at any load and text.
_MIN_SPEED_UP = 0.98


def computes(width: int) -> float:
    """A model whose arithmetic takes the time."""
    return 1.0 + 1.7 * width


def tiles(width: int) -> float:
    """A kernel that works on eight rows at once."""
    return 6.0 + 7.2 * -(-width // 8) + 0.25 * width


#: Models of 1.1 billion and of 70 million parameters, as measured (docs/lab.md).
BILLION = line(
    (1, 1.0), (4, 1.04), (5, 1.11), (8, 1.2), (12, 1.43), (16, 1.93), (32, 3.1), (64, 5.6)
)  # fmt: skip
MILLIONS = line((1, 4.0), (4, 4.6), (8, 5.5), (9, 5.8), (16, 7.9), (32, 14.9), (64, 29.0))
#: What steps take, a draft model's steps, and a look for drafts in text, a row.
MACHINES: dict[str, tuple[Cost, Cost | None, float]] = {
    "billion": (BILLION, None, 0.0002),
    "billion, draft model": (BILLION, lambda rows: 0.012 + 0.002 * rows, 0.0002),
    "billion, head": (BILLION, lambda rows: 0.2 + 0.004 * rows, 0.0002),
    "millions": (MILLIONS, None, 0.03),
    "millions, draft model": (MILLIONS, lambda rows: 0.8 + 0.12 * rows, 0.02),
    "computes": (computes, None, 0.01),
    "tiles": (tiles, None, 0.01),
    "tiles, draft model": (tiles, lambda rows: 0.4 + 0.1 * rows, 0.01),
}


def often(p: float) -> Text:
    """So often is the next token the one that was guessed."""
    return lambda step, row: p


def turns(steps: int) -> Text:
    """Nothing repeats, then nearly everything, and so on: what was learned is always wrong."""
    return lambda step, row: 0.97 if step // steps % 2 else 0.0


#: Those that make drafts seem good, or bad, just before they aren't.
TEXTS: dict[str, Text] = {
    **{f"often {p}": often(p) for p in (0.0, 0.2, 0.5, 0.7, 0.85, 0.95)},
    **{f"turns of {steps}": turns(steps) for steps in (3, 7, 40)},
    "falls off": lambda step, row: 0.97 if step < 50 else 0.0,
    "every second row": lambda step, row: 0.95 if row.seq_id % 2 else 0.0,
    "at the beginning": lambda step, row: 0.95 if row.num_output_tokens < 8 else 0.02,
    "all but the beginning": lambda step, row: 0.95 if row.num_output_tokens > 8 else 0.0,
}


def waves(step: int) -> int:
    """One row, and now and then many that start at once."""
    return 16 if step // 20 % 2 else 1


ROWS: dict[str, int | Callable[[int], int]] = {"1": 1, "8": 8, "32": 32, "waves": waves}
#: What takes long to simulate, and is slowed down less: each text comes with one of them.
WIDE = ("32", "waves")


def _slower(rows: str, machine: str, texts: Iterable[str]) -> dict[str, float]:
    """Texts with which it is too slow."""
    cost, draft, lookup_s = MACHINES[machine]
    speed_ups = {
        name: Simulation(cost, ROWS[rows], TEXTS[name], draft=draft, lookup_s=lookup_s)
        .run(80)
        .speed_up
        for name in texts
    }
    return {name: speed_up for name, speed_up in speed_ups.items() if speed_up < _MIN_SPEED_UP}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("machine", MACHINES)
def test_no_text_is_slower_for_its_drafts_at_any_load(machine: str, rows: str) -> None:
    texts = [*TEXTS]
    if rows in WIDE:
        turn = [*MACHINES].index(machine) + WIDE.index(rows)
        texts = texts[turn % 2 :: 2]
    assert not _slower(rows, machine, texts)


@pytest.mark.slow
@pytest.mark.parametrize("rows", WIDE)
@pytest.mark.parametrize("machine", MACHINES)
def test_nor_any_text_at_a_wide_one(machine: str, rows: str) -> None:
    assert not _slower(rows, machine, TEXTS)


@pytest.mark.parametrize("rows", ["1", "8"])
@pytest.mark.parametrize("machine", ["millions", "billion, draft model"])
def test_nor_on_a_machine_that_is_never_as_fast_as_before(machine: str, rows: str) -> None:
    cost, draft, lookup_s = MACHINES[machine]
    for p in (0.0, 0.5):
        speed_ups = [
            Simulation(
                cost, ROWS[rows], often(p), draft=draft, lookup_s=lookup_s, noise=0.1, seed=seed
            )
            .run(100)
            .speed_up
            for seed in range(4)
        ]
        assert sum(speed_ups) / len(speed_ups) >= _MIN_SPEED_UP, (p, speed_ups)


@pytest.mark.parametrize("machine", ["millions", "billion, draft model"])
def test_nor_where_every_row_is_another_tenants(machine: str) -> None:
    """Of none of them anything is known before."""
    cost, draft, lookup_s = MACHINES[machine]
    simulation = Simulation(cost, 8, often(0.0), draft=draft, lookup_s=lookup_s, tenants=1000)
    assert simulation.run(200).speed_up >= _MIN_SPEED_UP


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("machine", ["millions, draft model", "billion, draft model"])
def test_nor_where_a_draft_model_reads_for_a_few_tokens_only(machine: str, rows: int) -> None:
    """Short answers, each behind a prompt that takes it half a step: the better its drafts, the
    more often it would be asked.
    """
    cost, draft, lookup_s = MACHINES[machine]
    prompt, lengths = 0.5 * cost(1), (6, 14)
    for p in (0.0, 0.3, 0.5, 0.8, 0.9, 0.97):
        simulation = Simulation(cost, rows, often(p), draft=draft, lookup_s=lookup_s, prompt=prompt,
                          lengths=lengths)  # fmt: skip
        assert simulation.run(150).speed_up >= _MIN_SPEED_UP, p


def test_what_a_draft_model_reads_is_worth_it_where_its_drafts_hold() -> None:
    cost, draft, lookup_s = MACHINES["billion, draft model"]
    speed_ups = [
        Simulation(cost, 1, often(0.8), draft=draft, lookup_s=lookup_s, prompt=0.5, lengths=(6, 14),
                   seed=seed).run(150).speed_up
        for seed in range(3)
    ]  # fmt: skip
    assert sum(speed_ups) / len(speed_ups) > 1.7, speed_ups


@pytest.mark.parametrize(("p", "minimum"), [(0.4, 1.2), (0.8, 2.0)])
def test_one_stream_gets_what_its_text_gives(p: float, minimum: float) -> None:
    cost, _, lookup_s = MACHINES["billion"]
    speed_ups = [
        Simulation(cost, 1, often(p), lookup_s=lookup_s, noise=0.1, seed=seed).run(200).speed_up
        for seed in range(3)
    ]
    assert sum(speed_ups) / len(speed_ups) >= minimum, speed_ups


def test_a_head_that_is_a_fifth_of_its_model_is_tried_from_the_first_tokens_on() -> None:
    cost, draft, lookup_s = MACHINES["billion, head"]
    speed_ups = [
        Simulation(
            cost, 1, often(0.8), draft=draft, lookup_s=lookup_s, lengths=(60, 200), seed=seed
        )
        .run(60)
        .speed_up
        for seed in range(5)
    ]
    assert sum(speed_ups) / len(speed_ups) > 1.3, speed_ups


def test_a_draft_model_that_holds_pays_for_eight() -> None:
    cost, draft, _ = MACHINES["billion, draft model"]
    assert Simulation(cost, 8, often(0.95), draft=draft).run(200).speed_up > 1.2


def test_what_is_not_worth_checking_is_found_out_for_nothing() -> None:
    """Half of the drafts, as expected at first, wouldn't pay here; nearly all do hold."""
    simulation = Simulation(lambda width: 6.0 + width, 8, often(0.97), noise=0.1)
    assert simulation.run(600).speed_up > 1.05


#: Steps of one stream within which drafts come though the machine was busy at the start.
_SOON = {"billion": 400, "millions": 400, "tiles": 400, "billion, draft model": 400,
         "millions, draft model": 700}  # fmt: skip


@pytest.mark.parametrize("machine", _SOON)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_drafts_come_soon_though_wide_steps_seemed_four_times_slower_at_the_start(
    machine: str, noise: float
) -> None:
    cost, draft, lookup_s = MACHINES[machine]
    speed_ups = []
    for start in (4.0, 1.0):
        simulation = Simulation(cost, 1, often(0.9), draft=draft, lookup_s=lookup_s,
                                lengths=(60, 200), noise=noise, start=start)  # fmt: skip
        initial = simulation.run(100).speed_up
        assert initial >= _MIN_SPEED_UP
        assert (initial > 1.3) == (start == 1.0)
        simulation.run(_SOON[machine] - 100)
        speed_ups.append(simulation.run(200).speed_up)
    assert speed_ups[0] > 0.8 * speed_ups[1] > 1.2, speed_ups


@pytest.mark.parametrize("machine", ["billion", "millions"])
def test_and_so_they_do_at_eight_streams(machine: str) -> None:
    cost, _, lookup_s = MACHINES[machine]
    simulation = Simulation(cost, 8, often(0.9), lookup_s=lookup_s, lengths=(60, 200), start=4.0)
    assert simulation.run(100).speed_up < 1.01
    simulation.run(100)
    assert simulation.run(200).speed_up > 1.1


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("machine", MACHINES)
def test_trials_where_drafts_never_hold_cost_next_to_nothing(machine: str, rows: int) -> None:
    cost, draft, lookup_s = MACHINES[machine]
    simulation = Simulation(cost, rows, often(0.0), draft=draft, lookup_s=lookup_s)
    simulation.run(60)
    assert simulation.run(500).speed_up >= 0.99


#: One core, 380 million parameters, in milliseconds; a head of them draws in the others.
ONE_CORE = line((1, 27.5), (4, 31.0), (8, 42.0), (11, 55.0), (16, 76.0), (64, 270.0))


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_head_that_follows_prompts_for_nothing_costs_no_more_where_many_wait_for_them(
    rows: int,
) -> None:
    """What a prompt takes is the time of all rows that decode beside it."""
    simulation = Simulation(ONE_CORE, rows, often(0.0), draft=lambda n: 3.4 + 1.1 * n,
                            lookup_s=0.02, lengths=(10, 32), noise=0.1,
                            follows=Follows(0.02, 80.0, 5.0))  # fmt: skip
    simulation.run(40)  # a few prompts are followed on credit
    assert simulation.run(200).speed_up >= 0.985


def test_a_tenants_first_tokens_with_a_head_that_is_never_right_are_no_slower() -> None:
    """Whatever it takes to draw, and to follow a prompt and a row."""
    rng, speed_ups = random.Random(5), []
    for seed in range(60):
        cost = rng.choice([ONE_CORE, BILLION, MILLIONS])
        draw, row, follow = rng.uniform(0.02, 0.4), rng.uniform(0.0, 0.1), rng.uniform(0.0, 0.03)
        prompt, length = rng.uniform(1.0, 10.0), rng.choice([20, 40, 79, 200])
        parts = [part * cost(1) for part in (draw, row, follow, prompt)]
        head = Follows(*parts[2:], rng.uniform(0.01, 0.08) * parts[3])
        simulation = Simulation(cost, 1, often(0.0), draft=lambda n, d=parts: d[0] + d[1] * (n - 1),
                          lengths=(length, length), seed=seed, follows=head)  # fmt: skip
        speed_ups.append(simulation.run(80).speed_up)
    assert min(speed_ups) >= _MIN_SPEED_UP, speed_ups


@pytest.mark.parametrize("draft", [None, lambda rows: 1.9 + 0.5 * (rows - 1)])
def test_wide_steps_that_seemed_cheap_at_the_start_cost_a_batch_little(draft: Cost | None) -> None:
    """The narrow ones were measured while something else ran: drafts seem to pay, and don't."""
    speed_ups = [
        Simulation(ONE_CORE, 8, often(0.6), draft=draft, lookup_s=0.02, lengths=(28, 32),
                   noise=0.08, seed=seed, start=0.4).run(160).speed_up
        for seed in range(8)
    ]  # fmt: skip
    assert sum(speed_ups) / len(speed_ups) >= 0.965, speed_ups


@pytest.mark.parametrize(
    ("cost", "draft"),
    [MACHINES["billion, head"][:2], (ONE_CORE, lambda rows: 1.9 + 0.5 * (rows - 1))],
)
def test_a_text_that_repeats_nothing_loses_little_behind_one_that_paid(
    cost: Cost, draft: Cost
) -> None:
    """Its tenant's chances are good, and what drafts brought was another's."""
    speed_ups = []
    for seed in range(12):
        simulation = Simulation(cost, 1, lambda _, row: 0.95 if row.seq_id <= 2 else 0.0,
                                draft=draft, lookup_s=0.0002, lengths=(80, 80),
                                noise=0.08, seed=seed)  # fmt: skip
        while simulation.num_started <= 2:
            simulation.run(1)  # the last one is of the third
        speed_ups.append(simulation.run(80).speed_up)
    assert sum(speed_ups) / len(speed_ups) >= _MIN_SPEED_UP, speed_ups
