"""Taking over a stream from another gateway: what it had produced, and who bills it."""

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
    """The stream that a request resumes; None for a new one.

    Raises: `InvalidRequest` for a `Last-Event-ID` that is none of ours; `Overloaded` (503) without
    Redis.
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
    """Who may resume a stream within its tenant: the user or key that began it, also after the key
    was rotated. It's billed to the first key, whose limits and budgets have reserved it.
    """
    if caller.key_id is None:
        return f"user {caller.user_id}"
    return f"key {caller.key_family or caller.key_id}"


async def open_stream(client: EngineClient, stream: str, caller: Caller) -> OpenStream | None:
    """What its gateway journaled; None if it doesn't exist or isn't the caller's.

    Raises: RedisError.
    """
    name = redis_keys.stream_key(stream, client.settings.key_prefix)
    data: Any = await client.redis.hget(name, "open")
    stream_info = decode_open(data) if data is not None else None
    if stream_info is None or stream_info.tenant_id != caller.tenant_id:
        return None
    return stream_info if stream_info.holder == stream_owner(caller) else None


#: Seconds until requests of the other gateway are searched and aborted once more.
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
        position: its client's. about: what its first gateway journaled.
        received: [prompt][output] all known tokens, as one chunk.
        bits: [prompt] the numerics that made them.
        epoch: how often it was taken over.
        ledger_id: the ledger's id of what this gateway settles.
        billed: what is settled already; None if this gateway settles all of it.
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
        """Known tokens of all outputs."""
        return sum(len(piece.token_ids) for outputs in self.received for piece in outputs)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to generate, as far as is known."""
        return all(piece.finish_reason for outputs in self.received for piece in outputs)

    @property
    def counts(self) -> dict[str, int]:
        """Tokens by "engine request/output" of what has begun, for billing."""
        return {
            redis_keys.output_field(engine_id, piece.index): len(piece.token_ids)
            for engine_id, outputs in zip(self.about.requests, self.received, strict=True)
            for piece in outputs
            if piece.token_ids or piece.finish_reason
        }

    @property
    def to_resume_state(self) -> ResumeState:
        """For the engine client."""
        return ResumeState(
            [[piece.token_ids for piece in outputs] for outputs in self.received],
            [
                [
                    bool(piece.finish_reason) or self.is_finished(n, i)
                    for i, piece in enumerate(outputs)
                ]
                for n, outputs in enumerate(self.received)
            ],
            self.bits,
            self.epoch,
        )

    def delivered(self) -> list[TokenChunk]:
        """What the client has received, one chunk an output."""
        found = []
        for place, piece in enumerate(self._received_chunks()):
            count, ended = self._count_delivered(place, piece)
            if count or ended:
                found.append(part(piece, 0, count, ended=ended))
        return found

    def partially_delivered(self) -> list[TokenChunk]:
        """The chunk of whose events the client received a part; [] without one."""
        position = self.position
        if not position.part:
            return []
        piece = self._received_chunks()[position.output]
        count, ended = position.counts[position.output], position.finished[position.output]
        return [part(piece, position.start, count, ended=ended)]

    def undelivered(self) -> list[TokenChunk]:
        """What is known and the client hasn't received."""
        found = []
        for place, piece in enumerate(self._received_chunks()):
            count, ended = self._count_complete(place, piece)
            if not ended and (count < len(piece.token_ids) or piece.finish_reason):
                found.append(part(piece, count, len(piece.token_ids), ended=True))
        return found

    def is_finished(self, number: int, index: int) -> bool:
        """Whether the client received this output's end."""
        piece = self.received[number][index]
        return self._count_complete(number * len(self.received[0]) + index, piece)[1]

    def _received_chunks(self) -> list[TokenChunk]:
        return [piece for outputs in self.received for piece in outputs]

    def _count_delivered(self, place: int, piece: TokenChunk) -> tuple[int, bool]:
        if self.position.part and place == self.position.output:
            return self.position.start, False
        return self._count_complete(place, piece)

    def _count_complete(self, place: int, piece: TokenChunk) -> tuple[int, bool]:
        if self.position.stage == "b":
            return 0, False
        if self.position.stage == "e":
            return len(piece.token_ids), True
        return self.position.counts[place], self.position.finished[place]

    def check(self) -> None:
        """Raise `StreamNotFound` when the client has received more than is known."""
        places = self._received_chunks()
        if self.position.stage == "" and len(self.position.counts) != len(places):
            raise StreamNotFound
        if self.position.output >= len(places):
            raise StreamNotFound
        if self.position.part and self.position.start > self.position.counts[self.position.output]:
            raise StreamNotFound
        for place, piece in enumerate(places):
            count, _ = self._count_complete(place, piece)
            if count > len(piece.token_ids):
                raise StreamNotFound


def part(piece: TokenChunk, start: int, end: int, *, ended: bool) -> TokenChunk:
    """Tokens [start, end) of a chunk; with its end if it has one there and `ended`.

    An end at a stop string isn't part of it: the gateway finds that again.
    """
    last = ended and end == len(piece.token_ids)
    return TokenChunk(
        piece.number,
        piece.index,
        piece.token_ids[start:end],
        piece.logprobs[start:end] if piece.logprobs is not None else None,
        piece.prompt_logprobs if start == 0 else None,
        piece.finish_reason if last else None,
        piece.stop_reason if last else None,
        piece.num_cached_tokens,
    )


