"""The processes of one instance, started in order and stopped in reverse."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import redis
from django.conf import settings
from django.db import DatabaseError, InterfaceError

from catalog.models import Replica, ReplicaState, ServedModel
from catalog.processes import ManagedProcess
from catalog.slot import describe_exit
from catalog.supervisor import TICK_S, Supervisor
from common.task_queue import send_task_best_effort
from config import embedded_redis
from config.embedded_redis import DiskWatch, StartFailed, check_redis
from config.queues import PROCESS_QUEUES, THREAD_QUEUES
from config.up.processes import Gateways, ProcessGroup, ReadinessProbe
from metering.drain import LedgerWriter, drain_once
from metering.redis_scripts import sync_client
from storage.actions import release_leases_of_dead


class InUse(RuntimeError):
    """Another process uses the data dir."""


@contextmanager
def exclusive(data_dir: Path) -> Iterator[None]:
    """Lock the data dir while the block runs. The kernel releases the lock however the process
    ends.

    Raises: `InUse` with the other process's id.
    """
    with (data_dir / "up.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUse(
                f"Quire is running in {data_dir} already (process {file.read().strip() or '?'}). "
                "Another --data-dir keeps instances apart."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


logger = logging.getLogger(__name__)


def supervised_workers(count: int) -> ProcessGroup:
    """Return the workers of batches and responses, which are restarted whenever they exit.

    When a worker dies, its leases are released immediately rather than when they expire, so another
    worker, or the restarted one, can take over its work.
    """
    command = ["-m", "quire", "worker", "--queues", ",".join(THREAD_QUEUES)]
    return ProcessGroup("worker", command, count, on_exit=give_back)


def isolated_task_worker() -> ProcessGroup:
    """Return the worker for tasks that may hang or take long."""
    command = ["-m", "quire", "worker", "--queues", ",".join(PROCESS_QUEUES)]
    return ProcessGroup("task worker", command)


def give_back(process: int) -> None:
    """Release a dead worker's leases. If the database is unreachable, they expire by themselves."""
    try:
        num_released = release_leases_of_dead(process=process)
    except (DatabaseError, InterfaceError) as error:
        logger.warning("the leases of worker process %d run out by themselves: %s", process, error)
        return
    if num_released:
        send_task_best_effort("inference.sweep")


#: Seconds that a worker needs to give its work back.
WORKER_GRACE_S = 15.0


class ModelLoadFailed(StartFailed):
    """The model can't be loaded."""


class Stopped(Exception):
    """Ctrl-C or SIGTERM arrived before everything was up."""


class Stack:
    """The processes of `manage.py up`.

    Use as a context manager: all processes are stopped at the end, also after an exception.
    """

    def __init__(self, data_dir: Path, grace: float) -> None:
        self.data_dir, self.grace = data_dir, grace
        self.redis: ManagedProcess | None = None
        self.disk_watch: DiskWatch | None = None
        self.gateways: Gateways | None = None
        self.workers: list[ProcessGroup] = []
        self.supervisor: Supervisor | None = None
        self.drainer: LedgerWriter | None = None
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

    def start_redis(self) -> str:
        """Start the embedded server unless REDIS_URL names another one; return the URL in use."""
        if settings.QUIRE.redis_url:
            check_redis(settings.REDIS_URL)
            return "your Redis"
        self.redis, url = embedded_redis.start(self.data_dir)
        check_redis(url)
        self.disk_watch = DiskWatch(url, self.data_dir)
        return "the embedded Redis"

    def tick(self) -> None:
        """Restart exited processes. Raises `StartFailed` if that is hopeless, and `Stopped`."""
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
            if self.gateways.is_crash_looping:
                raise StartFailed("The gateway exits at each start; its log above says why.")
        for worker in self.workers:
            worker.tick()
        if self.supervisor is not None:
            self.supervisor.tick()

    def run_until_ready(self, probe: ReadinessProbe, model: ServedModel) -> None:
        """Run until a first token was served. Raises `ModelLoadFailed` if the model can't be
        loaded."""
        try:
            while not probe.ready.is_set():
                self.tick()
                if is_ready(model) and probe.ident is None:
                    probe.start()
                time.sleep(TICK_S)
        finally:
            probe.stop()

    def run_while(self, waits: Callable[[], bool]) -> None:
        """Run while `waits` returns True. Raises the exceptions of `waits` and `tick`."""
        while waits():
            self.tick()
            time.sleep(TICK_S)

    def run(self) -> None:
        """Run until Ctrl-C or SIGTERM."""
        try:
            while True:
                self.tick()
                time.sleep(TICK_S)
        except Stopped:
            return

    def stop(self) -> None:
        """Stop workers, which give their work back; then gateways, whose streams end; then the
        services that both need.
        """
        for worker in self.workers:
            worker.stop(min(self.grace, WORKER_GRACE_S))
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
        """Write the usage left in the spool to the ledger."""
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
        # On a second signal, streams are cut.
        for worker in self.workers:
            worker.kill()
        if self.gateways is not None:
            self.gateways.kill()
        if self.supervisor is not None:
            self.supervisor.kill()


def is_ready(model: ServedModel) -> bool:
    """Return whether a replica is ready. Raises `ModelLoadFailed` if every replica failed to
    load."""
    rows = list(Replica.objects.filter(served_model=model))
    failed = [row for row in rows if row.state == ReplicaState.FAILED]
    if failed and len(failed) == len(rows):
        reason = " ".join(failed[0].detail.split())  # libraries' messages span several lines
        raise ModelLoadFailed(f"{model.name} can't be served: {reason}")
    return any(row.state == ReplicaState.READY for row in rows)
