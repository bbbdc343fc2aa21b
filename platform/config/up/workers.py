"""The worker of `manage.py up`, and what becomes of its work when it dies."""

from __future__ import annotations

import logging

from django.db import DatabaseError, InterfaceError

from config.up.kept import KeptProcesses
from storage.actions import release_leases_of_dead

logger = logging.getLogger(__name__)


def kept_worker() -> KeptProcesses:
    """One worker, started again whenever it ends.

    The next one looks for work at its start, and finds what the last one held: who has seen it die
    needn't wait for its leases to run out.
    """
    return KeptProcesses("worker", ["manage.py", "worker"], on_death=give_back)


def give_back(process: int) -> None:
    """Let others take what a dead worker held. Without a database its leases run out."""
    try:
        release_leases_of_dead(process=process)
    except (DatabaseError, InterfaceError) as error:
        logger.warning("the leases of worker process %d run out by themselves: %s", process, error)
