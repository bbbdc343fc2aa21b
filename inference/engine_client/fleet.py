"""`Fleet`: the replicas according to their heartbeats, read every half second."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.contract import redis_keys
from engine.contract.message_version import MESSAGE_VERSION, is_compatible
from engine.contract.messages import (
    HEARTBEAT_TIMEOUT_S,
    HEARTBEAT_TTL_S,
    STALL_TIMEOUT_S,
    Heartbeat,
    ModelInfo,
    ReplicaEvent,
    decode_heartbeat,
    decode_replica_event,
)
from inference.engine_client.flight import InFlightRequest

logger = logging.getLogger(__name__)

RETRY_S = 0.5
WAIT_S = 4.0


class ReplicaEventReader:
    """Reads the channel of `ReplicaEvent` forever and passes each event to `take`.

    Events that are missed while Redis is unreachable show up in the next poll of the heartbeats.
    """

    def __init__(
        self, redis: Redis, prefix: str, callback: Callable[[ReplicaEvent], Awaitable[None]]
    ) -> None:
        self._redis, self._callback = redis, callback
        self._channel = redis_keys.replica_events_channel(prefix)

    async def run(self) -> None:
        """Listen until cancelled; reconnects to Redis when the connection is lost."""
        while True:
            try:
                await self._listen()
            except RedisError as error:
                logger.debug("No news of replicas: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _listen(self) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(self._channel)
            while True:
                message = await pubsub.get_message(timeout=WAIT_S)
                if message is not None:
                    await self._dispatch(message["data"])

    async def _dispatch(self, data: bytes) -> None:
        try:
            news = decode_replica_event(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.warning("replica events unreadable: %s", error)
            return
        await self._callback(news)


#: A model whose last replica vanished less than this long ago is expected to come back.
REMEMBER_MODEL_S = 120.0
#: States in which a replica knows its model; while it loads, it doesn't.
STATES_WITH_MODEL = ("ready", "sleeping", "draining")
#: Maximum number of remembered dead incarnations: their last heartbeats take seconds to expire.
MAX_DEAD_INCARNATIONS = 256
#: Weight of the newest heartbeat in a replica's smoothed rate, which so covers a few seconds.
_NEW_RATE = 0.2


@dataclass(slots=True)
class Replica:
    """One replica as this gateway sees it.

    Attributes:
        heartbeat: the latest.
        changed_at: when (monotonic) a heartbeat last differed from the previous one. Clocks of two
            machines are never compared.
        submitted: requests that this gateway sent to it since that heartbeat, minus those that
            ended.
        uncounted: this gateway's open requests there that neither counts: they were on their way
            to the engine at that heartbeat, or their end is on its way back.
        per_second: outputs finished per second while requests were last waiting; 0 if unknown.
    """

    heartbeat: Heartbeat
    changed_at: float
    submitted: int = 0
    uncounted: int = 0
    per_second: float = 0.0

    @property
    def stalled(self) -> bool:
        """Whether the process sends heartbeats but its engine loop makes no progress."""
        beat = self.heartbeat
        return beat.at - beat.progress_at > STALL_TIMEOUT_S

    @property
    def silent(self) -> bool:
        """Whether its heartbeats stopped: its process may hang, or its Redis connection is lost."""
        return time.monotonic() - self.changed_at > HEARTBEAT_TIMEOUT_S

    @property
    def ready(self) -> bool:
        """Whether it accepts new requests."""
        return self.heartbeat.state == "ready" and not self.stalled

    @property
    def only_prefills(self) -> bool:
        """Whether it prefills for others, and decodes only while no other can."""
        handover = self.heartbeat.kv_handover
        return handover is not None and handover.only_prepares

    @property
    def only_encodes(self) -> bool:
        """Whether it encodes media for others, and can neither prefill nor decode."""
        handover = self.heartbeat.kv_handover
        return handover is not None and handover.only_encodes

    @property
    def can_answer(self) -> bool:
        """Whether it accepts new requests and doesn't only encode."""
        return self.ready and not self.only_encodes

    @property
    def kv_address(self) -> str:
        """The address at which it serves its KV blocks to other replicas; "" for none."""
        handover = self.heartbeat.kv_handover
        return "" if handover is None else handover.address

    @property
    def load(self) -> int:
        """Requests it runs or queues, as far as this gateway knows."""
        return max(0, self._counted + self.uncounted)

    def count_open(self, num_requests: int) -> None:
        """Update `uncounted`; `num_requests`: this gateway's open ones there."""
        self.uncounted = max(0, num_requests - self._counted)

    @property
    def _counted(self) -> int:
        stats = self.heartbeat.stats
        return stats.num_requests_running + stats.num_requests_waiting + self.submitted


