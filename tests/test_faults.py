"""Every bad input and fault that must be survived has a test that carries its number.

The name says which: `test_fault_07_...`, or an id of a parametrised test, "48-frozen".
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

FAULTS = {*range(1, 67), *range(69, 77)}
_IN_NAME = re.compile(r"fault_(\d\d)(?:_and_(\d\d))?_")
_IN_ID = re.compile(r"(\d\d)-[a-z]+")


def numbers_of(tree: ast.AST) -> set[int]:
    """The faults that the tests of a module are of."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.name.startswith("test_"):
            continue
        found |= {int(text) for pair in _IN_NAME.findall(node.name) for text in pair if text}
        if node.name.startswith("test_fault_"):
            ids = [part for each in node.decorator_list for part in ast.walk(each)]
            texts = [part.value for part in ids if isinstance(part, ast.Constant)]
            matches = [_IN_ID.fullmatch(text) for text in texts if isinstance(text, str)]
            found |= {int(match[1]) for match in matches if match}
    return found


def test_each_fault_has_a_test_and_each_number_is_a_faults() -> None:
    found: set[int] = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        if "fault_" in (text := path.read_text(encoding="utf-8")):
            found |= numbers_of(ast.parse(text))
    assert found == FAULTS
