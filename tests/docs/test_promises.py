"""What README.md, docs/sampling.md and docs/gateway.md say has tests, sentence by sentence.

`promises/` has a line for each: how it begins, and the tests that fail where it's wrong, or `-`
where it promises nothing (it explains, or points elsewhere). A new sentence needs a line.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.units import sentences

ROOT = Path(__file__).resolve().parents[2]
PROMISES = Path(__file__).parent / "promises"
PAGES = ["README.md", "docs/sampling.md", "docs/gateway.md"]
#: Measurements with their commands, reasons for a design, lists of settings.
TELLS = {
    "Why not adrf, and why a handler of our own",
    "What the gateway costs",
    "Metrics",
    "Settings",
}
page = pytest.mark.parametrize("name", PAGES)


def said(name: str) -> list[str]:
    return [
        sentence
        for heading, found in sentences(ROOT / name).items()
        if heading not in TELLS
        for sentence in found
    ]


@cache
def promises(name: str) -> list[tuple[str, tuple[str, ...]]]:
    text = (PROMISES / f"{name.replace('/', '-').removesuffix('.md')}.txt").read_text()
    pairs = [line.partition(" => ") for line in text.splitlines()]
    return [(begins, tuple(tests.split())) for begins, _, tests in pairs]


@page
def test_each_sentence_names_what_shows_it_and_in_its_place(name: str) -> None:
    found, named = said(name), [begins for begins, _ in promises(name)]
    for sentence, begins in zip(found, named, strict=False):
        assert sentence.startswith(begins), f"no line in promises/ for: {sentence}"
    assert len(found) == len(named)


@page
def test_the_tests_that_are_named_are_there(name: str) -> None:
    missing = [
        test
        for _, tests in promises(name)
        for test in tests
        if test != "-" and not _is_there(*test.partition("::")[::2])
    ]
    assert missing == []
    assert all(tests for _, tests in promises(name))


def _is_there(file: str, function: str) -> bool:
    path = ROOT / "tests" / file
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    return bool(re.search(rf"^(?:async )?def {function or 'test_'}", text, re.MULTILINE))
