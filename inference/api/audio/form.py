"""Validates the form of a request with audio, field by field.

It is sent as multipart/form-data with the file, or as JSON that names the file's location, like the
lines of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.http.multipartparser import MultiPartParserError
from django.utils.datastructures import MultiValueDict

from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import VoiceDetection
from inference.errors import PayloadTooLarge, UnsupportedField, UnsupportedMediaType
from inference.web.json_body import parse_object

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
#: Formats that contain times.
TIMED_FORMATS = ("srt", "verbose_json", "vtt")
GRANULARITIES = ("segment", "word")
#: Maximum values of OpenAI's voice detector.
_DETECTION_LIMITS = {
    "threshold": 1.0,
    "prefix_padding_ms": 10_000.0,
    "silence_duration_ms": 10_000.0,
}
_DETECTION_FIELDS = tuple(f"chunking_strategy[{name}]" for name in ("type", *_DETECTION_LIMITS))
#: vLLM's numeric sampling fields; `SamplingParams` checks their ranges.
SAMPLING_FIELDS = (
    "frequency_penalty", "min_p", "presence_penalty", "repetition_penalty", "top_k", "top_p",
)  # fmt: skip
FIELDS = frozenset(
    {
        *SAMPLING_FIELDS,
        "chunking_strategy",
        *_DETECTION_FIELDS,
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
    }
)
#: Fields of transcriptions only.
TRANSCRIPTION_FIELDS = frozenset(
    {
        "chunking_strategy",
        *_DETECTION_FIELDS,
        "include[]",
        "language",
        "stream",
        "timestamp_granularities[]",
    }
)
_MAX_PROMPT_CHARS, _MAX_NUMBER = 20_000, 1e9


@dataclass(frozen=True, slots=True)
class AudioForm:
    """A validated form.

    Attributes:
        data: the file; b"" if it has yet to be fetched.
        model: as the client named it; None: the only one.
        translates: whether the text is translated into English.
        file_url, file_id: the file's location, instead of `data`.
        priority: see `Job`.
        endpoint: for the ledger; "": that of the task.
        language: code such as "de"; "": detected.
        prompt: preceding text, or the spelling of words.
        temperature: None: 0, and higher if the text isn't plausible.
        sampling: `SAMPLING_FIELDS` that were set.
        include_logprobs: whether the response has log probabilities.
        granularities: units of which verbose_json has the times.
        detection: see `PrepareSoundRequest`.
    """

    data: bytes
    model: str | None
    translates: bool
    file_url: str = ""
    file_id: str = ""
    priority: int = 0
    language: str = ""
    prompt: str = ""
    response_format: str = "json"
    temperature: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    include_logprobs: bool = False
    endpoint: str = ""
    granularities: frozenset[str] = frozenset({"segment"})
    detection: VoiceDetection | None = None

    @property
    def is_timed(self) -> bool:
        """Whether the response contains times."""
        return self.response_format in TIMED_FORMATS


def read_audio_form(request: HttpRequest, *, translates: bool) -> AudioForm:
    """Parse and validate the body; the file's temporary copy is then deleted. Blocks on the disk.

    Raises `UnsupportedMediaType`, `PayloadTooLarge`, `UnsupportedField`, `InvalidRequest`.
    """
    if request.content_type == "application/json":
        return _read_json(parse_object(request.body), translates)
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaType(
            "Sound is uploaded as multipart/form-data, or named by file_url or file_id in JSON."
        )
    try:
        fields, files = request.POST, request.FILES
    except MultiPartParserError as error:
        raise InvalidRequest(f"The form can't be read: {error}", code="invalid_form") from None
    try:
        return replace(_checked(fields, {*files}, translates), data=_read_file(files))
    finally:
        for _, parts in files.lists():
            for part in parts:
                part.close()


def _read_json(body: dict[str, Any], translates: bool) -> AudioForm:
    """Read the same fields as JSON. Raises `InvalidRequest`."""
    sources = {name: body.pop(name, None) for name in ("file_url", "file_id")}
    values = [value for value in sources.values() if value is not None]
    if len(values) != 1 or not (values[0] and isinstance(values[0], str)):
        raise InvalidRequest(
            "The body must name the file by one of file_url and file_id, a string.",
            param="file_url",
        )
    priority = body.pop("priority", 0)
    if type(priority) is not int or not -(1 << 31) <= priority < 1 << 31:
        raise InvalidRequest("priority must be an integer of 32 bits.", param="priority")
    fields = MultiValueDict[str, str]()
    if isinstance(strategy := body.get("chunking_strategy"), dict):
        del body["chunking_strategy"]
        body |= {f"chunking_strategy[{name}]": value for name, value in strategy.items()}
    for name, value in body.items():
        items = value if isinstance(value, list) else [value]
        fields.setlist(name, [_as_text(name, item) for item in items if item is not None])
    return replace(
        _checked(fields, set(), translates),
        file_url=sources["file_url"] or "",
        file_id=sources["file_id"] or "",
        priority=priority,
    )


def _as_text(name: str, value: Any) -> str:
    """A JSON value as a form would have it."""
    if not isinstance(value, str | int | float):
        raise InvalidRequest(f"{name[:50]} must be a string or a number.", param=name[:50])
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_file(files: Any) -> bytes:
    """The file's bytes. Raises `InvalidRequest`, `PayloadTooLarge`."""
    parts = files.getlist("file")
    if len(parts) != 1:
        raise InvalidRequest(
            f"The form must hold one file in the field 'file', got {len(parts)}.", param="file"
        )
    size, limit = parts[0].size or 0, settings.QUIRE.max_file_bytes
    if size > limit:
        raise PayloadTooLarge(f"The file has {size} bytes; the limit is {limit}.", param="file")
    data: bytes = parts[0].read()
    return data