class Fleet:
    """The live replicas. Only `refresh` accesses Redis."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis, self._prefix = redis, prefix
        self._replicas: dict[str, Replica] = {}
        self._models: dict[str, tuple[float, ModelInfo]] = {}
        self._dead: deque[str] = deque(maxlen=MAX_DEAD_INCARNATIONS)

    async def refresh(self) -> None:
        """Read all heartbeats. Raises redis.RedisError, which leaves the fleet unchanged."""
        ids: set[bytes] = await self._redis.smembers(  # type: ignore[assignment]
            redis_keys.replicas_key(self._prefix)
        )
        names = sorted(replica_id.decode() for replica_id in ids)
        keys = [redis_keys.replica_key(name, self._prefix) for name in names]
        values: list[bytes | None] = await self._redis.mget(keys) if keys else []  # type: ignore[assignment]
        self.update(dict(zip(names, values, strict=True)), time.monotonic())

    def update(self, values: dict[str, bytes | None], now: float) -> None:
        """Update from heartbeats by replica id; None for one whose key has expired."""
        seen: dict[str, Replica] = {}
        for replica_id, data in values.items():
            if data is None:
                continue
            try:
                beat = decode_heartbeat(data)
            except (msgspec.DecodeError, msgspec.ValidationError):
                logger.warning("Replica %s sends heartbeats that can't be read.", replica_id)
                continue
            if not is_compatible(beat.message_version):
                logger.warning(
                    "Replica %s gets no requests: its messages have version %d, this gateway's "
                    "version %d. Update the older one.",
                    replica_id,
                    beat.message_version,
                    MESSAGE_VERSION,
                )
                continue
            if beat.incarnation not in self._dead:
                seen[replica_id] = self._update_replica(replica_id, beat, now)
        self._replicas = seen

    def _update_replica(self, replica_id: str, beat: Heartbeat, now: float) -> Replica:
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.heartbeat.at == beat.at:
            return replica
        if beat.state in STATES_WITH_MODEL:
            self._models[beat.model.name] = (now, beat.model)
        return Replica(beat, now, per_second=_rate(replica, beat))

    def forget(self, replica_id: str) -> None:
        """Treat it as dead until the next refresh: what is known of it is out of date."""
        self._replicas.pop(replica_id, None)

    def reset_timers(self) -> None:
        """Restart all heartbeat timeouts: no heartbeat could be read while Redis was away."""
        for replica in self._replicas.values():
            replica.changed_at = time.monotonic()

    def mark_dead(self, replica_id: str, incarnation: str) -> None:
        """Treat this incarnation as dead, even if an old heartbeat of it is still read."""
        self._dead.append(incarnation)
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.heartbeat.incarnation == incarnation:
            del self._replicas[replica_id]

    def clear(self) -> None:
        """Treat all replicas as dead until the next refresh."""
        self._replicas = {}

    def __iter__(self) -> Iterator[Replica]:
        """Live replicas. A heartbeat without TTL that no longer changes is of a dead one."""
        oldest = oldest_heartbeat_at()
        return iter([r for r in self._replicas.values() if r.changed_at >= oldest])

    def get(self, replica_id: str) -> Replica | None:
        """The replica if it's alive."""
        entry = self._replicas.get(replica_id)
        return entry if entry is not None and entry.changed_at >= oldest_heartbeat_at() else None

    def of_model(self, name: str) -> list[Replica]:
        """Live replicas that serve the model, ready or not."""
        return [r for r in self if r.heartbeat.model.name == name]

    def unavailable_reason(self, name: str) -> str:
        """Why no replica answers for the model right now, as a message for clients."""
        for replica in self.of_model(name):
            beat = replica.heartbeat
            if beat.state == "loading":
                return f"The model '{name}' is loading ({beat.load_progress:.0%}). Try again soon."
        return f"No replica serves the model '{name}' at the moment."

    def model(self, name: str) -> ModelInfo | None:
        """Last known description of a model that is or was recently served."""
        entry = self._models.get(name)
        if entry is None or time.monotonic() - entry[0] > REMEMBER_MODEL_S:
            return None
        return entry[1]

    def model_names(self) -> list[str]:
        """Models that live replicas serve."""
        return sorted({replica.heartbeat.model.name for replica in self})


