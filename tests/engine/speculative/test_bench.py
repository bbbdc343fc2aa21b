"""`python -m benchmarks.speculation` tells what drafts bring."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import speculation
from benchmarks.speculation import Answers, Compared, Turn, main
from engine.offline.llm import LLM
from tests.engine.lora.adapters import DEMO_MODEL
from tests.engine.speculative.free import make_drafts_free

DRAFT = str(Path(DEMO_MODEL).parent / "draft")
#: Little to time when it warms up.
SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "num_threads": 1}


@dataclass(frozen=True)
class InProcess:
    """In the place of `Apart`, whose processes take seconds; the adapters' bench has real ones."""

    serving: Any

    @classmethod
    @contextlib.contextmanager
    def started(cls, make: Callable[[LLM], object], model: str, **options: Any) -> Iterator[Self]:
        yield cls(make(LLM(model, **{**options, **SMALL})))

    def call(self, method: str, *args: object) -> Any:
        return getattr(self.serving, method)(*args)


@pytest.mark.parametrize("engines", [(), ("--one-engine",)])
def test_each_text_is_told(
    engines: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    monkeypatch.setattr(speculation, "Apart", InProcess)
    main(
        [
            *("--model", DEMO_MODEL, "--streams", "1", "--texts", "echo", "sum"),
            *("--turns", "2", "--max-tokens", "12", *engines),
        ]
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["method"], row["text"], row["same_texts"]) for row in rows] == [
        ("ngram", "echo", 1.0),
        ("ngram", "sum", 1.0),
    ]
    for row in rows:
        assert row["steps"] >= row["drafted_steps"] > 0
        assert row["drafts"] >= row["in_vain"] >= 0
        assert min(row["ratio"], row["ratio_cpu"], row["control"], row["control_cpu"]) > 0


def test_drafts_set_aside_come_again() -> None:
    """Neither from text nor from a model, and no step of another turn is counted."""
    for speculative_config in ({"method": "ngram"}, {"method": "draft_model", "model": DRAFT}):
        answers = Answers(LLM(DEMO_MODEL, speculative_config=speculative_config, **SMALL))
        questions = ["one two three one two three one two"]
        answers.begin()
        pace = answers._llm.core.drafter.costs.speed
        num_steps = pace.num_steps
        baseline = answers.without_drafts("ask", questions, 12, "")
        assert answers.counted()["steps"] == answers.counted()["drafts"] == 0
        assert pace.num_steps == num_steps  # nothing grows old, to be tried again, for these
        assert answers.ask(questions, 12, "").texts == baseline.texts
        assert answers.counted()["steps"] > 0
        assert pace.num_steps > num_steps


def test_a_turn_is_compared_with_what_ran_around_it() -> None:
    """The machine slows down to a third: drafts bring twice as much all the same."""

    def turn(tokens: int, seconds: float) -> Turn:
        return Turn(tokens, seconds, seconds / 2, [], [], [])

    compared = Compared(turn(10, 1.0), turn(10, 1.0), turn(10, 2.0), turn(10, 3.0))
    assert (
        compared.ratio(compared.drafted, "seconds"),
        compared.ratio(compared.drafted, "cpu"),
    ) == (2, 2)
    assert compared.ratio(compared.control, "seconds") == 1
