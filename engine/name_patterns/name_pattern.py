"""Regular expressions of a stranger's file, matched without going back over what was tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

#: Of a pattern, in characters.
_MOST_PATTERN = 512
#: Groups in groups.
_MOST_DEPTH = 16
#: Of all matches of a pattern: a name takes one for each part of the pattern, repeats of groups a
#: few more. The largest mixtures of experts have some 10^5 names.
_MOST_STEPS = 1 << 23

_LOOKS = {"(?=": True, "(?!": False}
_OPENINGS = ("(?:", *_LOOKS)
_ESCAPES = "dDwWsS"
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")


class NamePattern:
    """A pattern as `re.match` takes it, from the start of a name.

    The places that a name can be matched up to are the bits of a number, and each part of the
    pattern turns the places before it into those behind it, all at once; so time grows with the
    name's length and not with the ways to match it. (Cameron et al., "Bitwise data parallelism in
    regular expression matching", 2014.)

    Raises ValueError, which says why, for a pattern that is none, too long, or has back references,
    boundaries, flags or other parts that names of layers don't need.

    Attributes:
        left: how many steps all calls together may still take.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _MOST_PATTERN:
            raise ValueError(f"is longer than {_MOST_PATTERN} characters")
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is no pattern: {error}") from error
        self._part = _Parser(text).whole()
        self.left = _MOST_STEPS

    def matches(self, name: str) -> bool:
        """Whether it matches the name, or its beginning.

        Raises ValueError once all calls together have taken too many steps.
        """
        walk = _Walk(name, self.left)
        found = self._part(walk, 1)
        self.left = walk.left
        return bool(found)


class _Walk:
    """A name that is matched; place n is bit n, the place before character n."""

    def __init__(self, name: str, left: int) -> None:
        self.name, self.left = name, left
        self.last = 1 << len(name)
        self._of_char: dict[str, int] = {}
        self._of_atom: dict[str, int] = {}
        self._of_text: dict[str, int] = {}

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError("takes too many steps to match")

    def like(self, atom: str) -> int:
        """Places whose character is one that `atom` stands for."""
        found = self._of_atom.get(atom)
        if found is None and atom == ".":
            found = self.last - 1 if "\n" not in self.name else None
        if found is None:
            self._count_chars()
            found = sum(at for char, at in self._of_char.items() if _is_like(atom, char))
            self._of_atom[atom] = found
        return found

    def _count_chars(self) -> None:
        if not self._of_char:
            for at, char in enumerate(self.name):
                self._of_char[char] = self._of_char.get(char, 0) | 1 << at

    def starts(self, text: str) -> int:
        """Places where a text starts."""
        known = self._of_text.get(text)
        if known is not None:
            return known
        found, at = 0, self.name.find(text)
        while at >= 0:
            found |= 1 << at
            at = self.name.find(text, at + 1)
        self._of_text[text] = found
        return found


@lru_cache(maxsize=1 << 14)
def _is_like(atom: str, char: str) -> bool:
    return re.fullmatch(atom, char) is not None


_Part = Callable[[_Walk, int], int]
"""From the places before a part to those behind it."""


def _one(atom: str) -> _Part:
    def match(walk: _Walk, places: int) -> int:
        walk.step()
        return (places & walk.like(atom)) << 1

    return match


def _words(text: str) -> _Part:
    """Characters that stand for themselves."""

    def match(walk: _Walk, places: int) -> int:
        walk.step()
        return (places & walk.starts(text)) << len(text)

    return match


def _is_itself(atom: str) -> bool:
    escaped = len(atom) == 2 and atom[0] == "\\" and not atom[1].isalnum()
    return escaped or (len(atom) == 1 and atom != ".")


def _run(atom: str) -> _Part:
    """Any number of characters that are alike: a carry runs through them."""

    def match(walk: _Walk, places: int) -> int:
        walk.step()
        alike = walk.like(atom)
        return (((places & alike) + alike) ^ alike) | places

    return match


def _start(walk: _Walk, places: int) -> int:
    return places & 1


def _end(walk: _Walk, places: int) -> int:
    behind = walk.last >> 1 if walk.name.endswith("\n") else 0
    return places & (walk.last | behind)


def _joined(parts: list[_Part]) -> _Part:
    def match(walk: _Walk, places: int) -> int:
        for part in parts:
            if not places:
                break
            places = part(walk, places)
        return places

    return match


