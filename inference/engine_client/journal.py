"""Journal of open streams in Redis, from which another gateway can continue them.

Beside the outbox, whose entries are trimmed once they are handed out: a token is in the one or the
other, or in both, until the stream has been over for a while.
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

#: A stream can be gone on with for so long after it was last heard of, and after its end.
KEEP_S, KEEP_ENDED_S = 300, 60

#: Streams that are written in one command, and in one turn of the event loop.
MAX_SAVED_PER_TICK = 32
#: KEYS: of each stream the list of its entries, and the stream itself. ARGV: when they expire; of
#: each stream how many entries come, and these.
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
#: Of the replica that made the latest tokens, and whether others had made earlier ones.
Bits = tuple[Numerics | None, bool]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)
_bits_decoder = msgspec.msgpack.Decoder(Bits)


class OpenStream(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Stream description from which another gateway can continue it.

    Attributes:
        tenant_id, holder: whose it is: the tenant's, and within it a key's or a person's.
        print: of the request; the same request has the same one.
        gateway: the process that let it in, for the ledger. ledger_id: under which it settles,
            "" for the stream's own id. outbox: its engine client.
        requests: the engine's ids of its prompts. started_at, seed: as they were.
        output_tokens: how many may be generated, None for no limit but the request's own.
        read_until: the last item of the stored conversation that its prompt is made of.
        adapter: the content that it goes through, wherever the adapter's name leads meanwhile.
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
    """This gateway's open streams. What is noted is kept at the next `save`."""

    def __init__(self, link: RedisPipeline, prefix: str) -> None:
        self._link, self._prefix = link, prefix
        self._pending: dict[str, dict[tuple[int, int], Entry]] = {}
        #: Streams whose client was told tokens while Redis was away.
        self._untold: set[str] = set()

    def begin(self, stream: str, about: OpenStream) -> None:
        """A stream was opened, or taken over. What Redis doesn't take can't be gone on with."""
        name = redis_keys.stream_key(stream, self._prefix)
        self._link.send("HSET", name, "open", msgspec.msgpack.encode(about))
        self._link.send("EXPIRE", name, KEEP_S)

    def record_placement(self, stream: str, number: int, bits: Bits) -> None:
        """A replica was given one of the stream's requests."""
        name = redis_keys.stream_key(stream, self._prefix)
        self._link.send("HSET", name, bits_field(number), _encoder.encode(bits))
        self._link.send("EXPIRE", name, KEEP_S)

    def mark_delivered(self, stream: str) -> asyncio.Future[Any]:
        """The first of its tokens have left for the client: from now on it's billed.

        What Redis doesn't take now is sent again by `save`.
        """

        def record_error(reply: asyncio.Future[Any]) -> None:
            if reply.cancelled() or reply.exception() is not None:
                self._untold.add(stream)

        name = redis_keys.stream_key(stream, self._prefix)
        reply = self._link.send("HSET", name, "told", 1)
        reply.add_done_callback(record_error)
        self._link.send("EXPIRE", name, KEEP_S)
        return reply

    def record_tokens(self, stream: str, start: int, chunk: TokenChunk) -> None:
        """Tokens came: `start` of the output were there before."""
        outputs = self._pending.setdefault(stream, {})
        entry = outputs.get((chunk.number, chunk.index))
        if entry is not None:
            entry[1].merge(chunk)
            return
        copy = dataclasses.replace(  # a slow reader's pieces are merged, and these apart from them
            chunk,
            token_ids=list(chunk.token_ids),
            logprobs=None if chunk.logprobs is None else list(chunk.logprobs),
        )
        outputs[chunk.number, chunk.index] = start, copy

    async def save(self) -> None:
        """Write what was noted. Raises redis.RedisError; then the next call tries again."""
        pending, self._pending = self._pending, {}
        untold, self._untold = self._untold, set()
        replies = [self.mark_delivered(stream) for stream in untold]
        try:
            streams = iter(pending.items())
            while some := list(islice(streams, MAX_SAVED_PER_TICK)):
                replies.append(self._write(some))
                await asyncio.sleep(0)  # tokens come in between
            await asyncio.gather(*replies)
        except BaseException:
            newer, self._pending = self._pending, pending
            for stream, outputs in newer.items():
                for start, chunk in outputs.values():
                    self.record_tokens(stream, start, chunk)
            raise  # twice is no harm: entries say where they begin

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
        """The stream is over here and will be billed: who goes on with it bills the rest."""
        name = redis_keys.stream_key(stream, self._prefix)
        counts = "prompt", prompt_tokens, "billed", completion_tokens
        replies = [self._link.send("HSET", name, *counts)]
        for key in (name, journal_key(self._prefix, stream)):
            replies.append(self._link.send("EXPIRE", key, KEEP_ENDED_S))
        with contextlib.suppress(RedisError):  # without Redis nobody goes on with it
            await replies[-1]
        self._untold.discard(stream)
