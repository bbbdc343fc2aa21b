"""Takes a stream over from another gateway: the tokens so far, and who bills them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import RedisError

from common.errors import NotFound
from engine.contract import redis_keys
from engine.contract.errors import InvalidRequest
from engine.contract.messages import STREAM_FIELD, OutboxBatch, TokenDelta, decode_outbox
from inference.engine_client.client import EngineClient, get_engine_client
from inference.engine_client.flight import ResumeState
from inference.engine_client.journal import (
    Bits,
    OpenStream,
    bits_field,
    decode_bits,
    decode_entry,
    decode_open,
    journal_key,
)
from inference.engine_client.mailbox import TokenChunk, chunk_from_delta
from inference.errors import Overloaded
from inference.request.context import RequestContext
from inference.request.job import Usage
from inference.request.position import StreamPosition
from metering.access import UNLIMITED, Admission, AdmissionRequest, admit, take_over_request
from tenants.authentication import Caller

if TYPE_CHECKING:
    from inference.request.job import Job


async def find_resumed_stream(ctx: RequestContext) -> OpenStream | None:
    """Return the stream that a request resumes; None for a new one.

    Raises: `InvalidRequest` for a `Last-Event-ID` that Quire didn't issue; `Overloaded` (503)
    without Redis.
    """
    position = ctx.position
    if position is None:
        return None
    client = get_engine_client()
    await client.start()
    try:
        return await open_stream(client, position.stream, ctx.caller)
    except RedisError as error:
        raise Overloaded("Streams can't be looked up right now. Try again.") from error


def stream_owner(caller: Caller) -> str:
    """Return who may resume a stream in its tenant: the user or key that began it, even if the key
    was rotated since. The first key is billed, whose limits and budgets have the reservation.
    """
    if caller.key_id is None:
        return f"user {caller.user_id}"
    return f"key {caller.key_family or caller.key_id}"


async def open_stream(client: EngineClient, stream: str, caller: Caller) -> OpenStream | None:
    """Read a stream's journaled description; None if it doesn't exist or isn't the caller's.

    Raises: RedisError.
    """
    name = redis_keys.stream_key(stream, client.settings.key_prefix)
    data: Any = await client.redis.hget(name, "open")
    stream_info = decode_open(data) if data is not None else None
    if stream_info is None or stream_info.tenant_id != caller.tenant_id:
        return None
    return stream_info if stream_info.holder == stream_owner(caller) else None


#: Seconds until the other gateway's requests are searched and aborted a second time.
SWEEP_DELAY_S = 1.0


class StreamNotFound(NotFound):
    """The stream doesn't exist, isn't the tenant's, or its journal ends too early."""

    code = "stream_not_found"

    def __init__(self) -> None:
        super().__init__(
            "There is no such stream to continue. Send the request without Last-Event-ID.",
            param="Last-Event-ID",
        )


