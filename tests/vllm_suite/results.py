"""What came of each test, and why where it isn't what vLLM's own server gives."""

from __future__ import annotations

import json
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import astuple, dataclass
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


class Kept:
    """Results by file, kept in a JSON file where one is named: a run may be gone on with."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.by_file: dict[str, list[Result]] = {}
        if path is not None and path.exists():
            read = json.loads(path.read_text(encoding="utf-8"))
            self.by_file = {file: [Result(*each) for each in found] for file, found in read.items()}

    def add(self, file: str, found: list[Result]) -> None:
        """A file was run."""
        self.by_file[file] = found
        if self._path is not None:
            listed = {name: [astuple(each) for each in kept] for name, kept in self.by_file.items()}
            self._path.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")

    @property
    def results(self) -> list[Result]:
        """All of them."""
        return [result for found in self.by_file.values() for result in found]


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


_PAGE = """# vLLM's own API tests

Made by [`python -m tests.vllm_suite`](../tests/vllm_suite): the test files of vLLM 0.33 that
talk to a server, run against Quire with the demo model (or a tiny random encoder) under the name
that each file gives its own. What differs has a reason.

| file | as vLLM | otherwise | about vLLM's insides or a GPU | why otherwise |
|---|---|---|---|---|
"""


def page(
    by_file: dict[str, list[Result]], left_out: list[str], waiting: list[str], reasons: Reasons
) -> str:
    """The results as a document. `waiting`: files that have none yet."""
    rows, numbers = [], dict[str, int]()
    total: Counter[str] = Counter()
    for file, found in sorted(by_file.items()):
        counts = Counter(result.outcome for result in found)
        total += counts
        differing = [result for result in found if result.outcome == "differs"]
        whys = {reasons.of(result.name) or "No reason yet." for result in differing}
        cited = sorted(numbers.setdefault(why, len(numbers) + 1) for why in sorted(whys))
        row = [_short(file), *(str(counts[each]) for each in ("passed", "differs", "skipped"))]
        rows.append(" | ".join(["", *row, ", ".join(map(str, cited)), ""]).strip())
    sums = " | ".join(str(total[each]) for each in ("passed", "differs", "skipped"))
    rows.append(f"| **all** | {sums} | |")
    listed = [f"{number}. {why}" for why, number in numbers.items()]
    skipped: dict[str, list[str]] = {}
    for file in left_out:
        skipped.setdefault(reasons.of(file) or "", []).append(_short(file))
    parts = [_PAGE + "\n".join(rows), "\n".join(listed)]
    if waiting:
        parts.append(f"Without results yet: {', '.join(map(_short, waiting))}.")
    parts.append("Not run:")
    parts.append("\n".join(f"- {why} {', '.join(files)}" for why, files in skipped.items()))
    return "\n\n".join(parts) + "\n"


def _short(file: str) -> str:
    return f"`{file.removeprefix('tests/entrypoints/')}`"
