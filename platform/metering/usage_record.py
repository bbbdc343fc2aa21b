"""A finished request's usage, as stored in the spool."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

MAX_COUNT = 2**62
_COUNTS = (
    *("prompt_tokens", "cached_tokens", "image_tokens", "completion_tokens"),
    *("images", "audio_ms", "status", "cost_nanos"),
)
_TEXT_LIMITS = {"request_id": 200, "endpoint": 100, "model": 200, "finish_reason": 40}
_TEXT_LIMITS |= {"adapter": 100, "adapter_digest": 64, "in_place_of": 200}


class UsageRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A finished request's usage.

    Attributes:
        request_id: unique; a second record with the same id changes nothing.
        tenant_id: the tenant's row. key_id, user_id: the credential's, or None.
        prompt_tokens, cached_tokens, completion_tokens: >= 0; cached ones are part of the prompt's.
        image_tokens: prompt tokens of images.
        images: number of images. audio_ms: milliseconds of speech in the audio.
        finish_reason: of the first output, "" if it has none.
        status: HTTP status, 499 if the client disconnected.
        started_at: arrival of the request, a datetime or seconds since the epoch.
        cost_nanos: in 1e-9 of the currency.
        adapter, adapter_digest: the adapter of `model`; "" for the model alone.
        in_place_of: the requested model, if it was down and `model` answered; otherwise "".
        ttft_ms: milliseconds to the first token, None without one. duration_ms: to the end.
    Raises: ValueError for a count out of range or an empty `request_id`.
    """

    request_id: str
    tenant_id: int
    endpoint: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    status: int
    started_at: datetime | float
    duration_ms: float
    key_id: int | None = None
    user_id: int | None = None
    cached_tokens: int = 0
    image_tokens: int = 0
    images: int = 0
    audio_ms: int = 0
    finish_reason: str | None = None
    ttft_ms: float | None = None
    stream: bool = False
    cost_nanos: int = 0
    adapter: str = ""
    adapter_digest: str = ""
    in_place_of: str = ""

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ValueError("request_id must not be empty.")
        if isinstance(self.started_at, int | float):
            self.started_at = datetime.fromtimestamp(self.started_at, UTC)
        for name in _COUNTS:
            if not 0 <= getattr(self, name) <= MAX_COUNT:
                raise ValueError(f"{name} must be in [0, 2**62], got {getattr(self, name)}.")
        for name, limit in _TEXT_LIMITS.items():
            setattr(self, name, clean_text(getattr(self, name) or "", limit))

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.completion_tokens


def clean_text(text: str, limit: int) -> str:
    """Make text storable in any database: no NUL, no lone surrogate, bounded."""
    return text[:limit].replace("\0", "").encode("utf-8", "replace").decode("utf-8")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(UsageRecord)


def encode_record(record: UsageRecord) -> bytes:
    """MessagePack, for the spool."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> UsageRecord:
    """Raises msgspec.DecodeError or msgspec.ValidationError for invalid bytes."""
    return _decoder.decode(data)
