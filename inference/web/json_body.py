"""JSON bodies, read strictly: size, depth, duplicate keys, NaN and lone surrogates.

The standard library's parser is used because only it reports duplicate keys; its C scanner reads a
chat request in microseconds. With a body of megabytes it would block everything else (half a second
for five million escapes in a string): msgspec parses those, in a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import JSONParser

from engine.contract.errors import InvalidRequest
from inference.errors import UnsupportedMediaType
from inference.loop.offload import MAX_INLINE_CHARS

#: Maximum number of values in one body. Prompts of token ids are the longest lists in practice.
MAX_VALUES = 500_000
#: Maximum number of objects, arrays and entries of objects in one body: these take validation time.
MAX_NODES = 50_000
#: Maximum number of entries of an array with one of these names.
MAX_ITEMS = {"messages": 8192, "input": 8192, "content": 8192}
#: Bytes that are scanned in one go, so that other threads can run in between.
_CHUNK_BYTES = 1 << 18


class JsonTokenCounts(NamedTuple):
    """Counts of a JSON text's structural characters outside of strings."""

    commas: int = 0
    brackets: int = 0
    colons: int = 0

    @property
    def exceeds_limit(self) -> bool:
        """Whether they imply more values, or more objects, than a body may have."""
        nodes = self.brackets + self.colons
        return self.commas + self.brackets > MAX_VALUES or nodes > MAX_NODES


def check_values(body: bytes) -> None:
    """Raise `InvalidRequest` for a body of too many values, without parsing it.

    A body within the byte limit can still hold millions of objects. Python's parsers and pydantic
    process them without a pause while all other streams wait, so they are counted first.
    """
    if not _marks_anywhere(body).exceeds_limit:
        return  # even if those inside strings are counted
    if count_tokens_outside_strings(body).exceeds_limit:
        raise _too_many(_largest_field(body))


def _marks_anywhere(body: bytes) -> JsonTokenCounts:
    """Cheap upper bound of the counts, which includes characters inside strings."""
    counts = JsonTokenCounts()
    for start in range(0, len(body), _CHUNK_BYTES):
        chunk_counts = _marks(body[start : start + _CHUNK_BYTES])
        counts = JsonTokenCounts(*(a + b for a, b in zip(counts, chunk_counts, strict=True)))
        if counts.exceeds_limit:
            break
    return counts


def count_tokens_outside_strings(body: bytes) -> JsonTokenCounts:
    """Count structural characters outside of strings, up to the limits."""
    counts, inside = JsonTokenCounts(), 0
    for chunk in _chunks(body):
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        chunk_counts = _marks(b"".join(parts[inside::2]))
        counts = JsonTokenCounts(*(a + b for a, b in zip(counts, chunk_counts, strict=True)))
        if counts.exceeds_limit:
            break
        inside ^= (len(parts) - 1) & 1
    return counts


def _chunks(body: bytes) -> Iterator[bytes]:
    """The body in chunks that don't end within an escape."""
    start = 0
    while start < len(body):
        chunk = body[start : start + _CHUNK_BYTES]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 and len(chunk) > 1:
            chunk = chunk[:-1]
        yield chunk
        start += len(chunk)


def _marks(text: bytes) -> JsonTokenCounts:
    return JsonTokenCounts(text.count(b","), text.count(b"{") + text.count(b"["), text.count(b":"))


def _largest_field(body: bytes) -> str | None:
    """The field that takes up most of the body's bytes."""
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


def check_node_count(body: dict[str, Any]) -> None:
    """Raise `InvalidRequest` naming the field that has too many nodes."""
    remaining = MAX_NODES
    for name, value in body.items():
        remaining -= _nodes(name, value, remaining)
        if remaining < 0:
            raise _too_many(name)


def _nodes(field: str, value: Any, max_nodes: int) -> int:
    """Number of objects, arrays and entries of objects in a value, counted up to the limit."""
    count, level = 0, [(field, value)]
    while level and count <= max_nodes:
        name, parent = level.pop()
        if isinstance(parent, dict):
            count += 1 + len(parent)
            if count <= max_nodes:
                level += [(k, v) for k, v in parent.items() if isinstance(v, dict | list)]
        elif isinstance(parent, list):
            count += 1
            max_items = MAX_ITEMS.get(name, MAX_VALUES)
            if len(parent) > max_items:
                raise InvalidRequest(
                    f"'{name}' may hold at most {max_items} entries, got {len(parent)}.",
                    param=field[:100],
                    code="too_many_values",
                )
            level += [("", v) for v in parent if isinstance(v, dict | list)]
    return count