def _either(ways: list[_Part]) -> _Part:
    def match(walk: _Walk, places: int) -> int:
        walk.step()
        found = 0
        for way in ways:
            found |= way(walk, places)
        return found

    return match


def _repeated(part: _Part, least: int, most: int | None) -> _Part:
    def match(walk: _Walk, places: int) -> int:
        found, count = (places if least == 0 else 0), 0
        while places and (most is None or count < most):
            walk.step()
            before, places = places, part(walk, places)
            count += 1
            if count >= least:
                if not places & ~found:
                    break
                found |= places
            elif places == before:  # nothing moves any more
                return places
        return found

    return match


def _look(part: _Part, wanted: bool) -> _Part:
    """Places from which the part is found ahead, or isn't."""

    def match(walk: _Walk, places: int) -> int:
        found = 0
        for place in _bits(places):
            walk.step()
            if bool(part(walk, place)) == wanted:
                found |= place
        return found

    return match


def _bits(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest
        places ^= lowest


class _Parser:
    """Of a text that `re` takes."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def whole(self) -> _Part:
        found = self._ways()
        if self._at < len(self._text):
            raise ValueError(f"has {self._text[self._at :]!r}, which isn't read here")
        return found

    def _takes(self, wanted: str) -> bool:
        found = self._text.startswith(wanted, self._at)
        self._at += len(wanted) if found else 0
        return found

    def _ways(self) -> _Part:
        ways = [self._sequence()]
        while self._takes("|"):
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else _either(ways)

    def _sequence(self) -> _Part:
        parts, text = [], ""
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            found = self._counted()
            if isinstance(found, str):
                text += found
                continue
            parts += [_words(text), found] if text else [found]
            text = ""
        return _joined([*parts, _words(text)] if text else parts)

    def _counted(self) -> str | _Part:
        """A character that stands for itself, once, or a part."""
        atom = self._atom()
        part = _one(atom) if isinstance(atom, str) else atom
        count = self._count()
        if count is None:
            return atom[-1] if isinstance(atom, str) and _is_itself(atom) else part
        least, most = count
        if isinstance(atom, str) and most is None:
            return _joined([_repeated(part, least, least), _run(atom)])
        return _repeated(part, least, most)

    def _count(self) -> tuple[int, int | None] | None:
        """How often; lazy or not is the same, since all ways are tried."""
        for sign, count in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                self._end_count()
                return count
        found = _COUNT.match(self._text, self._at)
        if found is None or found[0] == "{}":
            return None
        self._at = found.end()
        self._end_count()
        least = int(found[1] or 0)
        return least, (int(found[3]) if found[3] else None if found[2] else least)

    def _end_count(self) -> None:
        self._takes("?")
        if self._text.startswith("+", self._at):
            raise ValueError("has a possessive repeat, which isn't read here")

    def _atom(self) -> str | _Part:
        """A character, as a pattern of its own, or a part."""
        if self._takes("^"):
            return _start
        if self._takes("$"):
            return _end
        if self._text.startswith("(", self._at):
            return self._group()
        start = self._at
        if self._takes("["):
            self._class()
        elif self._takes("\\"):
            self._escape()
        else:
            self._at += 1
            found = self._text[start]
            return found if found == "." else re.escape(found)
        return self._text[start : self._at]

    def _class(self) -> None:
        """To behind its bracket; one that comes first is a character."""
        self._takes("^")
        self._takes("]")
        while not self._takes("]"):
            self._at += 2 if self._text[self._at] == "\\" else 1

    def _escape(self) -> None:
        char = self._text[self._at]
        if char.isalnum() and char not in _ESCAPES:
            raise ValueError(f"has \\{char}, which isn't read here")
        self._at += 1

    def _group(self) -> _Part:
        opening = next((kind for kind in _OPENINGS if self._takes(kind)), None)
        if opening is None:
            self._takes("(")
            if self._text.startswith("?", self._at):
                shown = self._text[self._at : self._at + 3]
                raise ValueError(f"has ({shown}, which isn't read here")
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise ValueError(f"has more than {_MOST_DEPTH} groups in each other")
        part = self._ways()
        self._depth -= 1
        self._takes(")")
        return _look(part, _LOOKS[opening]) if opening in _LOOKS else part
