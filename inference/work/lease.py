"""Holding a lease while working."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from django.db import DatabaseError, InterfaceError

from inference.settings import gateway_settings
from storage.actions import release_lease, renew_lease
from tenants.db_threads import in_db_thread

logger = logging.getLogger(__name__)


def lease_seconds() -> float:
    """A worker that is silent for so long has lost its work to whoever asks for it."""
    return gateway_settings().lease_seconds


class Lease:
    """Keeps a claimed row's lease alive while the block runs, and gives it back behind it.

    The block is cancelled when the lease is lost: somebody else works on the row by then.
    """

    def __init__(self, row: Any, owner: str) -> None:
        self._row, self._owner = row, owner
        self._lost = False

    async def __aenter__(self) -> Lease:
        self._task = asyncio.current_task()
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        self._keeper.cancel()
        if self._lost and self._task is not None:
            self._task.uncancel()
            return kind is not None and issubclass(kind, asyncio.CancelledError)
        # Not to be cut short: until the lease has run out nobody else could go on.
        await asyncio.shield(in_db_thread(release_lease, row=self._row, owner=self._owner))
        return False

    async def _keep(self) -> None:
        missed, lease_s = 0.0, lease_seconds()
        while missed < lease_s:
            await asyncio.sleep(lease_s / 6)
            try:
                held = await in_db_thread(
                    renew_lease, row=self._row, owner=self._owner, seconds=lease_s
                )
            except (DatabaseError, InterfaceError) as error:
                missed += lease_s / 6
                logger.warning("the lease of %s was not renewed: %s", self._row, error)
                continue
            if not held:
                break
            missed = 0.0
        logger.warning("the lease of %s is lost; its work ends here", self._row)
        self._lost = True
        if self._task is not None:
            self._task.cancel()
