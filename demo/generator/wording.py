"""Lists of words, written compactly."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """Single words, with space between them."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """Phrases of several words, with a bar between them."""
    return tuple(" ".join(phrase.split()) for phrase in text.split("|"))
