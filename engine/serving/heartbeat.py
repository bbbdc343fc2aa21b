"""A replica's sign of life."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis

from engine.contract import protocol
from engine.contract.block_map import watch_key
from engine.contract.protocol import Heartbeat, ReplicaNews
from engine.contract.redis_link import is_temporary
from engine.serving.fence import UNLESS_TAKEN, FencedOff

log = logging.getLogger(__name__)

#: KEYS: the owner, the heartbeat, the replica ids, who watches the blocks. ARGV: incarnation,
#: heartbeat, TTL, replica id, whether this is the first, which takes the id from whoever had it.
_BEAT = (
    "if ARGV[5] == '0' then\n"
    + UNLESS_TAKEN
    + """
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[3], ARGV[4])
return redis.call('GET', KEYS[4]) or 1
"""
)


class HeartbeatWriter(threading.Thread):
    """Writes `make()` every interval with a TTL; `beat()` writes one at once.

    `tell_watched` hears with each beat what stands under `watch_key`, b"" for nothing.

    Both raise `FencedOff` once another process serves under the replica's id.
    """

    def __init__(
        self,
        client: redis.Redis,
        prefix: str,
        make: Callable[[], Heartbeat],
        tell_watched: Callable[[bytes], None] = lambda number: None,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._redis = client
        self._prefix = prefix
        self._make, self._tell_watched = make, tell_watched
        self._stopping = threading.Event()
        self._writing = threading.Lock()
        self._script = client.register_script(_BEAT)
        self._told = ""
        self._claimed = False

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
        replica_id, prefix = heartbeat.replica_id, self._prefix
        try:
            written = self._script(
                keys=[
                    protocol.owner_key(replica_id, prefix),
                    protocol.replica_key(replica_id, prefix),
                    protocol.replicas_key(prefix),
                    watch_key(replica_id, prefix),
                ],
                args=[
                    heartbeat.incarnation,
                    protocol.encode(heartbeat),
                    int(protocol.HEARTBEAT_TTL_S * 1000),
                    replica_id,
                    int(not self._claimed),
                ],
            )
            self._claimed = True
            if written and heartbeat.state == "ready" != self._told:
                # Requests wait for it: gateways needn't look again to know.
                self._tell(replica_id, heartbeat.incarnation, alive=True)
        except redis.RedisError as error:
            if not is_temporary(error):
                raise
            log.warning("The heartbeat can't be written (%s).", error)
            return False
        if not written:
            raise FencedOff(replica_id)
        self._told = heartbeat.state
        self._tell_watched(written if isinstance(written, bytes) else b"")
        return True

    def _tell(
        self, replica_id: str, incarnation: str, *, alive: bool, held: list[str] | None = None
    ) -> None:
        news = ReplicaNews(replica_id=replica_id, incarnation=incarnation, alive=alive, held=held)
        self._redis.publish(protocol.news_key(self._prefix), protocol.encode(news))

    def stop(self, replica_id: str, *, forget: bool, held: list[str] | None = None) -> None:
        """End; with `forget` the key goes at once, so that gateways needn't wait for the TTL.

        `held`: the requests that the end may be due to.
        """
        self._stopping.set()
        self.join(timeout=2.0)
        if not forget:
            return
        try:
            self._redis.delete(
                protocol.replica_key(replica_id, self._prefix),
                protocol.owner_key(replica_id, self._prefix),
            )
            self._redis.srem(protocol.replicas_key(self._prefix), replica_id)
            self._tell(replica_id, self._make().incarnation, alive=False, held=held)
        except redis.RedisError as error:
            log.warning("The heartbeat can't be removed (%s); it will expire.", error)
