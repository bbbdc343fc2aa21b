"""Token ids of a text of any length: of a long one piece by piece, the same as of all at once.

Of ten megabytes at once the library makes a gigabyte. So a piece is read, then the next one from
the beginning of one of its last tokens on. Where both have found the same tokens at the same
places, many in a row and far from both cuts, neither cut is felt any more, and what comes behind
is taken from the second. Where they don't agree (a word without end) longer pieces are read.
"""

from __future__ import annotations

from bisect import bisect_left

import tokenizers

from engine.text import backend as library
from engine.text.backend import exactly, over

#: What two pieces have in common, in characters. Of its last eighth nothing is believed.
_COMMON = 4096
#: The least that is read at once, however few tokens are of use.
_LEAST = 8192
#: So many tokens in a row must be the same.
_IN_A_ROW = 32


class _Piece:
    """Tokens of a text from `start` on, and where each of them begins."""

    def __init__(self, backend: tokenizers.Tokenizer, text: str, start: int, size: int) -> None:
        self.start, self.end = start, min(start + size, len(text))
        found = library.read(
            backend, text[start : self.end], add_special_tokens=False, offsets=True
        )
        self.ids: list[int] = found.ids
        places = found.offsets
        self.starts = [start + begin for begin, _ in places]
        self._ends = [start + end for _, end in places]

    def begins_at(self, place: int) -> int | None:
        """The first token that begins there or later, and divides no character."""
        for index in range(bisect_left(self.starts, place), len(self.ids)):
            if index and self.starts[index] >= self._ends[index - 1]:
                return index
        return None

    def joint(self, first: int, later: _Piece) -> tuple[int, int] | None:
        """From which of its tokens on (`first` or a later one), and which of the later piece's,
        both are the same; None where that's too close to the end of this one to be sure.
        """
        last = bisect_left(self._ends, self.end - (self.end - self.starts[first]) // 8)
        for index in range(first, last - _IN_A_ROW):
            other = bisect_left(later.starts, self.starts[index])
            mine, theirs = slice(index, index + _IN_A_ROW), slice(other, other + _IN_A_ROW)
            if (
                self.ids[mine] == later.ids[theirs]
                and self.starts[mine] == later.starts[theirs]
                and self._ends[mine] == later._ends[theirs]
            ):
                return index, other
        return None


def encode_ids(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, most: int | None = None
) -> list[int]:
    """Token ids of a text.

    Args:
        most: over how many tokens a text is of no use: one that has more before its end isn't read
            to it. None: `MAX_TOKENS`.

    Raises: `InvalidRequest` where the tokenizer has none for it; `ContextLengthExceeded` for more
        than `MAX_TOKENS`, and for a long text in whose beginning over `most` are found.
    """
    limit = library.MAX_TOKENS if most is None else most
    size = min(library.PIECE_CHARS, max(_LEAST, library.CHARS_A_TOKEN * limit))
    if len(text) <= 2 * size:
        ids: list[int] = library.read(
            backend, text, add_special_tokens=add_special_tokens, offsets=False
        ).ids
    else:
        ids = _in_pieces(backend, text, size, most)
        ids = wrapped(backend, ids) if add_special_tokens else ids
    if len(ids) > library.MAX_TOKENS:
        raise exactly(len(ids))
    return ids


def _in_pieces(backend: tokenizers.Tokenizer, text: str, size: int, most: int | None) -> list[int]:
    limit = library.MAX_TOKENS if most is None else most
    ids: list[int] = []
    piece, taken = _Piece(backend, text, 0, size), 0
    common, longer = min(_COMMON, size // 4), size
    while piece.end < len(text):
        first = piece.begins_at(piece.end - common)
        later = None if first is None else _Piece(backend, text, piece.starts[first], size)
        joint = None if first is None or later is None else piece.joint(first, later)
        if joint is None or later is None:
            common, longer = 4 * common, 4 * longer
            piece = _Piece(backend, text, piece.start, longer)
            continue
        ids += piece.ids[taken : joint[0]]
        piece, taken = later, joint[1]
        common, longer = min(_COMMON, size // 4), size
        if len(ids) > limit:
            raise over(limit, of_context=most is not None)
    return ids + piece.ids[taken:]


def wrapped(backend: tokenizers.Tokenizer, ids: list[int]) -> list[int]:
    """`ids` between the special tokens that the model expects around a text."""
    probe = library.read(backend, "a", add_special_tokens=True, offsets=False)
    mask = probe.special_tokens_mask
    first = mask.index(0) if 0 in mask else len(mask)
    last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
    return probe.ids[:first] + ids + probe.ids[last:]
