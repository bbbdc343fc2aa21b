"""Going on with a stream that another gateway had: what it had produced, and who bills it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import RedisError

from common.errors import NotFound
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.errors import InvalidRequest
from engine.contract.messages import OutboxBatch, TokenDelta
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
    """Who may go on with a stream within its tenant: who began it, be it with the next key.

    It's billed as the first key's, and its limits and budgets have reserved it.
    """
    if caller.key_id is None:
        return f"user {caller.user_id}"
    return f"key {caller.key_family or caller.key_id}"


async def open_stream(client: EngineClient, stream: str, caller: Caller) -> OpenStream | None:
    """What its gateway wrote down; None if it isn't there or isn't this caller's.

    Raises: RedisError.
    """
    name = redis_keys.stream_key(stream, client.settings.key_prefix)
    data: Any = await client.redis.hget(name, "open")  # type: ignore[misc]
    about = decode_open(data) if data is not None else None
    if about is None or about.tenant_id != caller.tenant_id:
        return None
    return about if about.holder == stream_owner(caller) else None


#: When the engine's requests of a gateway that died are looked for once more.
SWEEP_AGAIN_S = 1.0


class StreamNotFound(NotFound):
    """The stream isn't there, isn't this tenant's, or what is known of it ends too early."""

    code = "stream_not_found"

    def __init__(self) -> None:
        super().__init__(
            "There is no such stream to continue. Send the request without Last-Event-ID.",
            param="Last-Event-ID",
        )


