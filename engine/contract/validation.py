"""Checks of one value. Each raises `InvalidRequest` that names the field. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from engine.contract.errors import InvalidRequest

INT_LIMIT = 2**31 - 1


def format_value(value: Any) -> str:
    """A value for an error message, shortened whatever a client sent."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of over 4300 digits; deeply nested lists
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
        opening = "(" if low_open else "["
        raise InvalidRequest(
            f"{name} must be in {opening}{low:g}, {high:g}], got {format_value(value)}.", param=name
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


def check_task(model: str, tasks: Sequence[str], task: str) -> None:
    """Raise `InvalidRequest`, naming the model's tasks, unless `task` is one of them."""
    if task not in tasks:
        raise InvalidRequest(
            f"The model '{model}' doesn't do '{task}'. It does: {', '.join(tasks)}.",
            param="model",
            code="unsupported_task",
        )


def is_valid_utf8(text: str) -> bool:
    """Whether the text can be encoded as UTF-8: it contains no lone surrogate."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


# Checks of structured outputs' sources bound the input of the grammar compiler, which decides
# whether a source is valid. Depth is counted without recursion, so that no input can exhaust the
# stack.


#: Maximum characters of a schema, regex, grammar or structural tag as text; of all choices
#: together.
MAX_SOURCE_CHARS = 131_072
#: Maximum depth of arrays and objects in a schema, or of brackets in a regex or a grammar.
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
        # Each entry has at least one character: a container with too many isn't traversed.
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
    """Approximate number of characters of a value as JSON text."""
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
