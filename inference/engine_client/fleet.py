"""`Fleet`: what the replicas' heartbeats say, read every half second."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from engine.contract import protocol
from engine.contract.protocol import Heartbeat, ModelInfo

logger = logging.getLogger(__name__)

#: A model whose last replica vanished this long ago is still expected back.
REMEMBER_MODEL_S = 120.0
#: States of a replica that knows its model; while it loads, it doesn't.
_KNOWING = ("ready", "sleeping", "draining")
#: Dead incarnations that are remembered: their last heartbeats take seconds to expire.
_REMEMBERED_DEAD = 256
#: The weight of the newest heartbeat in a replica's rate: a few seconds count.
_NEW_RATE = 0.2


@dataclass(slots=True)
class Replica:
    """One replica as this gateway sees it.

    Attributes:
        heartbeat: the latest.
        changed_at: when (monotonic) a heartbeat last differed from the one before. Clocks of two
            machines are never compared.
        submitted: requests that this gateway gave it since that heartbeat.
        per_second: outputs that it ended in a second when others waited last; 0 while that isn't
            known.
    """

    heartbeat: Heartbeat
    changed_at: float
    submitted: int = 0
    per_second: float = 0.0

    @property
    def stalled(self) -> bool:
        """The process beats, but its engine's loop does not come round."""
        beat = self.heartbeat
        return beat.at - beat.progress_at > protocol.STALL_AFTER_S

    @property
    def silent(self) -> bool:
        """Nothing was heard of it for a while: its process may stand still, or its Redis link."""
        return time.monotonic() - self.changed_at > protocol.SILENT_AFTER_S

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        return self.heartbeat.state == "ready" and not self.stalled

    @property
    def load(self) -> int:
        """Requests it runs or queues, as far as this gateway knows."""
        stats = self.heartbeat.stats
        return stats.num_requests_running + stats.num_requests_waiting + self.submitted


class Fleet:
    """The live replicas. `refresh` is the only method that asks Redis."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis, self._prefix = redis, prefix
        self._replicas: dict[str, Replica] = {}
        self._models: dict[str, tuple[float, ModelInfo]] = {}
        self._dead: deque[str] = deque(maxlen=_REMEMBERED_DEAD)

    async def refresh(self) -> None:
        """Read all heartbeats. Raises redis.RedisError; then nothing has changed."""
        ids: set[bytes] = await self._redis.smembers(  # type: ignore[assignment]
            protocol.replicas_key(self._prefix)
        )
        names = sorted(replica_id.decode() for replica_id in ids)
        keys = [protocol.replica_key(name, self._prefix) for name in names]
        values: list[bytes | None] = await self._redis.mget(keys) if keys else []  # type: ignore[assignment]
        self.update(dict(zip(names, values, strict=True)), time.monotonic())

    def update(self, values: dict[str, bytes | None], now: float) -> None:
        """Take in heartbeats by replica id; None for one whose key has expired."""
        seen: dict[str, Replica] = {}
        for replica_id, data in values.items():
            if data is None:
                continue
            try:
                beat = protocol.decode_heartbeat(data)
            except (msgspec.DecodeError, msgspec.ValidationError):
                logger.warning("Replica %s sends heartbeats that can't be read.", replica_id)
                continue
            if beat.incarnation not in self._dead:
                seen[replica_id] = self._merge(replica_id, beat, now)
        self._replicas = seen

    def _merge(self, replica_id: str, beat: Heartbeat, now: float) -> Replica:
        known = self._replicas.get(replica_id)
        if known is not None and known.heartbeat.at == beat.at:
            return known
        if beat.state in _KNOWING:
            self._models[beat.model.name] = (now, beat.model)
        return Replica(beat, now, per_second=_rate(known, beat))

    def forget(self, replica_id: str) -> None:
        """Think it dead until the next refresh: what is known of it is out of date."""
        self._replicas.pop(replica_id, None)

    def excuse(self) -> None:
        """Nothing could be heard of any of them: their silence up to now means nothing."""
        for replica in self._replicas.values():
            replica.changed_at = time.monotonic()

    def bury(self, replica_id: str, incarnation: str) -> None:
        """This incarnation is gone for good, whatever is still read of it."""
        self._dead.append(incarnation)
        known = self._replicas.get(replica_id)
        if known is not None and known.heartbeat.incarnation == incarnation:
            del self._replicas[replica_id]

    def clear(self) -> None:
        """Think all of them dead until the next refresh."""
        self._replicas = {}

    def __iter__(self) -> Iterator[Replica]:
        """The live ones: a heartbeat without TTL that stands still is a dead one's."""
        oldest = _oldest()
        return iter([r for r in self._replicas.values() if r.changed_at >= oldest])

    def get(self, replica_id: str) -> Replica | None:
        """The replica if it's alive."""
        found = self._replicas.get(replica_id)
        return found if found is not None and found.changed_at >= _oldest() else None

    def of_model(self, name: str) -> list[Replica]:
        """Live replicas that serve the model, ready or not."""
        return [r for r in self if r.heartbeat.model.name == name]

    def why_unavailable(self, name: str) -> str:
        """Why nobody answers for the model right now, for its clients."""
        for replica in self.of_model(name):
            beat = replica.heartbeat
            if beat.state == "loading":
                return f"The model '{name}' is loading ({beat.load_progress:.0%}). Try again soon."
        return f"No replica serves the model '{name}' at the moment."

    def model(self, name: str) -> ModelInfo | None:
        """What is known of a model that is served or was a moment ago."""
        found = self._models.get(name)
        if found is None or time.monotonic() - found[0] > REMEMBER_MODEL_S:
            return None
        return found[1]

    def model_names(self) -> list[str]:
        """Models that live replicas serve."""
        return sorted({replica.heartbeat.model.name for replica in self})


def _oldest() -> float:
    """When a live replica was heard at the latest."""
    return time.monotonic() - protocol.HEARTBEAT_TTL_S


def _rate(known: Replica | None, beat: Heartbeat) -> float:
    """Outputs that a replica ends in a second while others wait, as its heartbeats tell.

    How few ended while hardly anything was asked says nothing of what it can do.
    """
    if known is None or known.heartbeat.incarnation != beat.incarnation:
        return 0.0
    seconds = beat.at - known.heartbeat.at
    waited = known.heartbeat.stats.num_requests_waiting and beat.stats.num_requests_waiting
    if seconds <= 0 or not waited:
        return known.per_second
    before = sum(known.heartbeat.stats.requests_finished_total.values())
    ended = (sum(beat.stats.requests_finished_total.values()) - before) / seconds
    if not known.per_second:
        return ended
    return known.per_second + _NEW_RATE * (ended - known.per_second)
