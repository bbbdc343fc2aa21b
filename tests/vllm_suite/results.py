"""What came of each test, and why where it isn't what vLLM's own server gives."""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

REASONS = Path(__file__).with_name("reasons.toml")


@dataclass(frozen=True)
class Result:
    """`outcome`: "passed", "differs" or "skipped". `told`: the last line of what went wrong."""

    name: str
    outcome: str
    told: str = ""


def read_report(path: Path, file: str) -> list[Result]:
    """The results in one file's JUnit report, by `file::test`."""
    found = []
    for case in ET.parse(path).getroot().iter("testcase"):
        # A file that can't be collected is a case without a test's name.
        name = f"{file}::{case.get('name')}"
        outcome, told = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, told = "differs", _shown(child.get("message"))
            elif child.tag == "skipped":
                outcome, told = "skipped", _shown(child.get("message"))
        found.append(Result(name, outcome, told))
    return found


def _shown(message: str | None) -> str:
    return " ".join((message or "").split())[:300]


class Reasons:
    """Why tests differ: patterns of `file::test`, by reason."""

    def __init__(self, path: Path = REASONS) -> None:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))["reason"]
        self._patterns = [(glob, table["why"]) for table in tables for glob in table["tests"]]

    def of(self, name: str) -> str | None:
        """The reason for a test's difference, if it's known."""
        # Parameters may hold any character: a pattern without a star is the test's beginning.
        for pattern, why in self._patterns:
            exact = name == pattern or name.startswith(f"{pattern}[")
            if exact or fnmatchcase(name, pattern):
                return why
        return None


def report(results: list[Result], reasons: Reasons) -> tuple[str, int]:
    """The report, and how many differences nobody has explained."""
    counts = dict.fromkeys(("passed", "differs", "skipped"), 0)
    explained: dict[str, list[Result]] = {}
    unknown: list[Result] = []
    for result in results:
        counts[result.outcome] += 1
        if result.outcome == "differs":
            why = reasons.of(result.name)
            if why is None:
                unknown.append(result)
            else:
                explained.setdefault(why, []).append(result)
    lines = [
        f"{counts['passed']} as vLLM, {counts['differs']} otherwise, "
        f"{counts['skipped']} about vLLM's insides or a GPU."
    ]
    for why, found in explained.items():
        lines += ["", f"{why} ({len(found)})", *(f"  {result.name}" for result in found)]
    if unknown:
        lines += ["", f"Without a reason ({len(unknown)})"]
        lines += [f"  {result.name}\n      {result.told}" for result in unknown]
    return "\n".join(lines), len(unknown)
