"""Checks of one value. Each raises `InvalidRequest` that names the field. Torch-free."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from engine.contract.errors import InvalidRequest

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


class SafePattern:
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


INT_LIMIT = 2**31 - 1


def format_value(value: Any) -> str:
    """A value for an error message: short, whatever a client sent."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of over 4300 digits; lists in lists in lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def check_number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    """A finite real number within [low, high] (or (low, high])."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequest(
            f"{name} must be a finite number, got {format_value(value)}.", param=name
        )
    if value < low or value > high or (low_open and value == low):
        left = "(" if low_open else "["
        raise InvalidRequest(
            f"{name} must be in {left}{low:g}, {high:g}], got {format_value(value)}.", param=name
        )


def check_int(name: str, value: Any, low: int, high: int = INT_LIMIT) -> None:
    """An int (no bool) within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {format_value(value)}.", param=name)
    if value < low or value > high:
        raise InvalidRequest(
            f"{name} must be in [{low}, {high}], got {format_value(value)}.", param=name
        )


def check_token_ids(name: str, ids: Any, limit: int) -> None:
    """A list of at most `limit` token ids."""
    if not isinstance(ids, list) or len(ids) > limit:
        raise InvalidRequest(f"{name} must be a list of at most {limit} token ids.", param=name)
    for token in ids:
        check_int(name, token, 0)


def is_valid_utf8(text: str) -> bool:
    """Whether the text can be written as UTF-8: it holds no lone surrogate."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


# Checks of structured outputs' sources bound what reaches the grammar compiler, which decides
# whether a source is valid. Depth is counted without recursion, so that no input can exhaust the
# stack.


#: Of a schema, regex, grammar or structural tag, as text; of all choices together.
MAX_SOURCE_CHARS = 131_072
#: Of arrays and objects in a schema, or of brackets in a regex or a grammar.
MAX_DEPTH = 64
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096
MAX_STRUCTURES = 128
MAX_TAG_CHARS = 1024


def check_source(name: str, text: Any) -> None:
    """A non-empty text of at most MAX_SOURCE_CHARS whose brackets nest at most MAX_DEPTH deep."""
    _check_text(name, text)
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}" and depth:
            depth -= 1
    if deepest > MAX_DEPTH:
        raise _too_deep(name)


def check_schema(name: str, schema: Any) -> None:
    """A JSON Schema: a dict of plain JSON values, or JSON text of an object."""
    if isinstance(schema, str):
        schema = parse_object(name, schema)
    elif not isinstance(schema, dict):
        raise InvalidRequest(
            f"{name} must be a JSON schema (an object or JSON text), got {format_value(schema)}.",
            param=name,
        )
    check_json(name, schema)


def check_json(name: str, value: Any) -> None:
    """Plain JSON of at most MAX_DEPTH levels and about MAX_SOURCE_CHARS of text."""
    stack, size = [(value, 1)], 0
    while stack:
        item, depth = stack.pop()
        if isinstance(item, dict | list) and depth > MAX_DEPTH:
            raise _too_deep(name)
        size += _cost(name, item)
        # Each entry has a character at least: what holds too many isn't looked at one by one.
        entries = len(item) if isinstance(item, dict | list) else 0
        if size + entries > MAX_SOURCE_CHARS:
            raise _too_long(name)
        if isinstance(item, dict):
            for key, entry in item.items():
                size += _cost(name, _key(name, key))
                stack.append((entry, depth + 1))
        elif isinstance(item, list):
            stack.extend((entry, depth + 1) for entry in item)


def check_choice(name: str, choices: Any) -> None:
    """1 to MAX_CHOICES different non-empty strings."""
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequest(
            f"{name} must be a list of 1 to {MAX_CHOICES} strings, got {format_value(choices)}.",
            param=name,
        )
    for choice in choices:
        if not isinstance(choice, str) or not 0 < len(choice) <= MAX_CHOICE_CHARS:
            raise InvalidRequest(
                f"{name} must hold strings of 1 to {MAX_CHOICE_CHARS} characters, "
                f"got {format_value(choice)}.",
                param=name,
            )
        if not is_valid_utf8(choice):
            raise InvalidRequest(f"{name} holds a lone surrogate.", param=name)
    if sum(map(len, choices)) > MAX_SOURCE_CHARS:
        raise _too_long(name)


def check_structural_tag(name: str, text: Any) -> None:
    """JSON text {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    tag = parse_object(name, text)
    check_json(name, tag)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    for key, entries in (("structures", structures), ("triggers", triggers)):
        if not isinstance(entries, list) or not 0 < len(entries) <= MAX_STRUCTURES:
            raise InvalidRequest(
                f"{name} needs {key!r}, a list of 1 to {MAX_STRUCTURES} entries.", param=name
            )
    for trigger in triggers or ():
        _check_tag_text(name, "a trigger", trigger)
    for structure in structures or ():
        _check_structure(name, structure, triggers or [])


def _check_structure(name: str, structure: Any, triggers: list[str]) -> None:
    if not isinstance(structure, dict) or set(structure) != {"begin", "schema", "end"}:
        raise InvalidRequest(f"{name}: a structure has 'begin', 'schema' and 'end'.", param=name)
    _check_tag_text(name, "'begin'", structure["begin"])
    if structure["end"] != "":
        _check_tag_text(name, "'end'", structure["end"])
    if not isinstance(structure["schema"], dict):
        raise InvalidRequest(f"{name}: 'schema' must be a JSON schema object.", param=name)
    if not any(structure["begin"].startswith(trigger) for trigger in triggers):
        raise InvalidRequest(
            f"{name}: {format_value(structure['begin'])} begins with none of the triggers.",
            param=name,
        )


def parse_object(name: str, text: Any) -> dict[str, Any]:
    """The JSON object that `text` holds."""
    _check_text(name, text)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise _too_deep(name) from error
    except ValueError as error:
        raise InvalidRequest(f"{name} is no JSON: {error}.", param=name) from error
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{name} must be a JSON object, got {format_value(value)}.", param=name
        )
    return value


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(
            f"{name} must be a non-empty string, got {format_value(text)}.", param=name
        )
    if len(text) > MAX_SOURCE_CHARS:
        raise _too_long(name)
    if not is_valid_utf8(text):
        raise InvalidRequest(f"{name} holds a lone surrogate.", param=name)


def _check_tag_text(name: str, what: str, text: Any) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TAG_CHARS:
        raise InvalidRequest(
            f"{name}: {what} must be a string of 1 to {MAX_TAG_CHARS} characters.", param=name
        )


def _key(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise InvalidRequest(
            f"{name} has a key that is no string: {format_value(key)}.", param=name
        )
    return key


def _cost(name: str, item: Any) -> int:
    """About how many characters a value takes as JSON text."""
    if isinstance(item, str):
        if not is_valid_utf8(item):
            raise InvalidRequest(f"{name} holds a lone surrogate.", param=name)
        return len(item) + 3
    if item is None or isinstance(item, bool | dict | list):
        return 5
    if isinstance(item, float) and item - item == 0:
        return 8
    if isinstance(item, int) and item.bit_length() <= 64:
        return 8
    raise InvalidRequest(
        f"{name} holds {format_value(item)}, which is no JSON value here.", param=name
    )


def _too_deep(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is nested too deep; {MAX_DEPTH} levels are the most.", param=name
    )


def _too_long(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is too long; {MAX_SOURCE_CHARS} characters are the most.", param=name
    )
