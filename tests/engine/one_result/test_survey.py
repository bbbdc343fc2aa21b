"""docs/model-results.md says of each recipe whether it keeps its bits."""

from __future__ import annotations

import pytest

from tests.survey.recipes import RECIPES
from tests.survey.run import Result, run_recipe
from tests.survey.table import page


@pytest.mark.usefixtures("compiler")
def test_the_column_comes_from_a_run() -> None:
    result = run_recipe(RECIPES["llama"])
    assert (result.moved, result.one_result) == (0, "yes")


def test_the_column_says_what_was_found() -> None:
    moved = Result("OneForCausalLM", equal=6, runner="bridge", moved=3)
    refused = Result("TwoForCausalLM", reason="refused: no")
    text = page({"one": moved, "two": refused}, "5.0")
    assert "| OneForCausalLM | one | pass (6/6 equal, ± 0e+00) | no |\n" in text
    assert "| TwoForCausalLM | two | refused: no | - |\n" in text
