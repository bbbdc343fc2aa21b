"""Values of modules by the ends of their names, or by patterns of them, as PEFT writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.contract.checks import shown
from engine.name_patterns import NamePattern

#: A key without anything that a pattern is made of but dots, which stand for themselves.
_NAME = re.compile(r"[\w.-]+")
#: Keys that are patterns: each module's name is held against each.
_MOST_PATTERNS = 64
#: Of all of them together, over all names: some ten seconds.
_MOST_STEPS = 1 << 25


def ends_in(module: str, name: str) -> bool:
    """Whether a module's name, or its end from some dot on, is `name`."""
    return module == name or module.endswith(f".{name}")


class NamedValues:
    """Values by keys, of which the first one counts that is a name's end or matches it.

    A stranger may have written the keys, so patterns are matched in bounded time.

    Raises ValueError, which says what is wrong, for a key that is no pattern, or too many that are.
    """

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self._names: dict[str, tuple[int, float]] = {}
        self._patterns: list[tuple[int, NamePattern, float]] = []
        self._left = _MOST_STEPS
        for place, (key, value) in enumerate((values or {}).items()):
            if _NAME.fullmatch(key):
                self._names[key] = place, value
                continue
            if len(self._patterns) == _MOST_PATTERNS:
                raise ValueError(f"holds more than {_MOST_PATTERNS} patterns")
            try:
                pattern = NamePattern(rf"(.*\.)?({key})$")
            except ValueError as error:
                raise ValueError(f"holds {shown(key)}, which {error}") from error
            self._patterns.append((place, pattern, value))

    def of(self, module: str, default: float) -> float:
        """A module's value. Raises ValueError once all patterns have taken too many steps."""
        parts = module.split(".")
        ends = (".".join(parts[at:]) for at in range(len(parts)))
        named = [self._names[end] for end in ends if end in self._names]
        first, value = min(named, default=(-1, default))
        for place, pattern, other in self._patterns:
            if named and place > first:
                break
            if self._matches(pattern, module):
                return other
        return value

    def _matches(self, pattern: NamePattern, module: str) -> bool:
        before = pattern.left
        found = pattern.matches(module)
        self._left -= before - pattern.left
        if self._left < 0:
            raise ValueError("takes too long to look for")
        return found
