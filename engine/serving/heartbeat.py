"""A replica's sign of life."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis

from engine.contract import protocol
from engine.contract.protocol import Heartbeat
from engine.contract.redis_link import is_temporary

log = logging.getLogger(__name__)


class HeartbeatWriter(threading.Thread):
    """Writes `make()` every interval with a TTL; `beat()` writes one at once."""

    def __init__(self, client: redis.Redis, prefix: str, make: Callable[[], Heartbeat]) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._redis = client
        self._prefix = prefix
        self._make = make
        self._stopping = threading.Event()
        self._writing = threading.Lock()

    def run(self) -> None:
        while not self._stopping.is_set():
            self.beat()
            self._stopping.wait(protocol.HEARTBEAT_INTERVAL_S)

    def beat(self) -> None:
        """Write one heartbeat now. Where Redis can't take it, the next one tries again."""
        # One at a time, lest an older state be written over a newer one.
        with self._writing:
            written = self._write(self._make())
        if not written:
            time.sleep(protocol.HEARTBEAT_INTERVAL_S)

    def _write(self, heartbeat: Heartbeat) -> bool:
        """False when Redis couldn't be reached or refused it."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(
            protocol.replica_key(heartbeat.replica_id, self._prefix),
            protocol.encode(heartbeat),
            px=int(protocol.HEARTBEAT_TTL_S * 1000),
        )
        pipe.sadd(protocol.replicas_key(self._prefix), heartbeat.replica_id)
        try:
            pipe.execute()
        except redis.RedisError as error:
            if not is_temporary(error):
                raise
            log.warning("The heartbeat can't be written (%s).", error)
            return False
        return True

    def stop(self, replica_id: str, *, forget: bool) -> None:
        """End; with `forget` the key goes at once, so that gateways needn't wait for the TTL."""
        self._stopping.set()
        self.join(timeout=2.0)
        if not forget:
            return
        try:
            self._redis.delete(protocol.replica_key(replica_id, self._prefix))
            self._redis.srem(protocol.replicas_key(self._prefix), replica_id)
        except redis.RedisError as error:
            log.warning("The heartbeat can't be removed (%s); it will expire.", error)
