"""Telling workers of batches and background responses: see `tenants.work`."""

from __future__ import annotations

import asyncio
import logging

from inference.origins import keep_origin
from tenants.work import NO_BROKER, send_task

logger = logging.getLogger(__name__)

RUN = "inference.run"


async def enqueue(kind: str, public_id: str) -> None:
    """Tell workers of a batch or a response. Without Redis they find it by themselves, later."""
    await keep_origin(public_id)
    try:
        await asyncio.to_thread(send, kind, public_id)
    except NO_BROKER as error:
        logger.warning("%s %s waits for the next sweep: %s", kind, public_id, error)


def send(kind: str, public_id: str) -> None:
    """The same, blocking. Raises kombu's OperationalError when the broker can't be reached."""
    send_task(RUN, kind, public_id)
