"""`SafePattern`: an untrusted regular expression, matched in bounded time. Torch-free."""

from __future__ import annotations

import math
import re
import time

import regex

MAX_PATTERN_CHARS = 512
#: Maximum product of all counts (`a{7}`) of a pattern: `regex` expands them when it compiles,
#: without a limit. Layer names need only numbers of a few digits.
MAX_REPEATS = 1000
#: Maximum CPU seconds for one name, and for all names together: the largest mixtures of experts
#: have
#: some 10^5 names, which take 0.3 s.
MATCH_TIMEOUT_S, TOTAL_TIMEOUT_S = 1.0, 2.0

_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
#: Syntax with different meanings in `re` and `regex`: approximate matches, POSIX classes.
_AMBIGUOUS = re.compile(r"\{(?!\d+,?\d*\}|,\d+\})|\[:")
_ESCAPED = re.compile(r"\\.", re.DOTALL)


class SafePattern:
    """A pattern that matches like `re.match`, from the start of a name.

    Raises ValueError, with the reason, for a pattern that is invalid, too long, repeats too often
    or has different meanings in `regex` and `re`.

    Attributes:
        elapsed_s: CPU seconds that all matches took.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN_CHARS:
            raise ValueError(f"is longer than {MAX_PATTERN_CHARS} characters")
        counts = [max(int(low or 1), int(high or 1), 1) for low, high in _COUNT.findall(text)]
        if math.prod(counts) > MAX_REPEATS:
            raise ValueError(f"repeats its parts more than {MAX_REPEATS} times")
        if ambiguous := _AMBIGUOUS.search(_ESCAPED.sub("", text)):
            raise ValueError(f"has an unescaped {ambiguous[0]!r}")
        try:
            re.compile(text)
            self._regex = regex.compile(text)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is no pattern: {error}") from error
        self.elapsed_s = 0.0

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the name or its beginning.

        Raises ValueError once one name, or all names together, took too long.
        """
        started = time.thread_time()
        try:
            match = self._regex.match(name, timeout=MATCH_TIMEOUT_S)
        except TimeoutError:
            raise ValueError("takes too long to match") from None
        self.elapsed_s += time.thread_time() - started
        if self.elapsed_s > TOTAL_TIMEOUT_S:
            raise ValueError("takes too long to match")
        return match is not None
