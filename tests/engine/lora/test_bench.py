"""`python -m benchmarks.lora` tells what each case brings."""

from __future__ import annotations

import json

import pytest

from benchmarks.lora import Case, main, summarize

from .adapters import DEMO_MODEL


def test_each_case_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            *("--model", DEMO_MODEL, "--batch", "2", "--requests", "2", "--tokens", "2"),
            *("--turns", "1", "--adapters", "2", "3", "--resident", "2"),
        ]
    )
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    cases = ["off", "on_unused", "one_rank_16"]
    cases += [f"{count}_rank_8_{law}" for law in ("uniform", "zipf") for count in (2, 3)]
    ends = ("tok_s", "of_off", "of_off_by_the_clock")
    names = {f"{case}_{end}" for case in cases for end in ends}
    names |= {f"3_of_2_{law}{how}" for law in ("uniform", "zipf") for how in ("", "_by_the_clock")}
    assert row.keys() == names
    assert all(value > 0 for value in row.values())


def test_a_case_is_compared_with_what_ran_beside_it_turn_by_turn() -> None:
    """The machine slows down to a quarter: the case keeps half of it, ten adapters a fifth more."""
    few = [
        Case.between((400, 40), (160, 16), (240, 24)),
        Case.between((100, 10), (60, 6), (140, 14)),
    ]
    many = [
        Case.between((300, 30), (100, 10), (100, 10)),
        Case.between((90, 9), (60, 6), (110, 11)),
    ]
    assert [case.of_off for case in few + many] == [(0.5, 0.5), (0.5, 0.5), (0.5, 0.5), (0.6, 0.6)]
    row = summarize(
        {f"{count}_rank_8_{law}": turns for law in ("uniform", "zipf")
         for count, turns in ((10, few), (1000, many))},
        [1000, 10],
    )  # fmt: skip
    assert row["10_rank_8_zipf_tok_s"] == 110
    assert row["10_rank_8_zipf_of_off"] == 0.5
    assert row["1000_of_10_zipf"] == row["1000_of_10_uniform_by_the_clock"] == 1.1
