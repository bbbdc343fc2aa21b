"""Looks once a second whether the sessions of this process's open sockets still hold.

One look for all sockets: an idle tab costs no query of its own, and closes within two seconds of
its user being deactivated, demoted or logged out elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from django.db import DatabaseError, InterfaceError

from tenants.db_threads import in_db_thread
from tenants.sessions import SeenSession, living_sessions

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
Ended = Callable[[], Awaitable[None]]


class SessionWatch:
    """The open sockets of one event loop, and a task that looks while there are any."""

    def __init__(self) -> None:
        self._sockets: dict[Ended, SeenSession] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, seen: SeenSession, ended: Ended) -> None:
        """Call `ended` once when the session may not go on."""
        self._sockets[ended] = seen
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._look())

    def remove(self, ended: Ended) -> None:
        """The socket is closed."""
        self._sockets.pop(ended, None)

    async def _look(self) -> None:
        while self._sockets:
            await asyncio.sleep(LOOK_EVERY_S)
            # Who comes during the look wasn't asked after, and isn't gone.
            looked_at = dict(self._sockets)
            try:
                living = await in_db_thread(living_sessions, set(looked_at.values()))
            except (DatabaseError, InterfaceError) as error:
                logger.warning("session check of open sockets failed: %s", error)
                continue
            gone = [
                ended
                for ended, seen in looked_at.items()
                if seen not in living and ended in self._sockets
            ]
            for ended in gone:
                self.remove(ended)
            await asyncio.gather(*(ended() for ended in gone), return_exceptions=True)


watch = SessionWatch()
