"""What an addition to the engine touches outside of its own place: `python -m tests.additions`.

A file of `engine/` or `kernels/` *names* an addition where its code does; comments, docstrings and
messages don't count. It *decides* by it where a condition does: such a file has a case of its own
for it, the others hand it on. `python -m tests.additions drafts` lists the files.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Addition:
    """Something that was added, or could be.

    Attributes:
        own: of the paths of files that are its own.
        words: of the names that code has for it.
    """

    own: re.Pattern[str]
    words: re.Pattern[str]


ADDITIONS = {
    "adapters": Addition(
        own=re.compile(r"lora|adapte|adaptable"),
        words=re.compile(r"(?:^|_)(?:adapters?|loras?)(?:$|_)|Adapter(?!LogitsProc)|LoRA|Lora"),
    ),
    "drafts": Addition(
        own=re.compile(r"speculat|draft|executor/heads|head_memory|worker/hidden|acceptance"),
        words=re.compile(
            r"(?:^|_)(?:drafts?|drafted|drafter|drafting|speculative|spec_decode)(?:$|_)"
            r"|Draft|Speculative"
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Touched:
    """A file outside of an addition's own place, and how often its code names it and decides by
    it.
    """

    path: str
    names: int
    decides: int


def sources() -> Iterator[Path]:
    """The files of the engine and the kernels."""
    for storey in ("engine", "kernels"):
        yield from sorted((ROOT / storey).rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Of a file's code, which is looked through once for each addition."""
    return ast.parse(path.read_text(encoding="utf-8"))


def touched(addition: Addition) -> list[Touched]:
    """The files that know of an addition and aren't its own."""
    found = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        if addition.own.search(name):
            continue
        names, decides = touch_of(addition, tree_of(path))
        if names:
            found.append(Touched(name, names, decides))
    return found


def touch_of(addition: Addition, tree: ast.Module) -> tuple[int, int]:
    """How often code names an addition, and how many of its conditions do."""
    names = sum(1 for word in _names(tree) if addition.words.search(word))
    decides = sum(1 for test in _tests(tree) if any(map(addition.words.search, _names(test))))
    return names, decides


def own(addition: Addition) -> list[str]:
    """The addition's own files."""
    paths = (str(path.relative_to(ROOT)) for path in sources())
    return [path for path in paths if addition.own.search(path)]


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]


def _tests(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def main() -> None:
    """Print the table, or the files of one addition."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addition", nargs="?", choices=ADDITIONS)
    if (asked := parser.parse_args().addition) is not None:
        for file in touched(ADDITIONS[asked]):
            print(f"{file.path}: named {file.names} times, decided by {file.decides} times")
        return
    print("| addition | own files | name it | decide by it |\n|---|---|---|---|")
    for name, addition in ADDITIONS.items():
        found = touched(addition)
        deciding = sum(1 for file in found if file.decides)
        print(f"| {name} | {len(own(addition))} | {len(found)} | {deciding} |")


if __name__ == "__main__":
    main()
