"""Bounds on what a JSON body may hold, looked at before it's parsed and before it's validated.

A body within the limit of bytes can still hold millions of objects. Python's parsers and pydantic
go through them in one piece while everybody else's streams wait, so they're counted first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from engine.contract.errors import InvalidRequest

#: Values of all kinds in one body. Prompts of token ids are the longest lists there are.
MAX_VALUES = 500_000
#: Objects, arrays and the entries of objects in one body: what validation takes its time for.
MAX_NODES = 50_000
#: Entries of an array with one of these names.
MAX_ITEMS = {"messages": 8192, "input": 8192, "content": 8192}
#: Bytes that are looked at in one go, so that other threads come in between.
_PIECE = 1 << 18


class Marks(NamedTuple):
    """Signs of a JSON text that stand outside its strings."""

    commas: int = 0
    brackets: int = 0
    colons: int = 0

    @property
    def too_many(self) -> bool:
        """Whether they stand for more values, or for more objects, than a body may hold."""
        nodes = self.brackets + self.colons
        return self.commas + self.brackets > MAX_VALUES or nodes > MAX_NODES


def check_values(body: bytes) -> None:
    """Raise `InvalidRequest` for a body of too many values, without parsing it."""
    if not _marks_anywhere(body).too_many:
        return  # with those in strings counted too
    if marks_outside_strings(body).too_many:
        raise _too_many(_largest_field(body))


def _marks_anywhere(body: bytes) -> Marks:
    """The same without a look at strings: more than there are, and cheap."""
    found = Marks()
    for start in range(0, len(body), _PIECE):
        here = _marks(body[start : start + _PIECE])
        found = Marks(*(a + b for a, b in zip(found, here, strict=True)))
        if found.too_many:
            break
    return found


def marks_outside_strings(body: bytes) -> Marks:
    """Counts that stop where there are too many."""
    found, inside = Marks(), 0
    for piece in _pieces(body):
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        here = _marks(b"".join(parts[inside::2]))
        found = Marks(*(a + b for a, b in zip(found, here, strict=True)))
        if found.too_many:
            break
        inside ^= (len(parts) - 1) & 1
    return found


def _pieces(body: bytes) -> Iterator[bytes]:
    """The body in pieces that don't end within an escape."""
    start = 0
    while start < len(body):
        piece = body[start : start + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:
            piece = piece[:-1]
        yield piece
        start += len(piece)


def _marks(text: bytes) -> Marks:
    return Marks(text.count(b","), text.count(b"{") + text.count(b"["), text.count(b":"))


def _largest_field(body: bytes) -> str | None:
    """The body's field that takes most bytes."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    return max(fields, key=lambda name: len(fields[name]), default=None)


def _too_many(field: str | None) -> InvalidRequest:
    name = "The body" if field is None else f"'{field[:100]}'"
    return InvalidRequest(
        f"{name} holds too much: a body may hold {MAX_NODES} objects, arrays and entries of "
        f"objects, and {MAX_VALUES} values in all.",
        param=None if field is None else field[:100],
        code="too_many_values",
    )


def check_nodes(body: dict[str, Any]) -> None:
    """Raise `InvalidRequest` that names the field which holds too much."""
    left = MAX_NODES
    for name, value in body.items():
        left -= _nodes(name, value, left)
        if left < 0:
            raise _too_many(name)


def _nodes(field: str, value: Any, most: int) -> int:
    """Objects, arrays and entries of objects in a value, counted until there are too many."""
    count, level = 0, [(field, value)]
    while level and count <= most:
        name, parent = level.pop()
        if isinstance(parent, dict):
            count += 1 + len(parent)
            if count <= most:
                level += [(k, v) for k, v in parent.items() if isinstance(v, dict | list)]
        elif isinstance(parent, list):
            count += 1
            most_items = MAX_ITEMS.get(name, MAX_VALUES)
            if len(parent) > most_items:
                raise InvalidRequest(
                    f"'{name}' may hold at most {most_items} entries, got {len(parent)}.",
                    param=field[:100],
                    code="too_many_values",
                )
            level += [("", v) for v in parent if isinstance(v, dict | list)]
    return count
