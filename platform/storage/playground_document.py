"""Schema of a stored conversation of the playground.

Turns are a tree: each names the one that it follows, and an edited question is a sibling of the
first. Texts are shown as text; here only sizes and the shape are looked at.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.contract.errors import InvalidRequest

#: Of the document as JSON, and what of it can be searched for.
MAX_CHARS, MAX_WORDS = 1_000_000, 100_000
MAX_TURNS = 1000
#: Of one question.
MAX_PICTURES = 64
#: Models that answer beside the first.
MAX_COMPARED = 3
#: MCP servers whose tools a conversation offers.
MAX_SERVERS = 16
#: Of a preset: prompt and options as JSON.
MAX_PRESET_CHARS = 100_000

Name = Annotated[str, Meta(max_length=64)]
Short = Annotated[str, Meta(max_length=256)]
#: A token's text, its log probability, its alternatives.
Scored = tuple[str, float, list[tuple[str, float]]]


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a tool that the model made, and what it returned, as the person said or as the MCP
    server `server` did. `failed`: whether that call failed.
    """

    id: Short
    name: Short
    arguments: str
    result: str | None = None
    server: Name = ""
    failed: bool = False


class Picture(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A picture or a PDF of a question: the id of its file, and the file's name."""

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
    """One turn. `parent`: the turn that it follows, None for a first one. `beside`: what other
    models said to the same question.
    """

    id: Name
    parent: Name | None
    role: Literal["user", "assistant"]
    beside: Annotated[list[AnswerFields], Meta(max_length=MAX_COMPARED)] = []
    images: Annotated[list[Picture], Meta(max_length=MAX_PICTURES)] = []


class Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A conversation with the settings that it was had with. `leaf`: the turn it was left at."""

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
    """Settings that a preset puts in the place of a conversation's."""

    model: Short = ""
    system: str = ""
    tools: str = ""
    servers: Annotated[list[Name], Meta(max_length=MAX_SERVERS)] = []
    schema: str = ""
    settings: dict[str, Any] = {}


def validate_preset_options(options: Any) -> dict[str, Any]:
    """The options without defaults. Raises `InvalidRequest`."""
    try:
        return dict(msgspec.to_builtins(msgspec.convert(options, PresetOptions)))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"options are invalid: {error}.", param="options") from error


def validate_document(document: Any) -> dict[str, Any]:
    """The document, without anything that is no part of one. Raises `InvalidRequest`."""
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
