"""Live gateway processes and their open requests, for recovery after one is killed."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import msgspec

from metering.money import Rates
from metering.redis_scripts import redis_key
from metering.usage_record import UsageRecord

#: A budget reservation holds until it is settled, by its gateway or by another one after a crash.
RESERVATION_TTL_S = 7 * 86400
#: A dead gateway is noticed within seconds.
ANSWERED_S = 600
#: This process's name among the gateways.
GATEWAY = uuid.uuid4().hex


def open_key(gateway: str) -> str:
    """Redis key of a gateway's requests with reservations: id -> `OpenRequest`."""
    return redis_key(f"open:{gateway}")


def gateways_key() -> str:
    """Redis key of the gateways, by their last heartbeat."""
    return redis_key("gateways")


def reservation_key(request_id: str) -> str:
    """Redis key of a running request's reservation."""
    return redis_key(f"reservation:{request_id}")


def response_stored_key(request_id: str) -> str:
    """Redis key that exists if a whole answer is kept for its client, who may fetch it again."""
    return redis_key(f"answered:{request_id}")


class OpenRequest(msgspec.Struct, kw_only=True):
    """Data from which another gateway bills a request if this one dies.

    Attributes:
        prompts: tokens of each prompt. outputs: number of outputs per prompt. rates: its prices,
            see `Rates`.
        images, audio_ms: of each prompt; [] where no prompt has any.
        outbox: the outbox with its outputs. header_id: its `x-request-id`.
        stream_id: id of the resumed stream, by which the engine knows it; "" for a new request.
        billed: prompt and output tokens of the stream that were settled before.
        known: "engine's id/output" -> tokens that existed when this gateway took it over.
        most: maximum number of output tokens.
        The other fields are as in `UsageRecord`.
    """

    request_id: str
    tenant_id: int
    key_id: int | None
    user_id: int | None
    endpoint: str
    model: str
    prompts: list[int]
    started_at: float
    stream: bool
    rates: tuple[int, ...]
    outbox: str
    adapter: str = ""
    adapter_digest: str = ""
    outputs: int = 1
    header_id: str = ""
    stream_id: str = ""
    billed: tuple[int, int] = (0, 0)
    known: dict[str, int] = {}
    most: int = 0
    images: list[int] = []
    audio_ms: list[int] = []

    @property
    def media_nanos(self) -> int:
        """The maximum cost of its images and audio."""
        return Rates(*self.rates).media_nanos(sum(self.images), sum(self.audio_ms))

    def encode(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> OpenRequest:
        """Raises msgspec.DecodeError or ValidationError for invalid data."""
        return msgspec.msgpack.decode(data, type=cls)

    @property
    def root_request_id(self) -> str:
        """Id of the original request, which this one may continue."""
        return self.stream_id or self.request_id

    def engine_ids(self) -> list[str]:
        """The engine's request ids, one per prompt."""
        if len(self.prompts) == 1:
            return [self.root_request_id]
        return [f"{self.root_request_id}-{number}" for number in range(len(self.prompts))]

    def record(self, counts: Mapping[str, int], now: float, *, was_delivered: bool) -> UsageRecord:
        """The request's usage. `counts`: "engine's id/output" -> output tokens.

        `was_delivered`: whether the client may have received any output. If not, nothing is billed,
        so a client that retries pays once.
        """
        prompt = completion = images = audio_ms = 0
        none = [0] * len(self.prompts)
        media = zip(self.images or none, self.audio_ms or none, strict=True)
        for tokens, name, of in zip(self.prompts, self.engine_ids(), media, strict=True):
            fields = [f"{name}/{index}" for index in range(self.outputs)]
            ran = [max(counts.get(f, -1), self.known.get(f, -1)) for f in fields]
            if was_delivered and max(ran) >= 0:
                prompt += tokens
                completion += sum(max(0, count) for count in ran)
                images, audio_ms = images + of[0], audio_ms + of[1]
        completion, rates = max(0, completion - self.billed[1]), Rates(*self.rates)
        return UsageRecord(
            request_id=self.request_id,
            tenant_id=self.tenant_id,
            key_id=self.key_id,
            user_id=self.user_id,
            endpoint=self.endpoint,
            model=self.model,
            prompt_tokens=prompt,
            completion_tokens=completion,
            images=images,
            audio_ms=audio_ms,
            cost_nanos=rates.cost_nanos(prompt, 0, completion)
            + rates.media_nanos(images, audio_ms),
            finish_reason="abort",
            status=499,
            started_at=self.started_at,
            duration_ms=max(0.0, now - self.started_at) * 1000,
            stream=self.stream,
            adapter=self.adapter,
            adapter_digest=self.adapter_digest,
        )