@dataclass
class TakenOverStream:
    """A stream that this gateway has taken over.

    Attributes:
        position: the client's position. about: description that its first gateway journaled.
        received: [prompt][output] all known tokens, as one chunk per output.
        bits: [prompt] the numerics that produced them.
        epoch: number of takeovers so far.
        ledger_id: the ledger's id of the usage that this gateway settles.
        billed: usage that is already settled; None if this gateway settles all of it.
    """

    position: StreamPosition
    about: OpenStream
    received: list[list[TokenChunk]]
    bits: list[Bits]
    epoch: int
    ledger_id: str
    billed: Usage | None = None

    @property
    def num_tokens(self) -> int:
        """Number of known tokens of all outputs."""
        return sum(len(chunk.token_ids) for outputs in self.received for chunk in outputs)

    @property
    def finished(self) -> bool:
        """Whether every output's end is known."""
        return all(chunk.finish_reason for outputs in self.received for chunk in outputs)

    @property
    def counts(self) -> dict[str, int]:
        """Number of tokens by "engine request/output" of outputs that have begun, for billing."""
        return {
            redis_keys.output_field(engine_id, chunk.index): len(chunk.token_ids)
            for engine_id, outputs in zip(self.about.requests, self.received, strict=True)
            for chunk in outputs
            if chunk.token_ids or chunk.finish_reason
        }

    @property
    def to_resume_state(self) -> ResumeState:
        """State for the engine client to resume from."""
        return ResumeState(
            [[chunk.token_ids for chunk in outputs] for outputs in self.received],
            [
                [
                    bool(chunk.finish_reason) or self.is_finished(n, i)
                    for i, chunk in enumerate(outputs)
                ]
                for n, outputs in enumerate(self.received)
            ],
            self.bits,
            self.epoch,
        )

    def delivered(self) -> list[TokenChunk]:
        """Return chunks that the client has received, one per output."""
        chunks = []
        for index, chunk in enumerate(self._received_chunks()):
            count, is_finished = self._count_delivered(index, chunk)
            if count or is_finished:
                chunks.append(part(chunk, 0, count, with_end=is_finished))
        return chunks

    def partially_delivered(self) -> list[TokenChunk]:
        """Return the chunk whose events the client received only in part; [] if there is none."""
        position = self.position
        if not position.part:
            return []
        chunk = self._received_chunks()[position.output]
        count, is_finished = position.counts[position.output], position.finished[position.output]
        return [part(chunk, position.start, count, with_end=is_finished)]

    def undelivered(self) -> list[TokenChunk]:
        """Return known chunks that the client hasn't received."""
        chunks = []
        for index, chunk in enumerate(self._received_chunks()):
            count, is_finished = self._count_complete(index, chunk)
            if not is_finished and (count < len(chunk.token_ids) or chunk.finish_reason):
                chunks.append(part(chunk, count, len(chunk.token_ids), with_end=True))
        return chunks

    def is_finished(self, number: int, index: int) -> bool:
        """Whether the client received this output's end."""
        chunk = self.received[number][index]
        return self._count_complete(number * len(self.received[0]) + index, chunk)[1]

    def _received_chunks(self) -> list[TokenChunk]:
        return [chunk for outputs in self.received for chunk in outputs]

    def _count_delivered(self, index: int, chunk: TokenChunk) -> tuple[int, bool]:
        if self.position.part and index == self.position.output:
            return self.position.start, False
        return self._count_complete(index, chunk)

    def _count_complete(self, index: int, chunk: TokenChunk) -> tuple[int, bool]:
        if self.position.stage == "b":
            return 0, False
        if self.position.stage == "e":
            return len(chunk.token_ids), True
        return self.position.counts[index], self.position.finished[index]

    def check(self) -> None:
        """Raise `StreamNotFound` if the client has received more tokens than are known."""
        chunks = self._received_chunks()
        if self.position.stage == "" and len(self.position.counts) != len(chunks):
            raise StreamNotFound
        if self.position.output >= len(chunks):
            raise StreamNotFound
        if self.position.part and self.position.start > self.position.counts[self.position.output]:
            raise StreamNotFound
        for index, chunk in enumerate(chunks):
            count, _ = self._count_complete(index, chunk)
            if count > len(chunk.token_ids):
                raise StreamNotFound


def part(chunk: TokenChunk, start: int, end: int, *, with_end: bool) -> TokenChunk:
    """Return tokens [start, end) of a chunk; with its finish reason if `with_end` and at its end.

    Stop strings are not part of the finish reason: the gateway detects them again.
    """
    last = with_end and end == len(chunk.token_ids)
    return TokenChunk(
        chunk.number,
        chunk.index,
        chunk.token_ids[start:end],
        chunk.logprobs[start:end] if chunk.logprobs is not None else None,
        chunk.prompt_logprobs if start == 0 else None,
        chunk.finish_reason if last else None,
        chunk.stop_reason if last else None,
        chunk.num_cached_tokens,
    )


