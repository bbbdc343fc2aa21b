"""`python -m engine.bench.speculation` tells what drafts bring."""

from __future__ import annotations

import json

import pytest

from engine.bench.speculation import Compared, Turn, main
from tests.engine.lora.adapters import DEMO_MODEL


def test_each_text_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            *("--model", DEMO_MODEL, "--streams", "1", "--texts", "echo", "sum"),
            *("--turns", "2", "--max-tokens", "4"),
        ]
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["method"], row["text"], row["same_texts"]) for row in rows] == [
        ("ngram", "echo", 1.0),
        ("ngram", "sum", 1.0),
    ]
    for row in rows:
        assert row["steps"] >= row["drafted_steps"]
        assert row["drafts"] >= row["in_vain"] >= 0
        assert min(row["ratio"], row["ratio_cpu"], row["control"], row["control_cpu"]) > 0


def test_a_turn_is_compared_with_what_ran_around_it() -> None:
    """The machine slows down to a third: drafts bring twice as much all the same."""

    def turn(tokens: int, seconds: float) -> Turn:
        return Turn(tokens, seconds, seconds / 2, [], [], [])

    found = Compared(turn(10, 1.0), turn(10, 1.0), turn(10, 2.0), turn(10, 3.0))
    assert (found.ratio(found.drafted, "seconds"), found.ratio(found.drafted, "cpu")) == (2, 2)
    assert found.ratio(found.control, "seconds") == 1
