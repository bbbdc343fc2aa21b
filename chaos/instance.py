"""The instance that faults are injected into: `manage.py up` in a temporary folder."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis
from django.conf import settings

from catalog.processes import set_parent_death_signal
from chaos import behind_relay
from chaos.clock import Clock
from chaos.database import Database, File, NoDatabase, PostgreSQL
from chaos.disk import Disk
from chaos.ending import MARK, end_all, to_its_end
from chaos.kinds import ADAPTER, OTHER_ADAPTER, POOLING_MODEL
from chaos.relay import Relay
from common.settings_environment import INTERNAL
from config.connections import socket_path, socket_url
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import Heartbeat
from engine.system.redis_client import sync_client

REPLICAS, GATEWAYS, WORKERS = 2, 2, 2
#: For a disaggregated instance: prompts must exceed one step, and its disk is small.
STEP_TOKENS, TIER_GIB = 16, "0.05"
ADAPTERS = {ADAPTER, OTHER_ADAPTER}
START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 90.0
#: Kind of process -> text that its command line contains.
MARKS = {
    "replica": "--replica-id=",
    "prefill": '"kv_producer"',
    "decode": '"kv_consumer"',
    "gateway": "config.serve",
    "worker": "quire\0worker\0--queues\0jobs",
    "redis": "redis.sock",
}
RANK_MARK = b"engine.executor.rank_process"
_DROPPED = ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE")


class StartFailed(RuntimeError):
    """The instance doesn't serve; the message is the end of its log."""


class StopFailed(RuntimeError):
    """The instance failed only while it was stopped."""


@dataclass
class Instance:
    """A running instance."""

    url: str
    api_key: str
    model: str
    data_dir: Path
    disk: Disk
    clock: Clock
    database: Database
    relay: Relay
    log: Path
    disaggregated: bool
    process: subprocess.Popen[bytes]
    num_ranks: int = 1

    def ranks(self, replica: int) -> list[int]:
        """Return the processes of a replica's other ranks."""
        return [pid for pid in children(replica) if RANK_MARK in command_line(pid)]

    def pids(self, what: str) -> list[int]:
        """Return its processes of one kind in `MARKS`, sorted by id."""
        mark = MARKS[what].encode()
        return [pid for pid in children(self.process.pid) if mark in command_line(pid)]

    @property
    def tier(self) -> Path:
        """Folder of the KV blocks of a disaggregated instance."""
        return _tier(self.disk)

    def heartbeats(self) -> list[Heartbeat]:
        """Return the heartbeats of all replicas."""
        with sync_client(socket_url(self.data_dir), timeout_s=2) as client:
            ids = [one.decode() for one in client.smembers(redis_keys.replicas_key())]
            values = (
                client.mget([redis_keys.replica_key(one) for one in sorted(ids)]) if ids else []
            )
        return [protocol.decode_heartbeat(data) for data in values if data is not None]

    def is_healthy(self) -> bool:
        """Return whether all processes run and all replicas are ready."""
        try:
            beats = self.heartbeats()
        except redis.RedisError:
            return False
        alive = {beat.pid for beat in beats if beat.state == "ready"}
        replicas = self.pids("replica")
        counts = [len(self.pids(what)) for what in ("gateway", "worker", "redis")]
        return (
            len(replicas) == REPLICAS + self.disaggregated + 1
            and alive >= set(replicas)
            and counts == [GATEWAYS, WORKERS, 1]
        )

    def served(self) -> set[str]:
        """Return what every gateway serves: models, and adapters that were validated."""
        headers = {"authorization": f"Bearer {self.api_key}"}
        answers = []
        for _ in range(4 * GATEWAYS):  # each connection reaches any of the gateways
            got = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=30, trust_env=False)
            answers.append({model["id"].rpartition(":")[2] for model in got.json()["data"]})
        return set.intersection(*answers)

    def manage(self, *arguments: str) -> str:
        """Run a management command; return its output. Raises `StartFailed` with that."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=settings.BASE_DIR,
            env=environment(self.data_dir, **self.database.environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if done.returncode:
            raise StartFailed(f"{arguments}: {done.stdout}{done.stderr}")
        return done.stdout


def environment(data_dir: Path, **more: str) -> dict[str, str]:
    """Return this process's environment without variables that refer to another instance."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and not name.startswith("QUIRE_")
    }
    return variables | {MARK: str(data_dir), "TMPDIR": str(data_dir.parent)} | more


def children(pid: int) -> list[int]:
    """Return the direct children of a process, sorted by id."""
    pids: list[int] = []
    try:
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            pids += map(int, (task / "children").read_text().split())
    except OSError:  # the process has ended meanwhile
        return sorted(pids)
    return sorted(pids)


