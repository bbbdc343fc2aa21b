"""The processes of one instance, started in order and stopped in reverse."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import redis
from django.conf import settings
from django.db import DatabaseError

from catalog.models import Replica, ReplicaState, ServedModel
from catalog.processes import ManagedProcess
from catalog.slot import describe_exit
from catalog.supervisor import TICK_S, Supervisor
from config import embedded_redis
from config.disk_watch import DiskWatch
from config.up.first_token import FirstToken
from config.up.gateways import Gateways
from config.up.kept import KeptProcesses
from engine.contract import redis_clients
from metering.drain import Drainer, drain_once
from metering.redis_clients import sync_client
from tenants.commands import sentence
from tenants.redaction import without_credentials

logger = logging.getLogger(__name__)

#: XAUTOCLAIM came with this one.
OLDEST_REDIS = (6, 2)
#: What a worker needs to give its work back.
WORKER_GRACE_S = 15.0


class StartFailed(RuntimeError):
    """Something that must run doesn't: the message says what and why."""


class ModelFailed(StartFailed):
    """The model can't be loaded."""


class Stopped(Exception):
    """Ctrl-C or SIGTERM came before everything was up."""


class Stack:
    """What `manage.py up` has started so far.

    Use as a context manager: whatever happens inside, everything is stopped at the end.
    """

    def __init__(self, data_dir: Path, grace: float) -> None:
        self.data_dir, self.grace = data_dir, grace
        self.redis: ManagedProcess | None = None
        self.disk_watch: DiskWatch | None = None
        self.gateways: Gateways | None = None
        self.workers: list[KeptProcesses] = []
        self.supervisor: Supervisor | None = None
        self.drainer: Drainer | None = None
        self.signals: list[int] = []
        self._old_handlers: dict[int, object] = {}

    def __enter__(self) -> Stack:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    # -- start --------------------------------------------------------------------------------

    def start_redis(self) -> str:
        """Start the embedded server, unless REDIS_URL names another; return what is used."""
        if os.environ.get("REDIS_URL"):
            check_redis(settings.REDIS_URL)
            return "your Redis"
        self.redis, url = embedded_redis.start(self.data_dir)
        check_redis(url)
        self.disk_watch = DiskWatch(url, self.data_dir)
        return "the embedded Redis"

    # -- run ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Keep everything running. Raises `StartFailed` for what can't be mended, `Stopped`."""
        if self.signals:
            raise Stopped
        if self.redis is not None and (status := self.redis.poll()) is not None:
            logger.error("the embedded Redis %s; it starts again", describe_exit(status))
            self.redis, url = embedded_redis.start(self.data_dir)
            self.disk_watch = DiskWatch(url, self.data_dir)
        if self.disk_watch is not None:
            self.disk_watch.tick()
        if self.gateways is not None:
            self.gateways.tick()
            if self.gateways.broken:
                raise StartFailed("The gateway exits at each start; its log above says why.")
        for kept in self.workers:
            kept.tick()
        if self.supervisor is not None:
            self.supervisor.tick()

    def run_until_proven(self, probe: FirstToken, model: ServedModel) -> None:
        """Until a first token was served. Raises `ModelFailed` when the model can't be loaded."""
        try:
            while not probe.proven.is_set():
                self.tick()
                if is_ready(model) and probe.ident is None:
                    probe.start()
                time.sleep(TICK_S)
        finally:
            probe.stop()

    def run_while(self, waits: Callable[[], bool]) -> None:
        """As long as that waits for something. Raises what `waits` and `tick` do."""
        while waits():
            self.tick()
            time.sleep(TICK_S)

    def run(self) -> None:
        """Until Ctrl-C or SIGTERM."""
        try:
            while True:
                self.tick()
                time.sleep(TICK_S)
        except Stopped:
            return

    # -- stop ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Workers give their work back; gateways let their streams end; then all they need."""
        for kept in self.workers:
            kept.stop(min(self.grace, WORKER_GRACE_S))
        if self.gateways is not None:
            self.gateways.stop(self.grace)
        if self.supervisor is not None:
            self.supervisor.stop()
        if self.drainer is not None:
            self.drainer.stop()
        if self.redis is not None:
            self._write_usage()
            self.redis.stop(grace=10)
        if self.disk_watch is not None:
            self.disk_watch.close()
        self.workers = []
        self.gateways = self.supervisor = self.drainer = self.redis = None

    def _write_usage(self) -> None:
        """What is still in the spool."""
        client = sync_client()
        try:
            drain_once(client, claim_idle_ms=0)
        except (redis.RedisError, DatabaseError) as error:
            logger.warning("usage stays in the spool until the next start: %s", error)
        finally:
            client.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if len(self.signals) == 1:
            logger.info("stopping; once more kills")
            return
        # A second time: no more patience with streams.
        for kept in self.workers:
            kept.kill()
        if self.gateways is not None:
            self.gateways.kill()
        if self.supervisor is not None:
            self.supervisor.kill()


def check_redis(url: str) -> None:
    """Raise `StartFailed` unless a server answers there that is new enough."""
    client = redis_clients.sync_client(url)
    try:
        version = str(client.info("server")["redis_version"])
    except redis.RedisError as error:
        raise StartFailed(
            f"Redis at {without_credentials(url)} can't be used: {sentence(error)} "
            "Start it, or correct REDIS_URL (without one, `manage.py up` runs its own)."
        ) from error
    finally:
        client.close()
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST_REDIS:
        raise StartFailed(f"Redis {version} is too old: 6.2 or later is needed.")


def is_ready(model: ServedModel) -> bool:
    """Whether a replica serves. Raises `ModelFailed` when every one of them has failed to load."""
    rows = list(Replica.objects.filter(served_model=model))
    failed = [row for row in rows if row.state == ReplicaState.FAILED]
    if failed and len(failed) == len(rows):
        reason = " ".join(failed[0].detail.split())  # libraries explain themselves at length
        raise ModelFailed(f"{model.name} can't be served: {reason}")
    return any(row.state == ReplicaState.READY for row in rows)
