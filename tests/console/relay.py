"""A way to a server that can be cut: for its pages the server is gone, and then it's back.

To start the server itself anew would take seconds of a core.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.console.live import LiveServer
from tests.waiting import free_port


class Relay:
    """Passes on what comes to its own port. The port stays the same."""

    def __init__(self, server: LiveServer) -> None:
        self.port, self._to = free_port(), server.port
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        """Without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Take connections."""
        self._run(self._listen())

    def stop(self) -> None:
        """Break all connections at once, and refuse new ones."""
        self._run(self._cut())

    def close(self) -> None:
        """Stop, for good."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        self._server.close()
        while self._writers:
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.sleep(0.01)  # until both ends of each have noticed

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(self._pump(reader, to_server), self._pump(from_server, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        writer.close()
        self._writers.remove(writer)


@contextmanager
def relayed(server: LiveServer) -> Iterator[Relay]:
    """One that takes connections."""
    relay = Relay(server)
    relay.start()
    try:
        yield relay
    finally:
        relay.close()