#: Bodies beyond this are parsed in a thread.
LARGE_BYTES = MAX_INLINE_CHARS
#: With fewer brackets than this there can't be too many objects.
FAST_PATH_MAX_BRACKETS = 1024
#: Maximum number of escapes in a large body with lone surrogates, which only the slow parser reads.
_MAX_ESCAPES = 200_000
_BOM = b"\xef\xbb\xbf"
#: A JSON escape of a surrogate. Only a body with one can hold a lone surrogate.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


#: Maximum nesting of arrays and objects in a body.
MAX_JSON_DEPTH = 64


def parse_object(body: bytes, max_depth: int = MAX_JSON_DEPTH) -> dict[str, Any]:
    """The JSON object in a request body.

    Lone surrogates, which UTF-8 can't encode, become U+FFFD.

    Raises:
        InvalidRequest: invalid UTF-8 or JSON, a duplicate key, NaN or infinity, deeper than
            `max_depth`, too many values, or not an object.
    """
    check_values(body)
    try:
        value = _parse_large(body) if len(body) > LARGE_BYTES else _parse(body)
    except InvalidRequest:
        raise
    except UnicodeDecodeError:
        raise _invalid_json("The body is not valid UTF-8.") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except msgspec.DecodeError as error:
        raise _invalid_json(f"The body is not valid JSON: {error}.") from None
    except json.JSONDecodeError as error:
        raise _invalid_json(
            f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise _invalid_json(f"The body is not valid JSON: {str(error).split(';')[0]}.") from None
    if not isinstance(value, dict):
        raise _invalid_json("The body must be a JSON object.")
    # Counting brackets is cheap and gives an upper bound of the depth, enough for most bodies.
    brackets = body.count(b"{") + body.count(b"[")
    if brackets > max_depth and _deeper_than(value, max_depth):
        raise _too_deep(max_depth)
    if brackets > FAST_PATH_MAX_BRACKETS or len(body) > LARGE_BYTES:
        check_node_count(value)
    if _SURROGATE_ESCAPE.search(body):
        value = _without_surrogates(value)
    return value


def _parse(body: bytes) -> Any:
    return _decoder.decode(body.decode("utf-8-sig" if body.startswith(_BOM) else "utf-8"))


def _parse_large(body: bytes) -> Any:
    """Parse with the fast parser, and detect duplicate keys by the count of all keys."""
    try:
        value = msgspec.json.decode(body.removeprefix(_BOM))
    except msgspec.DecodeError:
        # msgspec accepts neither lone surrogates nor integers beyond 64 bits.
        if body.count(b"\\") > _MAX_ESCAPES:
            raise
        return _parse(body)
    if count_tokens_outside_strings(body).colons != _count_keys(value):
        raise _invalid_json("A key occurs twice in one object.")
    return value


def _count_keys(value: Any) -> int:
    """Number of keys of all objects in a value."""
    count, level = 0, [value]
    while level:
        parent = level.pop()
        if isinstance(parent, dict):
            count += len(parent)
            level += [child for child in parent.values() if isinstance(child, dict | list)]
        elif isinstance(parent, list):
            level += [child for child in parent if isinstance(child, dict | list)]
    return count


def _invalid_json(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_json")


def _too_deep(max_depth: int) -> InvalidRequest:
    return _invalid_json(f"The body holds objects or arrays more than {max_depth} levels deep.")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's pairs as a dict. Raises `InvalidRequest` naming a duplicate key."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(
                    f"The key {key[:100]!r} occurs twice in one object.",
                    param=key[:100],
                    code="invalid_json",
                )
            seen.add(key)
    return result


def _refuse_constant(name: str) -> Any:
    raise _invalid_json(f"{name} is not JSON.")


_decoder = json.JSONDecoder(
    object_pairs_hook=_reject_duplicate_keys, parse_constant=_refuse_constant
)


def _deeper_than(value: Any, limit: int) -> bool:
    """Whether containers are nested more than `limit` deep, without recursion."""
    level: list[Any] = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _without_surrogates(value: Any) -> Any:
    """Replace each lone surrogate by U+FFFD, in keys too. The depth was checked before."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


@lru_cache(maxsize=256)
def _parses(content_type: str) -> bool:
    request: Any = SimpleNamespace(content_type=content_type)
    return DefaultContentNegotiation().select_parser(request, [JSONParser()]) is not None


def check_content_type(content_type: str) -> None:
    """Raise `UnsupportedMediaType` unless the body is `application/json`."""
    if content_type != "application/json" and not (
        "*" not in content_type and content_type and _parses(content_type[:512])
    ):
        raise UnsupportedMediaType(
            f"Content-Type must be application/json, got {content_type[:100]!r}."
        )


def check_content_encoding(coding: str | None) -> None:
    """Raise `UnsupportedMediaType` for a compressed body: decompression bombs aren't unpacked."""
    if coding and coding.strip().lower() != "identity":
        raise UnsupportedMediaType(
            f"Content-Encoding {coding[:100]!r} is not supported. Send the body as it is."
        )
