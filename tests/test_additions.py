"""What additions touch outside of their own place: the table in docs/architecture.md."""

from __future__ import annotations

import ast
import re

import pytest

from tests.additions import ADDITIONS, ROOT, Addition, touch_of, touched

ROW = re.compile(r"^\| (?P<name>[a-z ]+) \| \d+ \| (?P<named>\d+) \| (?P<deciding>\d+) \|", re.M)
WRITTEN = {
    row["name"]: (int(row["named"]), int(row["deciding"]))
    for row in ROW.finditer((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_no_more_files_know_of_an_addition_than_the_table_says(name: str) -> None:
    found = touched(ADDITIONS[name])
    named, deciding = WRITTEN[name]
    assert len(found) <= named, "\n".join(file.path for file in found)
    assert sum(1 for file in found if file.decides) <= deciding


def test_names_and_decisions_are_told_apart() -> None:
    drafts: Addition = ADDITIONS["drafts"]
    handed_on = ast.parse('def run(plan):\n    """Drafts."""\n    # drafts\n    go(plan.drafts)\n')
    decided = ast.parse("rows = [one for one in plan if one.num_drafts and not one.done]")
    other = ast.parse("from engine import redraft as overdraft\nif adapters: pass")
    assert touch_of(drafts, handed_on) == (1, 0)
    assert touch_of(drafts, decided) == (1, 1)
    assert touch_of(drafts, other) == (0, 0)
