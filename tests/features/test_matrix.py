"""Each pair of features goes as docs/features.md says."""

from __future__ import annotations

import pytest

from tests.features import page
from tests.features.lab import Lab
from tests.features.matrix import PAIRS, Outcome, outcome

STATED = page.stated(page.PATH.read_text(encoding="utf-8"))
#: Ranks are processes, which start with each pair; `tests/engine/ranks` has these pairs, too.
SLOW_WITH_RANKS = {"adapters", "grammar", "pictures", "pooling", "sleep", "speech", "tier"}


def _marks(pair: tuple[str, str]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if "ranks" in pair and SLOW_WITH_RANKS & set(pair) else []


PARAMS = [pytest.param(*pair, marks=_marks(pair)) for pair in PAIRS]


@pytest.mark.parametrize(("first", "second"), PARAMS)
def test_pair(first: str, second: str, lab: Lab) -> None:
    assert outcome(lab, first, second) == STATED[first, second]


def test_the_page_is_made_from_outcomes_alone() -> None:
    assert page.text(STATED) == page.PATH.read_text(encoding="utf-8")
    worse = page.text({**STATED, PAIRS[0]: Outcome("They quarrel.")})
    assert page.stated(worse) == {**STATED, PAIRS[0]: Outcome("They quarrel.")}
