"""What came of each test, and why where it isn't what vLLM's own server gives."""

from __future__ import annotations

import json
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tools.docs.markdown import item

REASONS = Path(__file__).with_name("reasons.toml")
RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Result:
    """`outcome`: "passed", "differs" or "skipped". `message`: the last line of what went wrong."""

    name: str
    outcome: str
    message: str = ""


def read_report(path: Path, file: str) -> list[Result]:
    """The results in one file's JUnit report, by `file::test`."""
    results = []
    for case in ET.parse(path).getroot().iter("testcase"):
        # A file that can't be collected is a case without a test's name.
        name = f"{file}::{case.get('name')}"
        outcome, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, message = "differs", _last_line(child.get("message"))
            elif child.tag == "skipped":
                outcome, message = "skipped", _last_line(child.get("message"))
        results.append(Result(name, outcome, message))
    return results


def _last_line(message: str | None) -> str:
    return " ".join((message or "").split())[:300]


@dataclass(frozen=True)
class Summary:
    """What came of one file's tests. `differs`: the names of those that do."""

    passed: int
    skipped: int
    differs: tuple[str, ...]

    @classmethod
    def of(cls, results: list[Result]) -> Summary:
        """Of results."""
        counts = Counter(result.outcome for result in results)
        differs = (result.name for result in results if result.outcome == "differs")
        return cls(counts["passed"], counts["skipped"], tuple(sorted(differs)))


class StoredResults:
    """Results by file, kept in a JSON file: a run may be gone on with.

    `left_out`: files that aren't run. `waiting`: those that have no results yet.
    """

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path
        self.by_file: dict[str, Summary] = {}
        self.excluded: list[str] = []
        self.waiting: list[str] = []
        if path.exists():
            read = json.loads(path.read_text(encoding="utf-8"))
            self.excluded, self.waiting = read["left_out"], read["waiting"]
            for file, summary in read["files"].items():
                differs = tuple(f"{file}::{test}" for test in summary["differs"])
                self.by_file[file] = Summary(summary["passed"], summary["skipped"], differs)

    def set_files(self, files: list[str], excluded: list[str]) -> None:
        """These files are run, those aren't; of others nothing is kept."""
        self.by_file = {file: self.by_file[file] for file in files if file in self.by_file}
        self.excluded = sorted(excluded)
        self.waiting = sorted(set(files) - self.by_file.keys())
        self._write()

    def add(self, file: str, file_results: list[Result]) -> None:
        """A file was run."""
        self.by_file[file] = Summary.of(file_results)
        self.waiting = [waiting_file for waiting_file in self.waiting if waiting_file != file]
        self._write()

    def _write(self) -> None:
        files = {
            file: {
                "passed": summary.passed,
                "skipped": summary.skipped,
                "differs": [name.removeprefix(f"{file}::") for name in summary.differs],
            }
            for file, summary in sorted(self.by_file.items())
        }
        full = {"files": files, "left_out": self.excluded, "waiting": self.waiting}
        self._path.write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")


class Reasons:
    """Why tests differ: patterns of `file::test`, by reason.

    `endless = true`: the tests are named whole and aren't begun; they count as different.
    """

    def __init__(self, path: Path = REASONS) -> None:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))["reason"]
        self._patterns = [(glob, table["why"]) for table in tables for glob in table["tests"]]
        endless = [table["tests"] for table in tables if table.get("endless")]
        self._endless = [name for names in endless for name in names]

    def endless(self, file: str) -> list[str]:
        """Tests of a file that never end here, so that they aren't begun: `file::test`."""
        return [name for name in self._endless if name.startswith(f"{file}::")]

    def of(self, name: str) -> str | None:
        """The reason for a test's difference, if it's known."""
        # Parameters may hold any character: a pattern without a star is the test's beginning.
        for pattern, why in self._patterns:
            exact = name == pattern or name.startswith(f"{pattern}[")
            if exact or fnmatchcase(name, pattern):
                return why
        return None


def report(stored: StoredResults, reasons: Reasons) -> tuple[str, int]:
    """The report, and how many differences nobody has explained."""
    summaries = list(stored.by_file.values())
    explained: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name in (name for summary in summaries for name in summary.differs):
        why = reasons.of(name)
        (unknown if why is None else explained.setdefault(why, [])).append(name)
    lines = [
        f"{sum(summary.passed for summary in summaries)} as vLLM, "
        f"{sum(len(summary.differs) for summary in summaries)} otherwise, "
        f"{sum(summary.skipped for summary in summaries)} about vLLM's insides or a GPU."
    ]
    for why, names in explained.items():
        lines += ["", f"{why} ({len(names)})", *(f"  {name}" for name in names)]
    if unknown:
        lines += ["", f"Without a reason ({len(unknown)})", *(f"  {name}" for name in unknown)]
    return "\n".join(lines), len(unknown)


_PAGE = """# vLLM's own API tests

Made by [`python -m tests.vllm_suite`](../tests/vllm_suite): the test files of vLLM 0.33 that
talk to a server, run against Quire with the demo model (or a tiny random encoder) under the name
that each file gives its own. What differs has a reason.

| file | as vLLM | otherwise | about vLLM's insides or a GPU | why otherwise |
|---|---|---|---|---|
"""


def page(stored: StoredResults, reasons: Reasons) -> str:
    """The results as a document."""
    rows, numbers = [], dict[str, int]()
    total: Counter[str] = Counter()
    for file, summary in sorted(stored.by_file.items()):
        counts = Counter(
            passed=summary.passed, differs=len(summary.differs), skipped=summary.skipped
        )
        total += counts
        whys = {reasons.of(name) or "No reason yet." for name in summary.differs}
        cited = sorted(numbers.setdefault(why, len(numbers) + 1) for why in sorted(whys))
        row = [
            _short(file),
            *(str(counts[outcome]) for outcome in ("passed", "differs", "skipped")),
        ]
        rows.append(" | ".join(["", *row, ", ".join(map(str, cited)), ""]).strip())
    sums = " | ".join(str(total[outcome]) for outcome in ("passed", "differs", "skipped"))
    rows.append(f"| **all** | {sums} | |")
    listed = [item(why, f"{number}.") for why, number in numbers.items()]
    skipped: dict[str, list[str]] = {}
    for file in stored.excluded:
        skipped.setdefault(reasons.of(file) or "", []).append(_short(file))
    parts = [_PAGE + "\n".join(rows), "\n".join(listed)]
    if stored.waiting:
        parts.append(f"Without results yet: {', '.join(map(_short, stored.waiting))}.")
    parts.append("Not run:")
    parts.append("\n".join(item(f"{why} {', '.join(files)}") for why, files in skipped.items()))
    return "\n\n".join(parts) + "\n"


def _short(file: str) -> str:
    return f"`{file.removeprefix('tests/entrypoints/')}`"