def request_fingerprint(job: Job) -> bytes:
    """Return 32 bytes, equal for equal requests; call it before a missing seed is chosen.

    Prompts are encoded one by one, so that a thread doesn't hold the GIL for long.
    """
    digest = hashlib.sha256(f"{job.model.name}\0{job.endpoint}\0".encode())
    sampling = msgspec.to_builtins(job.sampling, str_keys=True)  # keys of `logit_bias` are ids
    digest.update(msgspec.msgpack.encode(sampling, order="sorted"))
    count = len(job.prompts)
    digest.update(
        msgspec.msgpack.encode([None] * count)[:-count]
    )  # the header of a list of that length
    for prompt in job.prompts:
        digest.update(msgspec.msgpack.encode(prompt))
    if job.embeds:
        digest.update(msgspec.msgpack.encode(job.embeds))
    if job.media:
        digest.update(msgspec.msgpack.encode(job.media))
    return digest.digest()


async def take_over_stream(
    client: EngineClient, job: Job, position: StreamPosition, fingerprint: bytes
) -> TakenOverStream:
    """Take over the stream that `job`'s client resumes.

    Raises: `StreamNotFound` (404); `InvalidRequest` if the stream belongs to another request;
    `Overloaded` (503) without Redis.
    """
    try:
        return await _acquire_stream(client, job, position, fingerprint)
    except RedisError as error:
        raise Overloaded("Streams can't be looked up right now. Try again.") from error


async def defer_settlement(
    client: EngineClient, job: Job, taken_over: TakenOverStream
) -> Admission:
    """Make this gateway settle the stream from now on.

    If another gateway has settled already, `taken_over.billed` is what it billed, and only the rest
    is admitted and settled. Raises what `admit` raises.
    """
    stream, full_request = taken_over.position.stream, job.admission_request(client.gateway_id)
    if taken_over.ledger_id != stream:  # the previous gateway settled only the rest, too
        taken_over.billed = await _billed(client, taken_over)
    asking = (
        full_request if taken_over.billed is None else _remaining_request(full_request, taken_over)
    )
    asking = replace(asking, previous_token_counts=taken_over.counts)
    admission = await take_over_request(job.caller, asking, gateway=taken_over.about.gateway)
    if admission is not None:
        return replace(admission, output_tokens=taken_over.about.output_tokens)
    taken_over.ledger_id, taken_over.billed = (
        f"{stream}.{taken_over.epoch}",
        await _billed(client, taken_over),
    )
    if taken_over.finished:
        return UNLIMITED
    remaining_tokens = max(len(job.prompts), job.max_output_tokens - taken_over.num_tokens)
    rest = replace(
        _remaining_request(full_request, taken_over),
        max_output_tokens=remaining_tokens,
        previous_token_counts=taken_over.counts,
    )
    admission = await admit(job.caller, rest)
    if admission.output_tokens is None:
        return admission
    return replace(admission, output_tokens=admission.output_tokens + taken_over.num_tokens)


def _remaining_request(
    full_request: AdmissionRequest, taken_over: TakenOverStream
) -> AdmissionRequest:
    """Return the rest of a request whose prompts, media and first tokens are settled."""
    billed = taken_over.billed or Usage()
    return replace(
        full_request,
        request_id=taken_over.ledger_id,
        prompt_tokens=0,
        prompts=[0] * len(full_request.prompts),
        images=(),
        audio_ms=(),
        stream_id=taken_over.position.stream,
        billed=(billed.prompt_tokens, billed.completion_tokens),
    )


async def _billed(client: EngineClient, taken_over: TakenOverStream) -> Usage:
    name = redis_keys.stream_key(taken_over.position.stream, client.settings.key_prefix)
    try:
        prompt, billed = await client.redis.hmget(name, "prompt", "billed")
    except RedisError as error:
        raise Overloaded("Streams can't be looked up right now. Try again.") from error
    return Usage(prompt_tokens=int(prompt or 0), completion_tokens=int(billed or 0))


