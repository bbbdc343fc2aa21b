"""Sentinels replace a primary that dies, and HAProxy is the address that follows it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Sentinel
from redis.exceptions import RedisError

from catalog.processes import ManagedProcess, spawn
from config.embedded_redis import find_server
from tests.inference import live
from tests.inference.test_gateway_death import Client, ledger, read, until
from tests.inference.test_redis_fails_over import greedy, replica_command
from tests.services import missing
from tests.waiting import free_port

STREAMS, OUTPUT, PRIMARY = 4, 200, "quire"
SENTINEL = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor quire 127.0.0.1 {primary} 2
sentinel down-after-milliseconds quire 1000
sentinel failover-timeout quire 10000
"""
HAPROXY = """
defaults
  mode tcp
  timeout connect 1s
  timeout client 1h
  timeout server 1h
listen redis
  bind 127.0.0.1:{port}
  option tcp-check
  tcp-check send info\\ replication\\r\\n
  tcp-check expect string role:master
  default-server check inter 200ms fall 1 rise 1 on-marked-down shutdown-sessions
  server one 127.0.0.1:{one}
  server two 127.0.0.1:{two}
"""


class Servers:
    """Two servers of Redis, three Sentinels and HAProxy, whose port is `port`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.port, *self._ports = (free_port() for _ in range(3))
        self._folder, self._stack = folder, stack
        self._processes: dict[int, ManagedProcess] = {}
        first, second = self._ports
        self.start(first)
        self.start(second, "--replicaof", f"127.0.0.1 {first}")
        sentinels = [free_port() for _ in range(3)]
        for port in sentinels:
            settings = folder / f"{port}.conf"
            settings.write_text(SENTINEL.format(port=port, folder=folder, primary=first))
            self._spawn([find_server(), str(settings), "--sentinel"])
        self._sentinels = Sentinel([("127.0.0.1", port) for port in sentinels])
        settings = folder / "haproxy.cfg"
        settings.write_text(HAPROXY.format(port=self.port, one=first, two=second))
        program = shutil.which("haproxy", path="/usr/sbin:/usr/bin") or missing(
            "haproxy is missing (apt-get install haproxy)"
        )
        self._spawn([program, "-f", str(settings)])

    def start(self, port: int, *flags: str) -> None:
        """Run a server that keeps nothing on disk, as after a restart of its machine."""
        command = [find_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        folder = ["--dir", str(self._folder), "--repl-diskless-sync-delay", "0"]
        self._processes[port] = self._spawn([*command, *folder, *flags])

    def _spawn(self, command: list[str]) -> ManagedProcess:
        name = f"{Path(command[0]).name} {len(self._processes)}"
        log = self._stack.enter_context((self._folder / f"{name}.log").open("ab"))
        process = spawn(command, name=name, stdout=log, stderr=log)
        self._stack.callback(process.stop, 5)
        return process

    def primary(self) -> int:
        """The port of the primary that all Sentinels know. Raises RedisError."""
        ports = {sentinel.sentinel_get_master_addr_by_name(PRIMARY)[1] for sentinel in self._asked}
        if len(ports) > 1:
            raise RedisError("The Sentinels disagree.")
        return int(ports.pop())

    @property
    def _asked(self) -> list[Any]:
        return self._sentinels.sentinels

    def is_safe(self) -> bool:
        """Whether the primary's death now would be noticed, and survived."""
        for sentinel in self._asked:
            state = sentinel.sentinel_master(PRIMARY)
            if state["num-other-sentinels"] != 2 or state["flags"] != "master":
                return False
            replicas = sentinel.sentinel_slaves(PRIMARY)
            if [one["flags"] for one in replicas] != ["slave"]:
                return False
            if replicas[0]["master-link-status"] != "ok":
                return False
        return True

    def kill_primary(self) -> int:
        """Returns its port."""
        port = self.primary()
        self._processes[port].kill()
        return port


@contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    folder.mkdir()
    with ExitStack() as stack:
        yield Servers(folder, stack)


def holds(condition: Callable[[], bool]) -> bool:
    """Whether it does; not while Redis is away."""
    try:
        return condition()
    except RedisError:
        return False


async def read_to_the_end(
    http: httpx.AsyncClient, of: live.Instance, port: int, client: Client
) -> None:
    while not client.finished:
        await read(http, of, port, client)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
async def test_streams_go_on_after_sentinels_have_replaced_a_primary_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.inference.test_gateway_death.OUTPUT", OUTPUT)
    with (
        servers(tmp_path / "servers") as redis,
        live.instance(tmp_path, f"redis://127.0.0.1:{redis.port}") as of,
        live.process(replica_command(of), of.environment),
        live.gateway(of, "uvicorn") as (port, _),
    ):
        asked: list[Client] = []
        exceeding_event = asyncio.Event()
        async with httpx.AsyncClient(timeout=120) as http:
            calm = [greedy(number) for number in range(STREAMS)]
            await asyncio.gather(*(read(http, of, port, client) for client in calm))

            async def ask_again(number: int) -> None:
                while not exceeding_event.is_set():
                    asked.append(greedy(number))
                    await read_to_the_end(http, of, port, asked[-1])

            asking = asyncio.gather(*map(ask_again, range(STREAMS)))
            for _ in range(2):
                await until(lambda: holds(redis.is_safe))
                count = len(asked)
                await until(lambda: len(asked) > count + STREAMS and asked[-1].text)  # noqa: B023
                killed_at = time.monotonic()
                dead = redis.kill_primary()
                await until(lambda: holds(lambda: redis.primary() != dead))  # noqa: B023
                count = len(asked)
                await until(lambda: len(asked) > count + STREAMS)  # noqa: B023
                print(f"Streams end again {time.monotonic() - killed_at:.1f} s after the kill.")
                redis.start(dead, "--replicaof", f"127.0.0.1 {redis.primary()}")
            exceeding_event.set()
            await asking
        rows = ledger(of)
    texts = {client.body.get("prompt") or str(client.body["messages"]): client for client in calm}
    num_lost = 0
    for client in [*calm, *asked]:
        same = texts[client.body.get("prompt") or str(client.body["messages"])]
        assert (client.text, client.usage) == (same.text, same.usage)
        row = rows.get(client.stream)
        num_lost += row is None  # its write had not reached the replica
        assert row in (None, (client.usage["prompt_tokens"], OUTPUT))
    print(f"{len(asked)} streams; {num_lost} rows of the ledger are lost.")
