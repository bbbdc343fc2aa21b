"""The few places that touch `llguidance`: its tokenizer, its limits, one compilation.

Used by the compile worker and, for what passed there, by the engine. `llguidance` is imported when
the first request needs it, numpy not at all: to import it takes longer than a worker's start.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


#: States of a grammar's lexer, 1 to 2 KB each: they grow while a grammar is used.
MAX_LEXER_STATES = 30_000
#: Items of the parser in one step: about 20,000 a millisecond.
STEP_MAX_ITEMS = 20_000
MAX_MESSAGE_CHARS = 400
#: The backend's messages about a client's grammar, in the words of JSON Schema.
_MESSAGES = (
    (r'Unimplemented keys: \["(.*)"\]', r"the schema's \1 can't be enforced"),
    (r"Unknown format: (.*)", r"the schema's format '\1' can't be enforced"),
    (r"Invalid type: (.*)", r"the schema's type '\1' is none of JSON's"),
    (r"Pointer '(.*)' does not exist", r"the schema's $ref '#\1' names nothing in it"),
    (r"Resource '(.*?)' is not present.*", r"the schema's $ref '\1' leads out of it"),
    (r"regex parse error:.* error: (.*)", r"the pattern can't be read: \1"),
    (r"Unsatisfiable schema: (.*)", r"no document can follow the schema: \1"),
    (
        r"oneOf constraints are not supported.*",
        "oneOf needs branches that exclude each other by type or constant; use anyOf",
    ),
)


class BadGrammar(Exception):
    """A grammar that can't be used, and why, for the client."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens, as both sides of the pipe need them.

    Attributes:
        tokenizer: the text of a `tokenizer.json`.
        size: how many ids the logits have, at least as many as the tokenizer.
        eos_token_ids: not empty.
    """

    tokenizer: str
    size: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_words(self) -> int:
        """int32 words of a row's bitmask."""
        return words_for(self.size)


def words_for(vocab_size: int) -> int:
    """int32 words that have a bit for each token."""
    return -(-vocab_size // 32)


def available() -> bool:
    """Whether the backend is installed."""
    return importlib.util.find_spec("llguidance") is not None


def load_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """The backend's tokenizer. Raises ValueError where it can't read the model's."""
    from llguidance import LLTokenizer

    eos = list(vocabulary.eos_token_ids)
    return LLTokenizer(vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=eos)


def build(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's start, its first mask computed.

    Building is lazy, so a grammar that costs too much often shows only at its first mask.

    Raises:
        BadGrammar: the grammar is wrong, over a limit, or matches nothing.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, step_max_items=STEP_MAX_ITEMS, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    raise_error(matcher)
    begins = allows_any(matcher, tokenizer.vocab_size)
    raise_error(matcher)
    if matcher.is_stopped() and not matcher.is_accepting():
        raise BadGrammar("nothing can match it")
    if not begins:
        raise BadGrammar("no token of this model can begin it")
    return matcher


def allows_any(matcher: LLMatcher, vocab_size: int) -> bool:
    """Whether the mask of the next token has any of `vocab_size` tokens."""
    row = (ctypes.c_int32 * words_for(vocab_size))()
    matcher.unsafe_compute_mask_ptr(ctypes.addressof(row), ctypes.sizeof(row))
    return any(bytes(row))


def raise_error(matcher: Any) -> None:
    """Raise `BadGrammar` if the matcher has failed."""
    if matcher.is_error():
        raise BadGrammar(short(matcher.get_error()))


def short(message: str) -> str:
    """The backend's message in plain words, without its internals, bounded."""
    text = message.split("<state>")[0].split("<non-verbose/>")[0]
    text = " ".join(text.split()).rstrip(".")
    for pattern, words in _MESSAGES:
        match = re.fullmatch(pattern, text)
        if match is not None:
            text = match.expand(words).replace('", "', " and ")
            break
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


# -- Schemas whose `patternProperties` match no key but those that have names of their own.
#
# After a named key the backend would still take a comma for the sake of the pattern, and no key
# could
# follow: {"properties": {"a": X}, "patternProperties": {"^a$": Y}, "additionalProperties": false}.
# Such a pattern says something of the named keys alone, so it's moved to them.


_KEY = '{"'
#: Keywords whose content is values, not schemas.
_VALUES = ("enum", "const", "default", "examples")


def simplify_pattern_properties(schema: Any, tokenizer: LLTokenizer) -> None:
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
            waiting += [item for item in inner if isinstance(item, dict)]
    return parts


def _settle(parts: list[dict[str, Any]], tokenizer: LLTokenizer) -> None:
    names = dict.fromkeys(name for part in parts for name in _names(part))
    constraints: list[Any] = [_keys_of(part) for part in parts]
    if not names or _allows_key(constraints, names, tokenizer):
        return
    for part in parts:
        patterns = part.pop("patternProperties", {})
        properties = part.setdefault("properties", {})
        if isinstance(patterns, dict) and isinstance(properties, dict):
            for pattern, schema in patterns.items():
                for name in names:
                    if _allows_key([{**_only(pattern), "required": [name]}], {}, tokenizer):
                        existing = properties.get(name, True)
                        properties[name] = {"allOf": [existing, schema]}


def _names(part: dict[str, Any]) -> list[str]:
    properties, required = part.get("properties"), part.get("required")
    names = list(properties) if isinstance(properties, dict) else []
    listed = required if isinstance(required, list) else []
    return names + [name for name in listed if isinstance(name, str)]


def _keys_of(part: dict[str, Any]) -> dict[str, Any]:
    """The keys that a schema allows, whatever their values are."""
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


def _allows_key(parts: list[Any], names: dict[str, None], tokenizer: LLTokenizer) -> bool:
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