async def _acquire_stream(
    client: EngineClient, job: Job, position: StreamPosition, fingerprint: bytes
) -> TakenOverStream:
    prefix, redis = client.settings.key_prefix, client.redis
    name = redis_keys.stream_key(position.stream, prefix)
    about = await open_stream(client, position.stream, job.caller)
    if about is None or not job.model.has_same_tokenizer(about.adapter):
        raise StreamNotFound
    if about.print != fingerprint:
        raise InvalidRequest(
            "Last-Event-ID belongs to the stream of another request.", param="Last-Event-ID"
        )
    epoch = int(await redis.hincrby(name, "epoch", 1))
    received = _empty_chunk(job)
    unread_deltas = await _outbox(client, about)
    entries: Any = await redis.lrange(journal_key(prefix, position.stream), 0, -1)
    for start, chunk in map(decode_entry, entries):
        _extend(received[chunk.number][chunk.index], start, chunk)
    for delta in unread_deltas:
        number = about.requests.index(redis_keys.base_request_id(delta.request_id))
        _extend(received[number][delta.index], delta.start, chunk_from_delta(delta, number, 0))
    fields = [bits_field(number) for number in range(len(received))]
    raw_bits: Any = await redis.hmget(name, fields)
    bits = list(map(decode_bits, raw_bits))
    taken_over = TakenOverStream(
        position, about, received, bits, epoch, about.ledger_id or position.stream
    )
    taken_over.check()
    client.spawn(_sweep_again(client, about))
    return taken_over


def _empty_chunk(job: Job) -> list[list[TokenChunk]]:
    count = job.sampling.num_sequences
    return [[TokenChunk(n, index, []) for index in range(count)] for n in range(len(job.prompts))]


def _extend(received: TokenChunk, start: int, chunk: TokenChunk) -> None:
    """Append the new tokens of a chunk that begins at token `start`; nothing after a gap."""
    skip = len(received.token_ids) - start
    if skip < 0 or received.finish_reason is not None or skip > len(chunk.token_ids):
        return
    received.token_ids += chunk.token_ids[skip:]
    if chunk.logprobs is not None:
        received.logprobs = (received.logprobs or []) + chunk.logprobs[skip:]
    received.prompt_logprobs = received.prompt_logprobs or chunk.prompt_logprobs
    received.num_cached_tokens = max(received.num_cached_tokens, chunk.num_cached_tokens)
    received.finish_reason, received.stop_reason = chunk.finish_reason, chunk.stop_reason


async def _outbox(client: EngineClient, about: OpenStream) -> list[TokenDelta]:
    """Return the stream's deltas in its gateway's outbox, and abort its engine requests."""
    key = redis_keys.outbox_key(about.outbox, client.settings.key_prefix)
    entries: Any = await client.redis.xrange(key)
    mine, running = [], set()
    for _, fields in entries:
        batch = decode_outbox(fields[STREAM_FIELD])
        for delta in _of(batch, about):
            if _says_nothing(delta):
                continue
            mine.append(delta)
            running.add((delta.request_id, batch.replica_id))
    if about.outbox != client.gateway_id:
        for engine_id, replica_id in running:
            client.abort(engine_id, replica_id)
    return mine


def _says_nothing(delta: TokenDelta) -> bool:
    """Whether the delta only confirms an abort, after a stop string or when the client left."""
    aborted = delta.finish_reason == "stop" and not delta.token_ids
    return aborted or delta.finish_reason in ("abort", "error")


def _of(batch: OutboxBatch, about: OpenStream) -> Iterable[TokenDelta]:
    engine_ids = set(about.requests)
    return (d for d in batch.deltas if redis_keys.base_request_id(d.request_id) in engine_ids)


async def _sweep_again(client: EngineClient, about: OpenStream) -> None:
    """Abort engine requests whose first tokens have reached the dead gateway's outbox since."""
    await asyncio.sleep(SWEEP_DELAY_S)
    try:
        await _outbox(client, about)
    except RedisError:  # the requests finish by themselves
        return
