"""A wire between replicas and Redis that can be cut, for one process at a time.

Each replica's connections go through a Unix socket here, whose kernel tells which process is at the
other end. While a process is cut off nothing of its connections gets through, in either direction,
and none is closed: what a broken network looks like.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

CHUNK = 1 << 16


class Relay:
    """Carries bytes between `socket` (replicas connect there) and `server` (Redis).

    Args:
        path: of the socket that this makes. server: Redis's own.
    """

    def __init__(self, path: Path, server: Path) -> None:
        self.path, self._server = path, server
        self._cut: set[int] = set()
        self._changed = asyncio.Event()
        self._carrying: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._listener = await asyncio.start_unix_server(self._connected, self.path)

    async def stop(self) -> None:
        """Close everything."""
        if self._listener is not None:
            self._listener.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def cut(self, pid: int) -> None:
        """From now on nothing comes through to or from this process."""
        self._cut.add(pid)

    def mend(self, pid: int) -> None:
        """What waited comes through, and everything else."""
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
        except OSError:  # Redis is away
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
        """Return when the process isn't cut off."""
        while pid in self._cut:
            await self._changed.wait()


def peer(connection: socket.socket) -> int:
    """The process at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
