"""Bad words as token ids: what the sampler can forbid."""

from __future__ import annotations

from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Token-id sequences that spell the words, at a text's start and after a space.

    A word is tokenised differently in the two places, and both ways have to be forbidden.
    """
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ")
        for variant in (bare, " " + bare):
            ids = tokenizer.encode(variant, add_special_tokens=False, parse_special=False)
            if ids and ids not in found:
                found.append(ids)
    return found
