"""Schemas whose `patternProperties` match no key but those that have names of their own.

After a named key the backend would still take a comma for the sake of the pattern, and no key could
follow: {"properties": {"a": X}, "patternProperties": {"^a$": Y}, "additionalProperties": false}.
Such a pattern says something of the named keys alone, so it's moved to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.structured.backend import allows_any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_KEY = '{"'
#: What holds values, not schemas.
_VALUES = ("enum", "const", "default", "examples")


def settle_patterns(schema: Any, tokenizer: LLTokenizer) -> None:
    """Move patterns that only named keys match to these keys, in place."""
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(value for name, value in item.items() if name not in _VALUES)
            parts = _together(item)
            if any(part.get("patternProperties") for part in parts):
                _settle(parts, tokenizer)


def _together(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema and those of its `allOf`: one object must fulfil them all."""
    parts, waiting = [], [schema]
    while waiting:
        part = waiting.pop()
        parts.append(part)
        inner = part.get("allOf")
        if isinstance(inner, list):
            waiting += [each for each in inner if isinstance(each, dict)]
    return parts


def _settle(parts: list[dict[str, Any]], tokenizer: LLTokenizer) -> None:
    names = dict.fromkeys(name for part in parts for name in _names(part))
    others: list[Any] = [_keys_of(part) for part in parts]
    if not names or _takes_a_key(others, names, tokenizer):
        return
    for part in parts:
        patterns = part.pop("patternProperties", {})
        properties = part.setdefault("properties", {})
        if isinstance(patterns, dict) and isinstance(properties, dict):
            for pattern, schema in patterns.items():
                for name in names:
                    if _takes_a_key([{**_only(pattern), "required": [name]}], {}, tokenizer):
                        known = properties.get(name, True)
                        properties[name] = {"allOf": [known, schema]}


def _names(part: dict[str, Any]) -> list[str]:
    properties, required = part.get("properties"), part.get("required")
    found = list(properties) if isinstance(properties, dict) else []
    listed = required if isinstance(required, list) else []
    return found + [name for name in listed if isinstance(name, str)]


def _keys_of(part: dict[str, Any]) -> dict[str, Any]:
    """Which keys a schema takes, whatever their values are."""
    patterns, properties = part.get("patternProperties"), part.get("properties")
    return {
        "patternProperties": {
            pattern: value is not False
            for pattern, value in (patterns if isinstance(patterns, dict) else {}).items()
        },
        "properties": dict.fromkeys(properties if isinstance(properties, dict) else (), True),
        "additionalProperties": part.get("additionalProperties") is not False,
    }


def _only(pattern: str) -> dict[str, Any]:
    return {"patternProperties": {pattern: True}, "additionalProperties": False}


def _takes_a_key(parts: list[Any], names: dict[str, None], tokenizer: LLTokenizer) -> bool:
    """Whether an object of all `parts` may have a key beside `names`.

    True as well where the backend can't say: compiling the whole schema will.
    """
    from llguidance import LLMatcher

    probe = {
        "type": "object",
        "allOf": parts,
        "properties": dict.fromkeys(names, False),
        "minProperties": 1,
    }
    grammar = LLMatcher.grammar_from_json_schema(probe, overrides={"whitespace_flexible": False})
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return "nsatisfiable" not in matcher.get_error()
    matcher.consume_tokens(tokenizer.tokenize_str(_KEY))
    allowed = not matcher.is_error() and allows_any(matcher, tokenizer.vocab_size)
    return allowed and not matcher.is_error()