def command_line(pid: int) -> bytes:
    """Return its arguments, each followed by NUL; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@asynccontextmanager
async def running(
    log: Path | None = None,
    *,
    postgresql: bool = False,
    clock: bool = False,
    disaggregated: bool = False,
    num_ranks: int = 1,
) -> AsyncIterator[Instance]:
    """Run an instance with two replicas, gateways and workers, and a pooling model.

    `log`: where its log is kept; None: nowhere. `postgresql`: use it instead of SQLite. `clock`:
    make its clock adjustable. `disaggregated`: add a replica that computes prompts for the two.
    `num_ranks`: processes of each replica of the first model. Raises: `StartFailed`, `StopFailed`.
    However the block ends, its processes are stopped and its data is deleted.
    """
    async with (
        _disk() as disk,
        _database(disk, postgresql=postgresql) as database,
        _relay(disk.folder.parent, disk) as relay,
    ):
        wall = Clock(disk.folder.parent, enabled=clock)
        async with _started(disk, wall, database, relay, log, disaggregated, num_ranks) as instance:
            yield instance


@asynccontextmanager
async def _disk() -> AsyncIterator[Disk]:
    """Run it in a temporary folder that holds everything it writes."""
    folder = Path(tempfile.mkdtemp(prefix="quire-chaos-"))
    try:
        if not socket_path(folder / "data").is_relative_to(folder):
            raise StartFailed(f"{folder} is too long for sockets: set TMPDIR to a shorter one.")
        disk = Disk(folder / "data")
        try:
            yield disk
        finally:
            disk.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _database(disk: Disk, *, postgresql: bool) -> AsyncIterator[Database]:
    databases: list[Database] = []
    try:
        if postgresql:
            await to_its_end(lambda: databases.append(PostgreSQL()))
        else:
            databases.append(File(disk.folder))
        yield databases[0]
    except NoDatabase as error:
        raise StartFailed(str(error)) from error
    finally:
        for database in databases:
            database.close()


@asynccontextmanager
async def _relay(folder: Path, disk: Disk) -> AsyncIterator[Relay]:
    relay = Relay(folder / "relay.sock", socket_path(disk.folder))
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


@asynccontextmanager
async def _started(
    disk: Disk,
    clock: Clock,
    database: Database,
    relay: Relay,
    log: Path | None,
    disaggregated: bool,
    num_ranks: int,
) -> AsyncIterator[Instance]:
    """Stop it gracefully if there was no error; otherwise kill its processes."""
    log = log or disk.folder.parent / "up.log"
    ready = disk.folder.parent / "ready.json"
    more = clock.environment | database.environment
    process = _up(disk, more, relay, ready, log, disaggregated, num_ranks)
    try:
        ready_values = await _await_ready(process, ready, log)
        names = ("url", "api_key", "model")
        instance = Instance(
            **{name: ready_values[name] for name in names},
            data_dir=disk.folder,
            disk=disk,
            clock=clock,
            database=database,
            relay=relay,
            log=log,
            disaggregated=disaggregated,
            process=process,
            num_ranks=num_ranks,
        )
        await asyncio.to_thread(_load_pooling_model, instance)
        await until(instance.is_healthy, START_TIMEOUT_S, "the replicas aren't ready", log)
        await until(
            lambda: instance.served() >= ADAPTERS, START_TIMEOUT_S, "no adapter is live", log
        )
        yield instance
        process.terminate()
        try:
            await holds(lambda: process.poll() is not None, STOP_TIMEOUT_S)
        except TimeoutError:
            raise StopFailed(
                f"the instance was there {STOP_TIMEOUT_S:.0f} s after SIGTERM"
            ) from None
    finally:
        end_all(disk.folder)
        process.wait()


def _read_ready_file(ready: Path, log: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(ready.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartFailed(tail(log)) from None
    return values


def _tier(disk: Disk) -> Path:
    return disk.folder / "tier"


def _up(
    disk: Disk,
    more: dict[str, str],
    relay: Relay,
    ready: Path,
    log: Path,
    disaggregated: bool,
    num_ranks: int,
) -> subprocess.Popen[bytes]:
    """Start the instance's main process."""
    flags = ["--model", str(settings.QUIRE.demo_model), "--served-model-name", "quire-demo"]
    flags += ["--workers", str(GATEWAYS), "--reasoning-parser", "qwen3"]
    flags += ["--replicas", str(REPLICAS + disaggregated), "--tensor-parallel-size", str(num_ranks)]
    if disaggregated:
        flags += ["--prefill-replicas", "1", "--max-num-batched-tokens", str(STEP_TOKENS)]
        flags += ["--kv-offloading-backend", str(_tier(disk)), "--kv-offloading-size", TIER_GIB]
    fields = {"engine_command": [sys.executable, behind_relay.__file__]}
    more |= {behind_relay.NAME: f"unix://{relay.path}", INTERNAL: json.dumps(fields)}
    with log.open("wb") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "manage.py", "up", "--port", "0", "--ready-file", str(ready)),
                *("--data-dir", str(disk.folder), *flags),
            ],
            cwd=settings.BASE_DIR,
            env=environment(disk.folder, **more),
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=set_parent_death_signal(signal.SIGTERM),
        )


def _load_pooling_model(instance: Instance) -> None:
    source = str(settings.QUIRE.demo_model)
    instance.manage("load_model", source, "--name", POOLING_MODEL, "--runner=pooling")


async def _await_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> dict[str, Any]:
    def is_settled() -> bool:
        return ready.exists() or process.poll() is not None

    await until(is_settled, START_TIMEOUT_S, "no start", log)
    return await asyncio.to_thread(_read_ready_file, ready, log)


async def until(condition: Callable[[], bool], limit_s: float, what: str, log: Path) -> None:
    """Wait until a condition holds. Raises `StartFailed`."""
    try:
        await holds(condition, limit_s, every_s=0.2)
    except TimeoutError:
        raise StartFailed(f"{what} within {limit_s:.0f} s:\n{tail(log)}") from None


async def holds(condition: Callable[[], bool], limit_s: float, every_s: float = 0.1) -> None:
    """Return once a condition holds; it is evaluated in a thread. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        for _ in itertools.count():
            if await asyncio.to_thread(condition):
                return
            await asyncio.sleep(every_s)


def tail(log: Path, max_bytes: int = 4000) -> str:
    """Return the end of a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-max_bytes:].strip()
