"""Words on pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE_BUTTON = re.compile(r"<(button|summary)\b[^>]*>(.*?)</\1>", re.S)
SCRIPT_BUTTON = re.compile(r'el\("(?:button|summary)",\s*\{[^}]*\},\s*"([^"]*)"')


def buttons() -> Iterator[tuple[str, str]]:
    """File and text of each button of the product's own."""
    for path in sorted((ROOT / "templates").rglob("*.html")):
        for match in TEMPLATE_BUTTON.finditer(path.read_text(encoding="utf-8")):
            yield path.name, re.sub(r"\{%.*?%\}|<[^>]*>", " ", match[2]).strip()
    for path in sorted((ROOT / "platform/console/static/console/js").rglob("*.js")):
        for match in SCRIPT_BUTTON.finditer(path.read_text(encoding="utf-8")):
            yield path.name, match[1]


def test_buttons_name_what_they_act_on() -> None:
    texts = list(buttons())
    assert len(texts) > 100
    assert [text for text in texts if re.search(r"\b(it|them)\b", text[1])] == []
