"""Lines of Markdown."""

from __future__ import annotations

import textwrap

WIDTH = 100


def item(text: str, mark: str = "-") -> str:
    """An item of a list, wrapped."""
    return paragraph(f"{mark} {text}", indent=" " * (len(mark) + 1))


def paragraph(text: str, indent: str = "") -> str:
    """A paragraph, wrapped."""
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