def _checked(fields: Any, file_fields: set[str], translates: bool) -> AudioForm:
    """Validate all fields but the file. Raises `InvalidRequest`, `UnsupportedField`."""
    supported = FIELDS - TRANSCRIPTION_FIELDS if translates else FIELDS
    # OpenAI's clients send lists with and without brackets.
    aliases = {"include", "timestamp_granularities"} if not translates else set()
    for name in sorted({*fields.keys(), *file_fields} - supported - aliases):
        raise InvalidRequest(
            f"Unrecognized request argument supplied: {name[:100]}.",
            param=name[:100],
            code="unknown_parameter",
        )
    response_format = fields.get("response_format") or "json"
    _check_choices(fields, response_format)
    stream = _flag(fields, "stream")
    if stream and response_format not in ("json", "text"):
        raise InvalidRequest(
            f"stream needs response_format 'json' or 'text', got {response_format!r}.",
            param="stream",
        )
    sampling = {
        name: int(value) if name == "top_k" and value.is_integer() else value
        for name in SAMPLING_FIELDS
        if (value := _number(fields, name, -_MAX_NUMBER, _MAX_NUMBER)) is not None
    }
    prompt = fields.get("prompt") or ""
    if len(prompt) > _MAX_PROMPT_CHARS:
        raise InvalidRequest(
            f"prompt must have at most {_MAX_PROMPT_CHARS} characters.", param="prompt"
        )
    return AudioForm(
        data=b"",
        model=fields.get("model") or None,
        translates=translates,
        language=(fields.get("language") or "").strip().lower(),
        prompt=prompt,
        response_format=response_format,
        temperature=_number(fields, "temperature", 0.0, 2.0),
        sampling=sampling,
        seed=_integer(fields, "seed", 0, (1 << 63) - 1),
        max_completion_tokens=_integer(fields, "max_completion_tokens", 1, 1 << 20),
        stream=stream,
        include_logprobs="logprobs" in _items(fields, "include"),
        detection=_read_detection(fields),
        granularities=frozenset(_items(fields, "timestamp_granularities") or ["segment"]),
    )


def _check_choices(fields: Any, response_format: str) -> None:
    """Raise for unknown response formats, and for fields that exclude each other."""
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


def _read_detection(fields: Any) -> VoiceDetection | None:
    """OpenAI's `chunking_strategy`: 'auto', or an object as form fields with brackets."""
    strategy = fields.get("chunking_strategy") or fields.get("chunking_strategy[type]") or "auto"
    if strategy not in ("auto", "server_vad"):
        raise InvalidRequest(
            f"chunking_strategy must be 'auto' or of type 'server_vad', got {strategy[:50]!r}.",
            param="chunking_strategy",
        )
    values = {
        name: value
        for name, high in _DETECTION_LIMITS.items()
        if (value := _number(fields, f"chunking_strategy[{name}]", 0.0, high)) is not None
    }
    if strategy == "auto":
        if values:
            raise InvalidRequest(
                "chunking_strategy needs the type 'server_vad' for its other fields.",
                param="chunking_strategy",
            )
        return None
    return VoiceDetection(
        threshold=values.get("threshold", 0.5),
        prefix_padding_ms=int(values.get("prefix_padding_ms", 300)),
        silence_duration_ms=int(values.get("silence_duration_ms", 200)),
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
