"""What followed the last time that the newest tokens stood in a text, or in one of several."""

from __future__ import annotations

from collections.abc import Sequence


class TokenLookup:
    """Where each short run of tokens stood last in a text that grows at its end.

    Prompt lookup decoding (Saxena 2023): what is edited, quoted or repeated follows again.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """Runs of `shortest` to `longest` tokens are known; both at least 1."""
        self._lengths = range(longest, shortest - 1, -1)
        #: By length: run -> where the token after it stood last.
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}
        self._known = 0
        #: Tokens whose runs it knows: about 450 bytes each.
        self.size = 0

    def clear(self) -> None:
        """Forget all runs. What is appended from here on is taken note of."""
        self._after = {length: {} for length in self._lengths}
        self.size = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of a text that begins with what it was before."""
        for length, after in self._after.items():
            for end in range(max(self._known, length), len(tokens)):
                after[tuple(tokens[end - length : end])] = end
        self.size += len(tokens) - self._known
        self._known = len(tokens)

    def find(self, newest: Sequence[int]) -> int | None:
        """Where the token after the longest run stands that `newest` ends with, in the text as it
        was extended.
        """
        for length, after in self._after.items():
            if length <= len(newest):
                at = after.get(tuple(newest[-length:]))
                if at is not None:
                    return at
        return None


class TextsLookup:
    """Where each short run of tokens stood last in any of some texts."""

    def __init__(self, shortest: int, longest: int) -> None:
        """See `TokenLookup`."""
        self._lengths = range(longest, shortest - 1, -1)
        #: By length: run -> the newest text that has it, and where the token after it stood last.
        self._after: dict[int, dict[tuple[int, ...], tuple[list[int], int]]] = {
            length: {} for length in self._lengths
        }

    def add(self, tokens: list[int]) -> None:
        """A newer text than all others; it is known by its identity."""
        for length, after in self._after.items():
            for end in range(length, len(tokens)):
                after[tuple(tokens[end - length : end])] = tokens, end

    def drop(self, tokens: list[int]) -> None:
        """Forget a text."""
        for length, after in self._after.items():
            for end in range(length, len(tokens)):
                run = tuple(tokens[end - length : end])
                if run in after and after[run][0] is tokens:
                    del after[run]

    def find(self, newest: Sequence[int]) -> tuple[list[int], int] | None:
        """Where the token after the longest run stands that `newest` ends with."""
        for length, after in self._after.items():
            if length <= len(newest):
                found = after.get(tuple(newest[-length:]))
                if found is not None:
                    return found
        return None


def continued(tokens: Sequence[int], at: int, count: int) -> list[int]:
    """`count` tokens from `at` on; where the text ends, what was copied goes on as its end."""
    copied = list(tokens[at : at + count])
    period = len(tokens) - at
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied
