"""`StopChecker`: detects stop strings in streamed text, across token boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.text.tokenizer import Tokenizer

#: Precedes a word that is to be tokenized as in the middle of a text.
_ANCHOR = "\n"


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Return token sequences of the words: at a text's start, inside a text, after a space.

    A word's tokens differ in these positions, and all must be forbidden. A model may still spell a
    word with other tokens than its tokenizer would use (letter by letter, say).
    """
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ")
        spellings = (
            tokenizer.encode_as_text(bare),
            _inside(tokenizer, bare),
            _inside(tokenizer, " " + bare),
        )
        for ids in spellings:
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of `text` inside a text; none if it merges with the text before it."""
    prefix = tokenizer.encode_as_text(_ANCHOR)
    ids = tokenizer.encode_as_text(_ANCHOR + text)
    return ids[len(prefix) :] if ids[: len(prefix)] == prefix else []


class _Matcher:
    """Knuth-Morris-Pratt search for one stop string, whose table is computed on demand.

    Attributes:
        state: number of the stop string's characters that the text so far ends with.
    """

    __slots__ = ("_fail", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        #: `_fail[k]`: length of the longest proper prefix of `stop[:k]` that is also its suffix.
        self._fail = [0, 0]

    def _fallback(self, state: int) -> int:
        """Return `_fail[state]`, computing each entry once."""
        fail, stop = self._fail, self.stop
        while len(fail) <= state:
            last = len(fail) - 1
            k = fail[last]
            while k and stop[last] != stop[k]:
                k = fail[k]
            fail.append(k + 1 if stop[last] == stop[k] else 0)
        return fail[state]

    def feed(self, text: str, limit: int, may_stop: bool) -> int:
        """Read `text[:limit]`; return the number of characters until the match, or 0."""
        stop, size, state = self.stop, len(self.stop), self.state
        position = 0
        while position < limit:
            if state == 0:
                position = text.find(stop[0], position, limit)
                if position < 0:
                    break
            char = text[position]
            while state and stop[state] != char:
                state = self._fallback(state)
            if stop[state] == char:
                state += 1
            position += 1
            if state == size:
                if may_stop:
                    return position
                state = self._fallback(state)
        self.state = state
        return 0


class StopChecker:
    """Holds back only text that may still become a stop string.

    The stop string that completes first wins. Of several that end at the same character the longest
    wins, then the order of the list. The result doesn't depend on how the text is cut into pushes.

    Args:
        stops: up to 64 non-empty strings.
        include_stop_str_in_output: whether the emitted text ends with the stop string or before it.
    """

    def __init__(
        self, stops: Sequence[str] | None, include_stop_str_in_output: bool = False
    ) -> None:
        self._matchers = [_Matcher(stop) for stop in stops or ()]
        self._include = include_stop_str_in_output
        self._withheld = ""
        #: The stop string that matched, or None.
        self.matched: str | None = None

    def append(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Return text that can be emitted, and the matched stop string, if any.

        With `may_stop=False` (the output is shorter than `min_tokens`) stop strings that end in
        `text` are ordinary text. After a match nothing more is emitted.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._matchers or not text:
            return text, None
        best: tuple[int, int] | None = None  # (end, -length): the minimum wins
        for matcher in self._matchers:
            end = matcher.feed(text, best[0] if best else len(text), may_stop)
            if end and (best is None or (end, -len(matcher.stop)) < best):
                best = (end, -len(matcher.stop))
                self.matched = matcher.stop
        if best is not None:
            return self._finish(text[: best[0]], -best[1]), self.matched
        keep = max(matcher.state for matcher in self._matchers)
        pending = self._withheld + text
        self._withheld = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def _finish(self, text: str, length: int) -> str:
        """Return the output's last text: up to the end of the stop string, or its beginning."""
        text, self._withheld = self._withheld + text, ""
        return text if self._include else text[: len(text) - length]

    def flush(self) -> str:
        """Return the text held back, at the end of the output; "" after a match."""
        withheld, self._withheld = self._withheld, ""
        return withheld
