"""Pydantic's errors as one sentence and one field name, in OpenAI's manner."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

MAX_SHOWN_CHARS = 120


def describe_validation_error(error: ValidationError) -> dict[str, Any]:
    """`message`, `param` and `code` for the first error that helps most."""
    errors = error.errors(include_url=False, include_context=True)
    first = _most_telling(errors)
    param = _path(first["loc"])
    kind = first["type"]
    if kind == "missing":
        return {
            "message": f"Missing required parameter: '{param}'.",
            "param": param or None,
            "code": "missing_required_parameter",
        }
    text = first["msg"].removeprefix("Value error, ")
    shown = "" if kind == "value_error" else f" Got {_shown(first.get('input'))}."
    place = f"Invalid value for '{param}': " if param else ""
    return {
        "message": f"{place}{text}{'' if text.endswith('.') else '.'}{shown}",
        "param": param or None,
        "code": "invalid_type" if kind.endswith("_type") else "invalid_value",
    }


def _most_telling(errors: list[Any]) -> Any:
    """Of a union's errors, one for each member, the one that got furthest into the value."""
    first = errors[0]
    same_field = [item for item in errors if item["loc"][:1] == first["loc"][:1]]
    return max(
        same_field,
        key=lambda item: (
            sum(isinstance(part, int) for part in item["loc"]),
            item["type"] == "value_error",  # a union's member that fitted, but for its content
        ),
    )


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; the names that pydantic gives a union's members are left out."""
    path = ""
    for place, part in enumerate(location):
        if place and part == location[place - 1]:
            continue  # a union's tag, then the field of that name
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[:1].isupper() and part not in _UNION_TAGS:
            path += f".{part}" if path else part
    return path


#: What pydantic calls plain types among a union's members.
_UNION_TAGS = frozenset({"str", "int", "float", "bool", "dict", "list", "constrained"})


def _shown(value: Any) -> str:
    """A value for a message: bounded, whatever it is."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} with {len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a huge number"
    text = repr(value[:MAX_SHOWN_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN_CHARS + 2 else text[:MAX_SHOWN_CHARS] + "..."