def request_fingerprint(job: Job) -> bytes:
    """32 bytes, equal for equal requests; computed before a missing seed is chosen.

    It encodes prompts one by one, so that in a thread it doesn't hold the interpreter for long.
    """
    digest = hashlib.sha256(f"{job.model.name}\0{job.endpoint}\0".encode())
    sampling = msgspec.to_builtins(job.sampling, str_keys=True)  # `logit_bias` has ids as keys
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

    Raises: `StreamNotFound` (404); `InvalidRequest` when the stream is of another request;
    `Overloaded` (503) without Redis.
    """
    try:
        return await _acquire_stream(client, job, position, fingerprint)
    except RedisError as error:
        raise Overloaded("Streams can't be looked up right now. Try again.") from error


async def defer_settlement(client: EngineClient, job: Job, taken: TakenOverStream) -> Admission:
    """Have this gateway settle the stream from now on.

    If another one settled already, `taken.billed` is what it billed, and only the rest is admitted
    and settled. Raises what `admit` raises.
    """
    stream, whole = taken.position.stream, job.admission_request(client.gateway_id)
    if taken.ledger_id != stream:  # the previous gateway had only the rest of it
        taken.billed = await _billed(client, taken)
    asking = whole if taken.billed is None else _remaining_request(whole, taken)
    asking = replace(asking, previous_token_counts=taken.counts)
    admission = await take_over_request(job.caller, asking, gateway=taken.about.gateway)
    if admission is not None:
        return replace(admission, output_tokens=taken.about.output_tokens)
    taken.ledger_id, taken.billed = f"{stream}.{taken.epoch}", await _billed(client, taken)
    if taken.finished:
        return UNLIMITED
    left = max(len(job.prompts), job.max_output_tokens - taken.num_tokens)
    rest = replace(
        _remaining_request(whole, taken), max_output_tokens=left, previous_token_counts=taken.counts
    )
    admission = await admit(job.caller, rest)
    if admission.output_tokens is None:
        return admission
    return replace(admission, output_tokens=admission.output_tokens + taken.num_tokens)


def _remaining_request(whole: AdmissionRequest, taken: TakenOverStream) -> AdmissionRequest:
    """The rest of a request whose prompts and first tokens are settled."""
    billed = taken.billed or Usage()
    return replace(
        whole,
        request_id=taken.ledger_id,
        prompt_tokens=0,
        prompts=[0] * len(whole.prompts),
        stream_id=taken.position.stream,
        billed=(billed.prompt_tokens, billed.completion_tokens),
    )


async def _billed(client: EngineClient, taken: TakenOverStream) -> Usage:
    name = redis_keys.stream_key(taken.position.stream, client.settings.key_prefix)
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
    known = _empty_chunk(job)
    left = await _outbox(client, about)
    entries: Any = await redis.lrange(journal_key(prefix, position.stream), 0, -1)
    for start, piece in map(decode_entry, entries):
        _extend(known[piece.number][piece.index], start, piece)
    for delta in left:
        number = about.requests.index(redis_keys.base_request_id(delta.request_id))
        _extend(known[number][delta.index], delta.start, chunk_from_delta(delta, number, 0))
    fields = [bits_field(number) for number in range(len(known))]
    found: Any = await redis.hmget(name, fields)
    bits = list(map(decode_bits, found))
    taken = TakenOverStream(position, about, known, bits, epoch, about.ledger_id or position.stream)
    taken.check()
    client.spawn(_sweep_again(client, about))
    return taken


def _empty_chunk(job: Job) -> list[list[TokenChunk]]:
    count = job.sampling.num_sequences
    return [[TokenChunk(n, index, []) for index in range(count)] for n in range(len(job.prompts))]


def _extend(known: TokenChunk, start: int, piece: TokenChunk) -> None:
    """Append the new tokens of a chunk that begins at token `start`; none behind a gap."""
    skip = len(known.token_ids) - start
    if skip < 0 or known.finish_reason is not None or skip > len(piece.token_ids):
        return
    known.token_ids += piece.token_ids[skip:]
    if piece.logprobs is not None:
        known.logprobs = (known.logprobs or []) + piece.logprobs[skip:]
    known.prompt_logprobs = known.prompt_logprobs or piece.prompt_logprobs
    known.num_cached_tokens = max(known.num_cached_tokens, piece.num_cached_tokens)
    known.finish_reason, known.stop_reason = piece.finish_reason, piece.stop_reason


async def _outbox(client: EngineClient, about: OpenStream) -> list[TokenDelta]:
    """The stream's deltas in its gateway's outbox. Aborts its engine requests."""
    key = redis_keys.outbox_key(about.outbox, client.settings.key_prefix)
    found: Any = await client.redis.xrange(key)
    mine, running = [], set()
    for _, fields in found:
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
    """Whether it replies to an abort: after a stop string, or when the client had left."""
    aborted = delta.finish_reason == "stop" and not delta.token_ids
    return aborted or delta.finish_reason in ("abort", "error")


def _of(batch: OutboxBatch, about: OpenStream) -> Iterable[TokenDelta]:
    wanted = set(about.requests)
    return (d for d in batch.deltas if redis_keys.base_request_id(d.request_id) in wanted)


async def _sweep_again(client: EngineClient, about: OpenStream) -> None:
    """Abort engine requests that wrote their first tokens for the dead gateway since."""
    await asyncio.sleep(SWEEP_DELAY_S)
    try:
        await _outbox(client, about)
    except RedisError:  # they end by themselves
        return