@dataclass
class TakenOverStream:
    """A stream that is this gateway's by now.

    Attributes:
        position: where its client is. about: what its first gateway wrote down.
        received: [prompt][output]; all that is known of each, as one piece. bits: [prompt].
        epoch: how often it was taken over.
        ledger_id: under which the ledger has what this gateway settles.
        billed: what is settled of it already; None: nothing, and it is all ours to settle.
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
        """Of all outputs."""
        return sum(len(piece.token_ids) for outputs in self.received for piece in outputs)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to generate, as far as the engine has told."""
        return all(piece.finish_reason for outputs in self.received for piece in outputs)

    @property
    def counts(self) -> dict[str, int]:
        """Tokens by "engine request/output" of what has begun, as a bill needs them."""
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
        """What the client has: of each output one piece."""
        found = []
        for place, piece in enumerate(self._received_chunks()):
            count, ended = self._count_delivered(place, piece)
            if count or ended:
                found.append(part(piece, 0, count, ended=ended))
        return found

    def partially_delivered(self) -> list[TokenChunk]:
        """What made several events of which the client has some; [] when there is none."""
        position = self.position
        if not position.part:
            return []
        piece = self._received_chunks()[position.output]
        count, ended = position.counts[position.output], position.finished[position.output]
        return [part(piece, position.start, count, ended=ended)]

    def undelivered(self) -> list[TokenChunk]:
        """What is known and the client doesn't have."""
        found = []
        for place, piece in enumerate(self._received_chunks()):
            count, ended = self._count_complete(place, piece)
            if not ended and (count < len(piece.token_ids) or piece.finish_reason):
                found.append(part(piece, count, len(piece.token_ids), ended=True))
        return found

    def is_finished(self, number: int, index: int) -> bool:
        """Whether the client was told this output's end."""
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
        """Raise `StreamNotFound` when the client has more than is known."""
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
    """Tokens [start, end) of a piece; with its end when that's there and `ended`.

    An end that the gateway found itself, by a stop string, it finds again.
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
    """[32] bytes; equal for equal requests. Before a seed is chosen for one that brings none.

    Goes through prompts one by one: a thread that does this keeps the event loop from nothing.
    """
    digest = hashlib.sha256(f"{job.model.name}\0{job.endpoint}\0".encode())
    sampling = msgspec.to_builtins(job.sampling, str_keys=True)  # `logit_bias` has ids as keys
    digest.update(msgspec.msgpack.encode(sampling, order="sorted"))
    count = len(job.prompts)
    digest.update(msgspec.msgpack.encode([None] * count)[:-count])  # how a list of so many begins
    for prompt in job.prompts:
        digest.update(msgspec.msgpack.encode(prompt))
    if job.embeds:
        digest.update(msgspec.msgpack.encode(job.embeds))
    return digest.digest()


async def take_over_stream(
    client: EngineClient, job: Job, position: StreamPosition, fingerprint: bytes
) -> TakenOverStream:
    """What is known of the stream behind which `job`'s client wants to go on.

    Raises: `StreamNotFound` (404); `InvalidRequest` when the request isn't the stream's;
    `Overloaded`
    (503) without Redis.
    """
    try:
        return await _acquire_stream(client, job, position, fingerprint)
    except RedisError as error:
        raise Overloaded("Streams can't be looked up right now. Try again.") from error


async def defer_settlement(client: EngineClient, job: Job, taken: TakenOverStream) -> Admission:
    """Have this gateway settle the stream from now on.

    Where another one did already, what it billed is kept in `taken`, and only what comes behind
    that is let in and settled. Raises what `admit` raises.
    """
    stream, whole = taken.position.stream, job.admission_request(client.gateway_id)
    if taken.ledger_id != stream:  # the one before had the rest of it alone
        taken.billed = await _billed(client, taken)
    asking = whole if taken.billed is None else _remaining_request(whole, taken)
    asking = replace(asking, known_token_counts=taken.counts)
    admission = await take_over_request(job.caller, asking, gateway=taken.about.gateway)
    if admission is not None:
        return replace(admission, output_tokens=taken.about.output_tokens)
    taken.ledger_id, taken.billed = f"{stream}.{taken.epoch}", await _billed(client, taken)
    if taken.finished:
        return UNLIMITED
    left = max(len(job.prompts), job.max_output_tokens - taken.num_tokens)
    rest = replace(
        _remaining_request(whole, taken), max_output_tokens=left, known_token_counts=taken.counts
    )
    admission = await admit(job.caller, rest)
    if admission.output_tokens is None:
        return admission
    return replace(admission, output_tokens=admission.output_tokens + taken.num_tokens)


def _remaining_request(whole: AdmissionRequest, taken: TakenOverStream) -> AdmissionRequest:
    """A request of which something is settled already: its prompts are, and tokens."""
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
        prompt, billed = await client.redis.hmget(name, "prompt", "billed")  # type: ignore[misc]
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
    epoch = int(await redis.hincrby(name, "epoch", 1))  # type: ignore[misc]
    known = _empty_chunk(job)
    left = await _outbox(client, about)
    entries: Any = await redis.lrange(journal_key(prefix, position.stream), 0, -1)  # type: ignore[misc]
    for start, piece in map(decode_entry, entries):
        _extend(known[piece.number][piece.index], start, piece)
    for delta in left:
        number = about.requests.index(redis_keys.base_request_id(delta.request_id))
        _extend(known[number][delta.index], delta.start, chunk_from_delta(delta, number, 0))
    fields = [bits_field(number) for number in range(len(known))]
    found: Any = await redis.hmget(name, fields)  # type: ignore[misc]
    bits = list(map(decode_bits, found))
    taken = TakenOverStream(position, about, known, bits, epoch, about.ledger_id or position.stream)
    taken.check()
    client.spawn(_sweep_again(client, about))
    return taken


def _empty_chunk(job: Job) -> list[list[TokenChunk]]:
    count = job.sampling.num_sequences
    return [[TokenChunk(n, index, []) for index in range(count)] for n in range(len(job.prompts))]


def _extend(known: TokenChunk, start: int, piece: TokenChunk) -> None:
    """Add what is new of a piece that begins behind `start` tokens. A gap ends what is known."""
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
    """What waits in the outbox of the stream's gateway. Its engine requests are told to stop."""
    key = redis_keys.outbox_key(about.outbox, client.settings.key_prefix)
    found: Any = await client.redis.xrange(key)
    mine, running = [], set()
    for _, fields in found:
        batch = protocol.decode_outbox(fields[protocol.STREAM_FIELD])
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
    """Whether it answers an abort: the gateway had found a stop string, or lost its client."""
    aborted = delta.finish_reason == "stop" and not delta.token_ids
    return aborted or delta.finish_reason in ("abort", "error")


def _of(batch: OutboxBatch, about: OpenStream) -> Iterable[TokenDelta]:
    wanted = set(about.requests)
    return (d for d in batch.deltas if redis_keys.base_request_id(d.request_id) in wanted)


async def _sweep_again(client: EngineClient, about: OpenStream) -> None:
    """An engine that still writes for a gateway that is gone works for nobody."""
    await asyncio.sleep(SWEEP_AGAIN_S)
    try:
        await _outbox(client, about)
    except RedisError:  # they end by themselves
        return
