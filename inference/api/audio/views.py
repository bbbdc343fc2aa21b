"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes

from common.db import run_in_file_thread
from inference.api.audio.form import (
    FORMATS,
    GRANULARITIES,
    SAMPLING_FIELDS,
    AudioForm,
    read_audio_form,
)
from inference.api.audio.segments import WindowText, srt, transcript, verbose_segments, vtt
from inference.api.audio.transcription import Transcription, open_transcription
from inference.api.audio.words import verbose_words
from inference.errors import as_quire_error, encode_error, report
from inference.schemas import objects
from inference.serving.respond import add_headers
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.responses import (
    JSON_OR_EVENTS,
    EventStreamResponse,
    LastChunk,
    PlainTextRenderer,
)
from inference.web.views import GatewayRequest, GatewayView, json_response

_encode = msgspec.json.Encoder().encode

_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "model": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"type": "string", "enum": list(FORMATS)},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        **{name: {"type": "number"} for name in SAMPLING_FIELDS},
        "top_k": {"type": "integer", "minimum": -1},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "seed": {"type": "integer", "minimum": 0},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
    },
}
_TRANSCRIPTION_FORM: dict[str, Any] = {
    **_FORM,
    "properties": {
        **_FORM["properties"],
        "language": {"type": "string"},
        "stream": {"type": "boolean"},
        "timestamp_granularities[]": {
            "type": "array",
            "items": {"type": "string", "enum": list(GRANULARITIES)},
        },
        "include[]": {"type": "array", "items": {"type": "string", "enum": ["logprobs"]}},
        "chunking_strategy": {
            "oneOf": [
                {"type": "string", "enum": ["auto"]},
                {
                    "type": "object",
                    "required": ["type"],
                    "additionalProperties": False,
                    "properties": {
                        "type": {"type": "string", "enum": ["server_vad"]},
                        "threshold": {"type": "number", "minimum": 0, "maximum": 1},
                        "prefix_padding_ms": {"type": "integer", "minimum": 0, "maximum": 10000},
                        "silence_duration_ms": {"type": "integer", "minimum": 0, "maximum": 10000},
                    },
                },
            ]
        },
    },
}
_FILE_FIELDS = {
    "file_url": {"type": "string", "description": "Address of the file: `data:` or https."},
    "file_id": {"type": "string", "description": "Identifier of an uploaded file."},
    "priority": {"type": "integer"},
}


def _request_schemas(form: dict[str, Any]) -> dict[str, Any]:
    """Schemas by media type: the form, and the same fields in JSON with the file's URL."""
    fields = {name: schema for name, schema in form["properties"].items() if name != "file"}
    names = {name: name.removesuffix("[]") for name in fields}
    body = {
        "type": "object",
        "additionalProperties": False,
        "properties": {**_FILE_FIELDS, **{names[name]: fields[name] for name in fields}},
    }
    return {"multipart/form-data": form, "application/json": body}


_TEXTS = {"text/plain": OpenApiTypes.STR}


class _AudioView(GatewayView):
    """Base of the transcribing endpoints."""

    generates = True
    queues_for_model = True
    renderer_classes = (*JSON_OR_EVENTS, PlainTextRenderer)
    translates: ClassVar[bool] = False

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """The text of an audio file, which is uploaded as multipart/form-data, or named in JSON by
        its URL or the id of an uploaded file.
        """
        form = await run_in_file_thread(_read_form, request, self.translates)
        if (record := request.ctx.record) is not None:
            record.model, record.stream = (form.model or "")[:200], form.stream
        # Transcripts can't be resumed.
        request.ctx = replace(request.ctx, last_event_id=None)
        transcription = await open_transcription(request.ctx, form)
        try:
            await transcription.start()
            if form.stream:
                response: HttpResponseBase = EventStreamResponse(
                    _events(transcription, form), transcription.release
                )
            else:
                async with aclosing(transcription.windows()) as texts:
                    windows = [window async for window in texts]
                response = _answer(transcription, form, windows)
        except BaseException:
            transcription.release()
            raise
        if transcription.first_generation is not None:
            add_headers(response, transcription.first_generation, [])
        return response


class TranscriptionsView(_AudioView):
    """Transcribes audio in its own language."""

    schema = EndpointSchema(
        "Audio",
        post=Endpoint(
            "Transcribe sound",
            objects.Transcript,
            _request_schemas(_TRANSCRIPTION_FORM),
            streams=True,
            media_types=_TEXTS,
        ),
    )


class TranslationsView(_AudioView):
    """Translates audio into English."""

    schema = EndpointSchema(
        "Audio",
        post=Endpoint(
            "Translate sound into English",
            objects.Transcript,
            _request_schemas(_FORM),
            media_types=_TEXTS,
        ),
    )
    translates = True


def _read_form(request: GatewayRequest, translates: bool) -> AudioForm:
    return read_audio_form(request, translates=translates)


def _usage(transcription: Transcription) -> dict[str, Any]:
    """OpenAI's usage of models that are priced by the second."""
    return {"type": "duration", "seconds": math.ceil(transcription.seconds)}


def _answer(
    transcription: Transcription, form: AudioForm, windows: list[WindowText]
) -> HttpResponse:
    """The response in the requested format."""
    text = transcript(windows)
    if form.response_format in ("text", "srt", "vtt"):
        body = f"{text}\n"
        if form.response_format != "text":
            body = srt(windows) if form.response_format == "srt" else vtt(windows)
        return HttpResponse(body, content_type="text/plain; charset=utf-8")
    answer: dict[str, Any] = {"text": text, "usage": _usage(transcription)}
    if form.include_logprobs:
        answer["logprobs"] = transcription.logprob_objects(windows)
    if form.response_format == "verbose_json":
        answer |= {
            "task": "translate" if form.translates else "transcribe",
            "language": transcription.language,
            "duration": transcription.seconds,
        }
        if "word" in form.granularities:
            answer["words"] = verbose_words(windows)
        if "segment" in form.granularities:
            answer["segments"] = verbose_segments(windows)
    return json_response(answer)


async def _events(transcription: Transcription, form: AudioForm) -> AsyncGenerator[bytes, None]:
    """A delta for each window, then the complete text."""
    windows: list[WindowText] = []
    try:
        async with aclosing(transcription.windows()) as texts:
            async for window in texts:
                text = window.text.strip()
                if text:
                    delta: dict[str, Any] = {
                        "type": "transcript.text.delta",
                        "delta": f" {text}" if transcript(windows) else text,
                    }
                    if form.include_logprobs:
                        delta["logprobs"] = transcription.logprob_objects([window])
                    yield b"data: " + _encode(delta) + b"\n\n"
                windows.append(window)
        done: dict[str, Any] = {
            "type": "transcript.text.done",
            "text": transcript(windows),
            "usage": _usage(transcription),
        }
        if form.include_logprobs:
            done["logprobs"] = transcription.logprob_objects(windows)
        yield LastChunk(b"data: " + _encode(done) + b"\n\ndata: [DONE]\n\n")
    except Exception as error:
        # The status line was sent before: the error is the stream's last event.
        report(error, "transcript")
        yield LastChunk(b"data: " + encode_error(as_quire_error(error)) + b"\n\n")
    finally:
        transcription.release()
