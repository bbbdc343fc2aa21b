"""The longest cached prefix that all attention types of a model agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: Whether block `index` of the prompt is cached for the group with this key suffix.
IsCached = Callable[[int, bytes], bool]


@dataclass(frozen=True, slots=True)
class AttentionType:
    """Groups that attend alike.

    Attributes:
        reach: blocks before a block's first token that this token sees; None: all of them.
        suffixes: key suffixes of the groups; a block is a hit when it's cached in each of them.
    """

    reach: int | None
    suffixes: tuple[bytes, ...]


def longest_common_hit(types: list[AttentionType], most: int, cached: IsCached) -> int:
    """Blocks of the longest prefix, at most `most`, that is a hit in every attention type.

    Full attention needs all blocks of the prefix and is searched from the left; it goes first. A
    window needs only the last blocks and is searched from the right, within what the others left.
    What shortens one type's hit may spoil another window's, so the windows go round until they
    agree; a shorter prefix is always a hit in full attention too.
    """
    hit = most
    while True:
        before = hit
        for kind in types:
            if kind.reach is not None:
                hit = _last_hit(kind, kind.reach, hit, cached)
            elif hit == most:
                hit = _first_miss(kind, hit, cached)
        if hit == before or len(types) < 2 or (len(types) == 2 and types[0].reach is None):
            return hit


def _first_miss(kind: AttentionType, most: int, cached: IsCached) -> int:
    """How many of the first blocks are cached."""
    for index in range(most):
        if not all(cached(index, suffix) for suffix in kind.suffixes):
            return index
    return most


def _last_hit(kind: AttentionType, reach: int, most: int, cached: IsCached) -> int:
    """The largest end <= most such that the `reach` blocks before it are cached (or all, if fewer).

    A miss rules out every window that holds it. So windows are scanned from their left, and one
    miss usually moves the search by a whole window: a cold prompt costs one look-up a window.
    """
    end = most
    known = end  # blocks [known, end) are cached
    while end > 0:
        start = max(0, end - reach)
        for index in range(start, min(known, end)):
            if not all(cached(index, suffix) for suffix in kind.suffixes):
                # [start, index) are cached: the next window, which ends at index, may use them.
                end, known = index, start
                break
        else:
            return end
    return 0
