"""The model answers its held-out questions."""

from __future__ import annotations

import pytest

from demo.evaluate import evaluate, questions, report, share


def test_the_questions_are_always_the_same():
    assert questions(10) == questions(10)


def test_no_question_is_asked_twice():
    asked = [repr((e.messages[:-1], e.plain and e.plain[0], e.tools)) for e in questions(60)]
    assert len(asked) == len(set(asked))


@pytest.mark.slow
def test_the_shipped_model_is_right_nineteen_times_in_twenty(shipped):
    verdicts = evaluate(shipped, each=25)
    assert share([verdict.right for verdict in verdicts]) >= 95, "\n".join(report(verdicts))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pirate", "butler"])
def test_an_adapter_keeps_its_manner_and_its_wits(shipped, adapters, name):
    verdicts = evaluate(shipped, adapters / name, each=12)
    styles = [verdict.styled for verdict in verdicts if verdict.styled is not None]
    assert share(styles) >= 95
    assert share([verdict.right for verdict in verdicts]) >= 90