def oldest_heartbeat_at() -> float:
    """Time (monotonic) of the oldest heartbeat that a live replica may have."""
    return time.monotonic() - HEARTBEAT_TTL_S


def _rate(replica: Replica | None, beat: Heartbeat) -> float:
    """Smoothed number of outputs that a replica finishes per second while requests wait.

    The rate of a replica without a queue says nothing about its capacity, so it isn't measured.
    """
    if replica is None or replica.heartbeat.incarnation != beat.incarnation:
        return 0.0
    seconds = beat.at - replica.heartbeat.at
    waited = replica.heartbeat.stats.num_requests_waiting and beat.stats.num_requests_waiting
    if seconds <= 0 or not waited:
        return replica.per_second
    previous_count = sum(replica.heartbeat.stats.requests_finished_total.values())
    rate = (sum(beat.stats.requests_finished_total.values()) - previous_count) / seconds
    if not replica.per_second:
        return rate
    return replica.per_second + _NEW_RATE * (rate - replica.per_second)


#: Prompt tokens that are hashed: a few KV blocks, roughly the beginning of a system prompt.
PREFIX_TOKENS = 64


def prefix_key(token_ids: Sequence[int], namespace: str) -> bytes:
    """[16] bytes; equal for prompts that may share their first KV blocks."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=16)
    digest.update(array("q", token_ids[:PREFIX_TOKENS]).tobytes())
    return digest.digest()


#: Bytes of a prompt's text that are hashed where there are no tokens: about as many tokens.
PREFIX_BYTES = 4 * PREFIX_TOKENS


def text_prefix_key(text: bytes, namespace: str) -> bytes:
    """[16] bytes; like `prefix_key`, for callers without a tokenizer."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=16)
    digest.update(text[:PREFIX_BYTES])
    return digest.digest()


def choose_replica(
    replicas: Sequence[Replica], key: bytes, slack: int, adapter: str = "", local_id: str = ""
) -> Replica | None:
    """The replica for a request with this prefix, or None when none is ready.

    Rendezvous hashing gives every gateway the same answer without communication: the prefix's
    hash ranks the replicas, and the first takes the request while it has at most `slack` requests
    more than the least loaded one. When a replica joins or leaves, only its own prefixes move.
    Replicas that have the prefix in their KV cache or host memory come before those that don't,
    within the same limit.

    `adapter`: its digest; replicas that have its weights loaded are preferred while they have at
    most `slack` requests more than the others.

    `local_id`: the replica in this gateway's pod. An endpoint picker has chosen it for the prefix,
    so it takes the request while it has at most `slack` requests more than the least loaded one.
    """
    ready = [replica for replica in replicas if replica.can_answer]
    ready = [replica for replica in ready if not replica.silent] or ready
    ready = [replica for replica in ready if not replica.heartbeat.paused] or ready
    ready = [replica for replica in ready if not replica.heartbeat.spare] or ready
    ready = [replica for replica in ready if not replica.only_prefills] or ready
    if len(ready) <= 1:
        return ready[0] if ready else None
    limit = min(replica.load for replica in ready) + slack
    affordable = [replica for replica in ready if replica.load <= limit]
    if local := [replica for replica in affordable if replica.heartbeat.replica_id == local_id]:
        return local[0]
    if adapter:
        affordable = [
            candidate for candidate in affordable if has_adapter_loaded(candidate, adapter)
        ] or affordable
    return max(affordable, key=lambda replica: _rank(key, replica.heartbeat))


def has_adapter_loaded(replica: Replica, adapter: str) -> bool:
    """Whether the adapter's weights are in the replica's device or host memory."""
    states = replica.heartbeat.adapters
    return any(state.digest == adapter and state.tier != "disk" for state in states)


def failover_candidates(flight: InFlightRequest, replicas: Sequence[Replica]) -> list[Replica]:
    """Replicas that may continue a flight.

    Only replicas with the same weights: others would continue the text as a different model. If a
    ready one has the same numerics as the last replica, only replicas with these.
    """
    mine = flight.numerics
    if not flight.has_output or mine is None:
        return list(replicas)
    fit = [
        replica
        for replica in replicas
        if (theirs := replica.heartbeat.numerics) is None or theirs.weights == mine.weights
    ]
    same = [replica for replica in fit if replica.can_answer and replica.heartbeat.numerics == mine]
    return same or fit


def _rank(key: bytes, beat: Heartbeat) -> tuple[bool, bytes]:
    digest = hashlib.blake2b(beat.replica_id.encode(), key=key, digest_size=8).digest()
    return key in beat.cached_prefixes, digest
