"""Journal of open streams in Redis, from which another gateway can continue them.

It complements the outbox, whose entries are trimmed once they are delivered: a token is in one or
both of the two until some time after the stream has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from itertools import islice
from typing import Any

import msgspec
from redis.exceptions import RedisError

from engine.contract import redis_keys
from engine.contract.lora import AdapterRef
from engine.contract.replica_state import Numerics
from engine.system.redis_client import RedisPipeline
from inference.engine_client.mailbox import TokenChunk

#: Seconds that a stream can be resumed after its last token, and after its end.
KEEP_S, KEEP_ENDED_S = 300, 60

#: Maximum number of streams written by one command, in one iteration of the event loop.
MAX_SAVED_PER_TICK = 32
#: KEYS: for each stream the list of its entries, and the stream itself. ARGV: seconds until they
#: expire; for each stream the number of entries, then the entries.
_SAVE = """
local at = 2
for i = 1, #KEYS, 2 do
  local count = tonumber(ARGV[at])
  redis.call('RPUSH', KEYS[i], unpack(ARGV, at + 1, at + count))
  redis.call('EXPIRE', KEYS[i], ARGV[1])
  redis.call('EXPIRE', KEYS[i + 1], ARGV[1])
  at = at + count + 1
end
"""

Entry = tuple[int, TokenChunk]
#: Numerics of the replica that produced the latest tokens, and whether earlier tokens had others.
Bits = tuple[Numerics | None, bool]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)
_bits_decoder = msgspec.msgpack.Decoder(Bits)


class OpenStream(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Stream description from which another gateway can continue it.

    Attributes:
        tenant_id, holder: the tenant that owns it, and the key or user within the tenant.
        print: fingerprint of the request; equal requests have equal fingerprints.
        gateway: the process that admitted it, for the ledger. ledger_id: under which it settles,
            "" for the stream's own id. outbox: its engine client.
        requests: the engine's ids of its prompts. started_at, seed: of the original request.
        output_tokens: maximum number of generated tokens, None for only the request's own limit.
        read_until: the last item of the stored conversation that its prompt was built from.
        adapter: the adapter version that it runs with, even if the adapter's name has moved on.
    """

    tenant_id: int
    holder: str
    print: bytes
    gateway: str
    outbox: str
    requests: list[str]
    started_at: float
    seed: int
    output_tokens: int | None = None
    read_until: int | None = None
    ledger_id: str = ""
    adapter: AdapterRef | None = None


def journal_key(prefix: str, stream: str) -> str:
    """A list of `Entry`s."""
    return f"{prefix}:journal:{stream}"


def decode_open(data: bytes) -> OpenStream:
    """Raises msgspec.DecodeError or ValidationError."""
    return msgspec.msgpack.decode(data, type=OpenStream)


def decode_entry(data: bytes) -> Entry:
    """Raises msgspec.DecodeError or ValidationError."""
    return _decoder.decode(data)


def bits_field(number: int) -> str:
    """Field of a stream's hash with the `Bits` of its request `number`."""
    return f"numerics:{number}"


def decode_bits(data: bytes | None) -> Bits:
    """Raises msgspec.DecodeError or ValidationError."""
    return _bits_decoder.decode(data) if data is not None else (None, False)


