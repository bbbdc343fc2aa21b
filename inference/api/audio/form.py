"""The form of a request with sound, checked field by field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.http.multipartparser import MultiPartParserError

from engine.contract.errors import InvalidRequest
from inference.errors import PayloadTooLarge, UnsupportedField, UnsupportedMediaType

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
#: Formats that tell when something was said.
TIMED_FORMATS = ("srt", "verbose_json", "vtt")
GRANULARITIES = ("segment", "word")
FIELDS = frozenset(
    {
        "chunking_strategy",
        "file",
        "include[]",
        "language",
        "max_completion_tokens",
        "model",
        "prompt",
        "response_format",
        "seed",
        "stream",
        "temperature",
        "timestamp_granularities[]",
        "top_p",
    }
)
#: Of transcriptions alone.
TRANSCRIPTION_FIELDS = frozenset(
    {"chunking_strategy", "include[]", "language", "stream", "timestamp_granularities[]"}
)
_MAX_PROMPT_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class AudioForm:
    """A checked form.

    Attributes:
        data: the file.
        model: as the client named it; None: the only one.
        translates: whether the text is to be English.
        endpoint: for the ledger; "": that of the task.
        language: code such as "de"; "": whichever is spoken.
        prompt: what was said before, or words as they are spelled.
        temperature: None: 0, and higher where the text isn't plausible.
        include_logprobs: whether the answer has them.
        granularities: what verbose_json has the times of.
    """

    data: bytes
    model: str | None
    translates: bool
    language: str = ""
    prompt: str = ""
    response_format: str = "json"
    temperature: float | None = None
    top_p: float = 1.0
    seed: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    include_logprobs: bool = False
    endpoint: str = ""
    granularities: frozenset[str] = frozenset({"segment"})

    @property
    def is_timed(self) -> bool:
        """Whether the answer says when something was said."""
        return self.response_format in TIMED_FORMATS


def read_audio_form(request: HttpRequest, *, translates: bool) -> AudioForm:
    """Parse and check the body; the file's temporary copy is gone afterwards. Blocks on the disk.

    Raises `UnsupportedMediaType`, `PayloadTooLarge`, `UnsupportedField`, `InvalidRequest`.
    """
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaType("Sound is uploaded as multipart/form-data.")
    try:
        fields, files = request.POST, request.FILES
    except MultiPartParserError as error:
        raise InvalidRequest(f"The form can't be read: {error}", code="invalid_form") from None
    try:
        return _checked(fields, files, translates)
    finally:
        for _, parts in files.lists():
            for part in parts:
                part.close()


def _checked(fields: Any, files: Any, translates: bool) -> AudioForm:
    supported = FIELDS - TRANSCRIPTION_FIELDS if translates else FIELDS
    # OpenAI's clients send lists with and without brackets.
    aliases = {"include", "timestamp_granularities"} if not translates else set()
    for name in sorted({*fields.keys(), *files.keys()} - supported - aliases):
        raise InvalidRequest(
            f"Unrecognized request argument supplied: {name[:100]}.",
            param=name[:100],
            code="unknown_parameter",
        )
    response_format = fields.get("response_format") or "json"
    _check_choices(fields, response_format)
    parts = files.getlist("file")
    if len(parts) != 1:
        raise InvalidRequest(
            f"The form must hold one file in the field 'file', got {len(parts)}.", param="file"
        )
    size, limit = parts[0].size or 0, settings.QUIRE.max_file_bytes
    if size > limit:
        raise PayloadTooLarge(f"The file has {size} bytes; the limit is {limit}.", param="file")
    stream = _flag(fields, "stream")
    if stream and response_format not in ("json", "text"):
        raise InvalidRequest(
            f"stream needs response_format 'json' or 'text', got {response_format!r}.",
            param="stream",
        )
    top_p = _number(fields, "top_p", 0.0, 1.0)
    prompt = fields.get("prompt") or ""
    if len(prompt) > _MAX_PROMPT_CHARS:
        raise InvalidRequest(
            f"prompt must have at most {_MAX_PROMPT_CHARS} characters.", param="prompt"
        )
    return AudioForm(
        data=parts[0].read(),
        model=fields.get("model") or None,
        translates=translates,
        language=(fields.get("language") or "").strip().lower(),
        prompt=prompt,
        response_format=response_format,
        temperature=_number(fields, "temperature", 0.0, 2.0),
        top_p=1.0 if top_p is None else top_p,
        seed=_integer(fields, "seed", 0, (1 << 63) - 1),
        max_completion_tokens=_integer(fields, "max_completion_tokens", 1, 1 << 20),
        stream=stream,
        include_logprobs="logprobs" in _items(fields, "include"),
        granularities=frozenset(_items(fields, "timestamp_granularities") or ["segment"]),
    )


def _check_choices(fields: Any, response_format: str) -> None:
    """Raise for forms of answers that aren't there, and for fields that don't go together."""
    if response_format == "diarized_json":
        raise UnsupportedField(
            "response_format 'diarized_json' isn't supported: speakers aren't told apart.",
            param="response_format",
        )
    if response_format not in FORMATS:
        raise InvalidRequest(
            f"response_format must be one of {', '.join(FORMATS)}; got {response_format[:50]!r}.",
            param="response_format",
        )
    granularities = _items(fields, "timestamp_granularities")
    for name in granularities:
        if name not in GRANULARITIES:
            raise InvalidRequest(
                f"timestamp_granularities must be 'segment' or 'word', got {name[:50]!r}.",
                param="timestamp_granularities[]",
            )
    if granularities and response_format != "verbose_json":
        raise InvalidRequest(
            "timestamp_granularities needs response_format 'verbose_json'.",
            param="timestamp_granularities[]",
        )
    for name in _items(fields, "include"):
        if name != "logprobs":
            raise InvalidRequest(f"include must be 'logprobs', got {name[:50]!r}.", param="include")
        if response_format != "json":
            raise InvalidRequest(
                "include 'logprobs' needs response_format 'json'.", param="include"
            )
    if (fields.get("chunking_strategy") or "auto") != "auto":
        raise UnsupportedField(
            "chunking_strategy must be 'auto': windows end where it is quiet.",
            param="chunking_strategy",
        )


def _items(fields: Any, name: str) -> list[str]:
    return [*fields.getlist(f"{name}[]"), *fields.getlist(name)]


def _flag(fields: Any, name: str) -> bool:
    text = (fields.get(name) or "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} must be true or false, got {text[:50]!r}.", param=name)
    return text in ("true", "1")


def _number(fields: Any, name: str, low: float, high: float) -> float | None:
    text = fields.get(name)
    if text in (None, ""):
        return None
    try:
        value = float(text) if len(text) < 32 else math.nan
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} must be in [{low:g}, {high:g}], got {text[:50]!r}.", param=name
        )
    return value


def _integer(fields: Any, name: str, low: int, high: int) -> int | None:
    text = fields.get(name)
    if text in (None, ""):
        return None
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {text[:50]!r}.", param=name)
    return value
