"""A failover of Redis: a second server replicates the first, is promoted, and later demoted again.

Clients know one address, a Unix socket, which is always renamed to the primary's. Existing
connections stay with their server, which is then a replica and rejects writes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from catalog.processes import spawn
from chaos.instance import holds
from config import embedded_redis
from engine.system.redis_client import sync_client

HOST = "127.0.0.1"
#: Seconds for which the second server is the primary.
OTHER_S = 3.0
#: Maximum seconds until a server answers, or has the other's last write.
FAILOVER_TIMEOUT_S, POLL_INTERVAL_S = 30.0, 0.02


@dataclass
class _Server:
    """One of the two servers. `way`: a path of its socket that stays valid when `address` moves."""

    way: Path
    client: redis.Redis
    port: int

    @property
    def role(self) -> str:
        """Its reported role: "master" or "slave"."""
        return str(self.client.info("replication")["role"])


async def fail_over_and_back(address: Path) -> None:
    """Fail over from the server at `address` to a second one, and back.

    Each time the primary pauses writes until the replica has received all of them, as with
    `FAILOVER`, Sentinel, and maintenance by hosting providers. Raises TimeoutError, RedisError.
    """
    first = _server(address, "first")
    try:
        await asyncio.to_thread(_listen, first)
        async with _second(address) as second:
            try:
                await asyncio.to_thread(second.client.replicaof, HOST, first.port)
                await _promote_replica(first, second)
                _point(address, second)
                await asyncio.sleep(OTHER_S)
                await _promote_replica(second, first)
            finally:
                await asyncio.to_thread(first.client.execute_command, "REPLICAOF", "NO", "ONE")
                _point(address, first)
    finally:
        await asyncio.to_thread(first.client.config_set, "port", 0)
        first.client.close()
        first.way.unlink()


def _server(path: Path, name: str) -> _Server:
    way = path.with_name(f"{name}.way")
    os.link(path, way)
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
    return _Server(way, sync_client(f"unix://{way}"), port)


def _point(address: Path, server: _Server) -> None:
    """Make new connections to `address` reach this server."""
    new = address.with_name("new.way")
    os.link(server.way, new)
    os.replace(new, address)


def _listen(server: _Server) -> None:
    server.client.config_set("bind", HOST)
    server.client.config_set("port", server.port)
    server.client.config_set("repl-diskless-sync-delay", 0)


@asynccontextmanager
async def _second(address: Path) -> AsyncIterator[_Server]:
    """Run a server without persistence, with its socket in the first one's folder."""
    path = address.with_name("second.sock")
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        process = spawn(
            embedded_redis.command(embedded_redis.find_server(), Path(folder), path, persist=False),
            name="second redis",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            await holds(lambda: embedded_redis.answers(f"unix://{path}"), FAILOVER_TIMEOUT_S)
            server = _server(path, "second")
            try:
                await asyncio.to_thread(_listen, server)
                yield server
            finally:
                server.client.close()
                server.way.unlink()
        finally:
            await asyncio.to_thread(process.stop, 5)
            path.unlink(missing_ok=True)


async def _promote_replica(old: _Server, new: _Server) -> None:
    """Promote the replica `new`, and make `old` its replica; no write is lost."""
    await holds(lambda: _follows(new, old), FAILOVER_TIMEOUT_S, POLL_INTERVAL_S)
    to = ("FAILOVER", "TO", HOST, new.port, "TIMEOUT", int(1000 * FAILOVER_TIMEOUT_S))
    await asyncio.to_thread(old.client.execute_command, *to)
    await holds(
        lambda: [old.role, new.role] == ["slave", "master"], FAILOVER_TIMEOUT_S, POLL_INTERVAL_S
    )


def _follows(new: _Server, old: _Server) -> bool:
    replica = old.client.info("replication").get("slave0", {})
    return new.role == "slave" and replica.get("state") == "online"
