"""A relay between replicas and Redis, which can cut one process's connections.

Replicas connect to a Unix socket, whose kernel identifies the process at the other end. While a
process is cut off, its connections transfer nothing in either direction but stay open, like in a
broken network.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

CHUNK = 1 << 16


class Relay:
    """Relays data between `path`, a socket that replicas connect to, and `server` (Redis).

    Args:
        path: path of the socket to create. server: path of Redis's socket.
    """

    def __init__(self, path: Path, server: Path) -> None:
        self.path, self._server = path, server
        self._cut: set[int] = set()
        self._changed = asyncio.Event()
        self._carrying: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Start listening."""
        self._listener = await asyncio.start_unix_server(self._connected, self.path)

    async def stop(self) -> None:
        """Close all connections."""
        if self._listener is not None:
            self._listener.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def cut(self, pid: int) -> None:
        """Stop transferring data to and from this process."""
        self._cut.add(pid)

    def mend(self, pid: int) -> None:
        """Resume, beginning with the data that waited."""
        self._cut.discard(pid)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)
        pid = peer(writer.get_extra_info("socket"))
        try:
            await self._open(pid)
            redis_reader, redis_writer = await asyncio.open_unix_connection(self._server)
        except OSError:  # Redis is not running
            writer.close()
            return
        ways = (
            asyncio.create_task(self._carry(reader, redis_writer, pid)),
            asyncio.create_task(self._carry(redis_reader, writer, pid)),
        )
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            redis_writer.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int
    ) -> None:
        try:
            while data := await reader.read(CHUNK):
                await self._open(pid)
                writer.write(data)
                await writer.drain()
        except OSError:
            return

    async def _open(self, pid: int) -> None:
        """Return once the process isn't cut off."""
        while pid in self._cut:
            await self._changed.wait()


def peer(connection: socket.socket) -> int:
    """Return the id of the process at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
