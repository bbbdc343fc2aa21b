"""An embedded Redis whose disk is full goes on without writing, and writes again once there's room.

A Redis that can't append to its file refuses every write (MISCONF), and with it every request. What
it holds matters for minutes, serving matters now: so persistence is switched off until there's
room. Then Redis writes its file anew, beside the old one, and swaps them when it's whole.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import redis

from engine.contract.redis_clients import sync_client

logger = logging.getLogger(__name__)

EVERY_S = 1.0
#: Room that there must be before anything is written again, and below which health says so.
ENOUGH_BYTES = 64 << 20


def free_bytes(folder: Path) -> int:
    """Room on the folder's disk."""
    return shutil.disk_usage(folder).free


class DiskWatch:
    """Looks at one server's persistence every second.

    Args:
        url: where the server answers.
        folder: where it writes.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._redis = sync_client(url, timeout_s=2.0)
        self._folder = folder
        self._looked_at = 0.0
        #: Whether the server goes on without writing.
        self.suspended = False

    def tick(self) -> None:
        """Switch persistence off when it fails, on when there's room. Never raises RedisError."""
        now = time.monotonic()
        if now - self._looked_at < EVERY_S:
            return
        self._looked_at = now
        try:
            self._look()
        except redis.RedisError as error:
            logger.warning("the embedded Redis's persistence can't be looked at: %s", error)

    def _look(self) -> None:
        if self.suspended:
            if free_bytes(self._folder) >= ENOUGH_BYTES:
                self._redis.config_set("appendonly", "yes")
                self.suspended = False
                logger.info("there's room on the disk again: the embedded Redis writes its file")
            return
        info = self._redis.info("persistence")
        if info.get("aof_enabled") and info.get("aof_last_write_status") != "ok":
            self._redis.config_set("appendonly", "no")
            self.suspended = True
            logger.error(
                "the embedded Redis can't write to %s (%d MB free): it goes on without, and what "
                "it holds is lost if it ends before there's room",
                self._folder,
                free_bytes(self._folder) >> 20,
            )

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()
