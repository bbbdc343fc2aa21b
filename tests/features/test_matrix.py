"""Each pair of features goes as docs/features.md says."""

from __future__ import annotations

import pytest

from tests.features import page
from tests.features.lab import Lab
from tests.features.matrix import PAIRS, Outcome, outcome

STATED = page.stated(page.PATH.read_text(encoding="utf-8"))
#: Processes that load Whisper: `tests/engine/ranks/test_media.py` has them, too.
SLOW = {("ranks", "speech")}
PARAMS = [pytest.param(*pair, marks=[pytest.mark.slow] if pair in SLOW else []) for pair in PAIRS]


@pytest.mark.parametrize(("first", "second"), PARAMS)
def test_pair(first: str, second: str, lab: Lab) -> None:
    assert outcome(lab, first, second) == STATED[first, second]


def test_the_page_is_made_from_outcomes_alone() -> None:
    assert page.text(STATED) == page.PATH.read_text(encoding="utf-8")
    worse = page.text({**STATED, PAIRS[0]: Outcome("They quarrel.")})
    assert page.stated(worse) == {**STATED, PAIRS[0]: Outcome("They quarrel.")}