class Journal:
    """Journal of this gateway's open streams. Recorded tokens are written by the next `save`."""

    def __init__(self, link: RedisPipeline, prefix: str) -> None:
        self._link, self._prefix = link, prefix
        self._pending: dict[str, dict[tuple[int, int], Entry]] = {}
        #: Streams whose delivery mark failed to reach Redis; `save` sends it again.
        self._unrecorded: set[str] = set()
        #: Open streams that have delivered tokens.
        self._delivered: set[str] = set()

    def begin(self, stream: str, about: OpenStream) -> None:
        """A stream was opened or taken over. It can't be resumed if Redis fails to store this."""
        name = redis_keys.stream_key(stream, self._prefix)
        self._link.send("HSET", name, "open", msgspec.msgpack.encode(about))
        self._link.send("EXPIRE", name, KEEP_S)

    def record_placement(self, stream: str, number: int, bits: Bits) -> None:
        """One of the stream's requests was assigned to a replica."""
        name = redis_keys.stream_key(stream, self._prefix)
        self._link.send("HSET", name, bits_field(number), _encoder.encode(bits))
        self._link.send("EXPIRE", name, KEEP_S)

    def mark_delivered(self, stream: str) -> asyncio.Future[Any]:
        """The stream's first tokens were sent to the client: from now on it is billed.

        If Redis fails to store this now, `save` and `restore_marks` send it again.
        """
        self._delivered.add(stream)

        def record_error(reply: asyncio.Future[Any]) -> None:
            if reply.cancelled() or reply.exception() is not None:
                self._unrecorded.add(stream)

        name = redis_keys.stream_key(stream, self._prefix)
        reply = self._link.send("HSET", name, "told", 1)
        reply.add_done_callback(record_error)
        self._link.send("EXPIRE", name, KEEP_S)
        return reply

    async def restore_marks(self) -> None:
        """Mark the open streams again after Redis was away: it may have lost replies, and with
        `appendfsync everysec` even writes that it had confirmed. Raises redis.RedisError.
        """
        await asyncio.gather(*map(self.mark_delivered, list(self._delivered)))

    def record_tokens(self, stream: str, start: int, chunk: TokenChunk) -> None:
        """Record new tokens, of which the output had `start` before."""
        outputs = self._pending.setdefault(stream, {})
        entry = outputs.get((chunk.number, chunk.index))
        if entry is not None:
            entry[1].merge(chunk)
            return
        copy = dataclasses.replace(  # both this copy and the reader's chunk are merged later
            chunk,
            token_ids=list(chunk.token_ids),
            logprobs=None if chunk.logprobs is None else list(chunk.logprobs),
        )
        outputs[chunk.number, chunk.index] = start, copy

    async def save(self) -> None:
        """Write recorded tokens. Raises redis.RedisError; the next call then tries again."""
        pending, self._pending = self._pending, {}
        unrecorded, self._unrecorded = self._unrecorded, set()
        replies = [self.mark_delivered(stream) for stream in unrecorded]
        try:
            streams = iter(pending.items())
            while some := list(islice(streams, MAX_SAVED_PER_TICK)):
                replies.append(self._write(some))
                await asyncio.sleep(0)  # let tokens be handled in between
            await asyncio.gather(*replies)
        except BaseException:
            newer, self._pending = self._pending, pending
            for stream, outputs in newer.items():
                for start, chunk in outputs.values():
                    self.record_tokens(stream, start, chunk)
            raise  # writing an entry twice is harmless: entries carry their start position

    def _write(
        self, streams: list[tuple[str, dict[tuple[int, int], Entry]]]
    ) -> asyncio.Future[Any]:
        keys: list[str] = []
        words: list[bytes | int] = [KEEP_S]
        for stream, outputs in streams:
            keys += [journal_key(self._prefix, stream), redis_keys.stream_key(stream, self._prefix)]
            words.append(len(outputs))
            words += map(_encoder.encode, outputs.values())
        return self._link.send("EVAL", _SAVE, len(keys), *keys, *words)

    async def mark_settled(self, stream: str, prompt_tokens: int, completion_tokens: int) -> None:
        """The stream ended here and is billed: a gateway that resumes it bills only the rest."""
        name = redis_keys.stream_key(stream, self._prefix)
        counts = "prompt", prompt_tokens, "billed", completion_tokens
        replies = [self._link.send("HSET", name, *counts)]
        for key in (name, journal_key(self._prefix, stream)):
            replies.append(self._link.send("EXPIRE", key, KEEP_ENDED_S))
        with contextlib.suppress(RedisError):  # without Redis no gateway can resume it
            await replies[-1]
        self._unrecorded.discard(stream)
        self._delivered.discard(stream)
