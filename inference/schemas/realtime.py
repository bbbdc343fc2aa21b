"""Client events of `WS /v1/realtime`, in the format of OpenAI's transcription sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from inference.errors import UnsupportedField


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PCMFormat(_Part):
    """16-bit mono PCM, little-endian, at OpenAI's sampling rate or at Whisper's."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24000, 16000] = 24000


class TranscriptionOptions(_Part):
    """The model, and hints for it."""

    model: Annotated[str, Field(max_length=200)] | None = None
    language: Annotated[str, Field(max_length=20)] | None = None
    prompt: Annotated[str, Field(max_length=20_000)] | None = None


class ServerVAD(_Part):
    """Voice activity detection: silence ends a turn."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5_000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=20, le=10_000)] = 500


class InputAudio(_Part):
    """Format and processing of the input audio."""

    format: PCMFormat = Field(default_factory=PCMFormat)
    noise_reduction: None = None
    transcription: TranscriptionOptions = Field(default_factory=TranscriptionOptions)
    turn_detection: ServerVAD | None = Field(default_factory=ServerVAD)


class Audio(_Part):
    """A session's audio, which is input only."""

    input: InputAudio = Field(default_factory=InputAudio)


class TranscriptionSession(_Part):
    """A session's settings."""

    type: Literal["transcription"] = "transcription"
    audio: Audio = Field(default_factory=Audio)
    include: list[Literal["item.input_audio_transcription.logprobs"]] | None = None


class SessionUpdate(_Part):
    """`session.update`, merged into the current settings."""

    session: TranscriptionSession


def check_supported(session: dict[str, Any]) -> None:
    """Raise `UnsupportedField` for features of OpenAI's that Quire lacks."""
    if session.get("type") == "realtime":
        raise _unsupported("type", "'realtime'; only 'transcription' is")
    audio = session.get("audio")
    sound = audio.get("input") if isinstance(audio, dict) else None
    if not isinstance(sound, dict):
        return
    for name, kinds, supported in (
        ("format", ("audio/pcmu", "audio/pcma"), "audio/pcm"),
        ("turn_detection", ("semantic_vad",), "server_vad"),
    ):
        part = sound.get(name)
        if isinstance(part, dict) and part.get("type") in kinds:
            raise _unsupported(f"audio.input.{name}.type", f"{part['type']!r}; use {supported!r}")
    if sound.get("noise_reduction") is not None:
        raise _unsupported("audio.input.noise_reduction", "a value; leave it null")


def _unsupported(name: str, what: str) -> UnsupportedField:
    return UnsupportedField(f"session.{name} doesn't support {what}.", param=f"session.{name}")


def merge_settings(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with an update applied; fields that it omits stay unchanged."""
    merged = dict(settings)
    for name, value in changes.items():
        previous = merged.get(name)
        both = isinstance(previous, dict) and isinstance(value, dict)
        merged[name] = merge_settings(previous, value) if both else value  # type: ignore[arg-type]
    return merged
