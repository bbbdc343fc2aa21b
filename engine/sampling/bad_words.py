"""Token sequences that must not come out."""

from __future__ import annotations

from collections.abc import Sequence


class BadWords:
    """One sequence's bad words.

    Attributes:
        single: tokens that are bad by themselves.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.single = [word[0] for word in words if len(word) == 1]
        #: Longer words, by the token before their last: at most one look-up a step.
        self._by_token: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                entry = (list(word[:-1]), word[-1])
                self._by_token.setdefault(word[-2], []).append(entry)

    @property
    def has_longer(self) -> bool:
        """Whether some word has more than one token."""
        return bool(self._by_token)

    def banned_after(self, output: list[int]) -> list[int]:
        """Tokens that would complete a word at the output's end."""
        if not output:
            return []
        return [
            last
            for prefix, last in self._by_token.get(output[-1], ())
            if output[-len(prefix) :] == prefix
        ]
