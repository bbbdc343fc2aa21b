"""Bad words as token ids: what the sampler can forbid."""

from __future__ import annotations

from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer

#: Stands before a word that is to be tokenised as in the middle of a text.
_ANCHOR = "\n"


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Token-id sequences that spell the words: at a text's start, inside a text, after a space.

    A word is tokenised differently in these places, and each way has to be forbidden. A model can
    still spell a word in other tokens than its tokenizer would (letter by letter, say).
    """
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ")
        spellings = (
            tokenizer.encode_plain(bare),
            _inside(tokenizer, bare),
            _inside(tokenizer, " " + bare),
        )
        for ids in spellings:
            if ids and ids not in found:
                found.append(ids)
    return found


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text` in the middle of a text; none where it melts into what's before it."""
    before = tokenizer.encode_plain(_ANCHOR)
    ids = tokenizer.encode_plain(_ANCHOR + text)
    return ids[len(before) :] if ids[: len(before)] == before else []
