"""A page sentence by sentence, so that each can name its test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_ITEM = re.compile(r"^(?:[-*] |\d+\. )")
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[])")


def sentences(page: Path) -> dict[str, list[str]]:
    """By heading. A table's row is one; blocks of code are none."""
    found: dict[str, list[str]] = {}
    for heading, unit in _units(page):
        parts = [unit] if " | " in unit else _END.split(unit)
        found.setdefault(heading, []).extend(part.strip() for part in parts)
    return found


def _units(page: Path) -> Iterator[tuple[str, str]]:
    """Paragraphs, items and rows of tables, each on one line, with the heading above it."""
    heading, unit, code = "", "", False
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        text = line.strip()
        begins = not text or text[0] in "|#" or text.startswith("```") or _ITEM.match(text)
        if unit and begins:
            yield heading, unit
            unit = ""
        if text.startswith("```"):
            code = not code
        elif text.startswith("#") and not code:
            heading = text.lstrip("# ")
        elif text.startswith("|"):
            if set(text) - set("|-: "):
                yield heading, text.strip("| ")
        elif text and not code and not (line.startswith("    ") and not unit):
            unit = f"{unit} {_ITEM.sub('', text)}".strip()
