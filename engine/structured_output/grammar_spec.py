"""From `StructuredOutputsParams` to a spec (what travels and is cached) and to a grammar.

A spec is small JSON that names one grammar whatever request it came with. It becomes `llguidance`'s
own form of a grammar only inside the compile worker: converting is work on a client's input, too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.contract.json_schema import enforced_schema
from engine.contract.structured_outputs import JSON_WHITESPACE, StructuredOutputsParams
from engine.structured_output.backend_llguidance import simplify_pattern_properties

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar to be compiled.

    Attributes:
        data: UTF-8 JSON {"kind", "source", "options"}.
        key: SHA-256 of it; the same for two schemas that differ in white space alone.
    """

    data: bytes
    key: bytes


def make_grammar_spec(params: StructuredOutputsParams) -> GrammarSpec:
    """The spec of checked parameters. The order of a schema's keys counts: outputs follow it."""
    kind = params.kind
    source: Any = getattr(params, kind)
    if kind in ("json", "structural_tag") and isinstance(source, str):
        source = json.loads(source)
    options = {
        "disable_any_whitespace": params.disable_any_whitespace,
        "whitespace_pattern": params.whitespace_pattern,
    }
    data = json.dumps(
        {"kind": kind, "source": source, "options": options},
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()
    return GrammarSpec(data, hashlib.sha256(data).digest())


def grammar_text(data: bytes, tokenizer: LLTokenizer) -> str:
    """`llguidance`'s form of a spec. Raises ValueError for what can't be a grammar."""
    from llguidance import LLMatcher, grammar_from

    spec = json.loads(data)
    kind, source, options = spec["kind"], spec["source"], spec["options"]
    if kind == "json_object":
        kind, source = "json", {"type": "object"}
    if kind == "json":
        source = enforced_schema(source)
        simplify_pattern_properties(source, tokenizer)
        return LLMatcher.grammar_from_json_schema(source, overrides=_json_options(options))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        return grammar_from("choice", json.dumps(source, ensure_ascii=False))
    if kind == "grammar":
        return grammar_from("grammar", source)
    return _tag_grammar(source, options, tokenizer)


def _json_options(options: dict[str, Any]) -> JsonCompileOptions:
    """`llguidance`'s options for JSON."""
    if options["disable_any_whitespace"]:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": options["whitespace_pattern"] or JSON_WHITESPACE}


def _tag_grammar(tag: dict[str, Any], options: dict[str, Any], tokenizer: LLTokenizer) -> str:
    """Free text, and a schema after each trigger."""
    from llguidance import StructTag

    tags = []
    for structure in tag["structures"]:
        begin, schema = structure["begin"], enforced_schema(structure["schema"])
        simplify_pattern_properties(schema, tokenizer)
        trigger = next(text for text in tag["triggers"] if begin.startswith(text))
        tags.append(
            StructTag(
                trigger=trigger,
                begin=begin,
                grammar={**schema, "x-guidance": _json_options(options)},
                end=structure["end"],
            )
        )
    special = all(_is_special(item.trigger, tokenizer) for item in tags)
    return StructTag.to_grammar(tags, assume_special=special)


def _is_special(text: str, tokenizer: LLTokenizer) -> bool:
    """Whether a trigger is one of the model's special tokens, rather than ordinary text."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(ids) == 1 and tokenizer.is_special_token(ids[0])
