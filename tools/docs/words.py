"""`python -m tools.docs.words`: words of the hand-written pages, by reader."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Written by programs: by `make docs`, and by runs of tests.
GENERATED = frozenset(
    f"{name}.md"
    for name in (
        *("settings", "cli", "arguments", "inventory", "attention-backends"),
        *("features", "model-results", "vllm-tests"),
    )
)


def count_words(text: str) -> int:
    """Words outside of code blocks, comments and what programs write between `begin` and `end`.

    A word has a letter or a digit.
    """
    patterns = r"^```.*?^```|<!-- (\w+): begin -->.*?<!-- \1: end -->|<!--.*?-->"
    prose = re.sub(patterns, "", text, flags=re.MULTILINE | re.DOTALL)
    return len(re.findall(r"\S*\w\S*", prose))


def words_by_reader() -> dict[str, int]:
    """Words of README, CONTRIBUTING and the hand-written pages by the index's headings."""
    counts = {"README": count_words((ROOT / "README.md").read_text(encoding="utf-8"))}
    for section in (ROOT / "docs" / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        reader = section.partition("\n")[0]
        pages = set(re.findall(r"\]\(([\w-]+\.md)", section)) - GENERATED
        paths = [ROOT / "docs" / page for page in pages]
        paths += [ROOT / "CONTRIBUTING.md"] if reader == "Contribute" else []
        counts[reader] = sum(count_words(path.read_text(encoding="utf-8")) for path in paths)
    return counts


if __name__ == "__main__":
    words = words_by_reader()
    for name, number in {**words, "all": sum(words.values())}.items():
        print(f"{name:12} {number:6,}")
