"""Schema of a stored conversation of the playground.

Turns are a tree: each refers to the one that it follows, and an edited question is a sibling of the
original. Texts are displayed as text, so only sizes and the structure are validated here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.contract.errors import InvalidRequest

#: Maximum size of the document as JSON, and of its searchable text.
MAX_CHARS, MAX_WORDS = 1_000_000, 100_000
MAX_TURNS = 1000
#: Maximum number of attachments per question.
MAX_PICTURES = 64
#: Maximum number of further models that answer the same question.
MAX_COMPARED = 3
#: Maximum number of MCP servers whose tools a conversation offers.
MAX_SERVERS = 16
#: Maximum size of a preset's prompt and options as JSON.
MAX_PRESET_CHARS = 100_000

Name = Annotated[str, Meta(max_length=64)]
Short = Annotated[str, Meta(max_length=256)]
#: A token's text, its log probability, its alternatives.
Scored = tuple[str, float, list[tuple[str, float]]]


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of the model and its result, from the user or the MCP server `server`.

    `failed`: whether the call failed.
    """

    id: Short
    name: Short
    arguments: str
    result: str | None = None
    server: Name = ""
    failed: bool = False


class Picture(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An image or a PDF of a question: the id of its file, and the file's name."""

    id: Name
    name: Short
    kind: Literal["image", "document"] = "image"


class AnswerFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Fields of an answer besides its position."""

    text: str
    model: Short = ""
    reasoning: str = ""
    thoughtFor: float = 0.0
    state: Literal["streaming", "done", "stopped", "failed"] = "done"
    stats: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    calls: list[Call] = []
    logprobs: list[Scored] = []
    at: Short = ""


class Turn(AnswerFields):
    """One turn. `parent`: the turn that it follows, None for a first one. `beside`: other models'
    answers to the same question.
    """

    id: Name
    parent: Name | None
    role: Literal["user", "assistant"]
    beside: Annotated[list[AnswerFields], Meta(max_length=MAX_COMPARED)] = []
    images: Annotated[list[Picture], Meta(max_length=MAX_PICTURES)] = []


class Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A conversation with its settings. `leaf`: the turn that was displayed last."""

    turns: Annotated[list[Turn], Meta(max_length=MAX_TURNS)]
    leaf: Name | None = None
    model: Short = ""
    compared: Annotated[list[Short], Meta(max_length=MAX_COMPARED)] = []
    system: str = ""
    tools: str = ""
    servers: Annotated[list[Name], Meta(max_length=MAX_SERVERS)] = []
    schema: str = ""
    settings: dict[str, Any] = {}


class PresetOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of a preset, which replace a conversation's."""

    model: Short = ""
    system: str = ""
    tools: str = ""
    servers: Annotated[list[Name], Meta(max_length=MAX_SERVERS)] = []
    schema: str = ""
    settings: dict[str, Any] = {}


def validate_preset_options(options: Any) -> dict[str, Any]:
    """The options that differ from their defaults. Raises `InvalidRequest`."""
    try:
        return dict(msgspec.to_builtins(msgspec.convert(options, PresetOptions)))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"options are invalid: {error}.", param="options") from error


def validate_document(document: Any) -> dict[str, Any]:
    """The document without unknown fields. Raises `InvalidRequest`."""
    size = len(json.dumps(document))
    if size > MAX_CHARS:
        raise InvalidRequest(
            f"A conversation may take {MAX_CHARS} characters, this one takes {size}.",
            param="document",
            code="conversation_too_long",
        )
    try:
        converted = msgspec.convert(document, Document)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"No conversation: {error}.", param="document") from error
    turn_ids: set[str | None] = {None}
    for turn in converted.turns:
        if turn.id in turn_ids or turn.parent not in turn_ids:
            raise InvalidRequest(
                f"Turn {turn.id[:64]!r} occurs twice, or before the turn that it follows.",
                param="document",
            )
        turn_ids.add(turn.id)
    if converted.leaf not in turn_ids:
        raise InvalidRequest("leaf isn't the id of a turn.", param="document")
    return dict(msgspec.to_builtins(converted))


def search_text(title: str, document: dict[str, Any]) -> str:
    """Searchable text: the title and all turns in lower case, without NUL."""
    texts = [title]
    for turn in document["turns"]:
        texts += [answer["text"] for answer in (turn, *turn.get("beside", []))]
    return "\n".join(texts).lower().replace("\0", "")[:MAX_WORDS]


def single_line(text: str) -> str:
    """The text as one line: runs of unprintable characters and spaces become a space."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def title_of(document: dict[str, Any]) -> str:
    """The first words of the first question."""
    text = next((turn["text"] for turn in document["turns"] if turn["role"] == "user"), "")
    line = " ".join(text.replace("\0", "").split())
    return (line[:60].rsplit(" ", 1)[0] + "…" if len(line) > 60 else line) or "Without words"
