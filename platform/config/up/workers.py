"""The workers of `manage.py up`, and what becomes of their work when one dies."""

from __future__ import annotations

import logging

from django.db import DatabaseError, InterfaceError

from config.queues import PROCESS_QUEUES, THREAD_QUEUES
from config.up.kept import KeptProcesses
from storage.actions import release_leases_of_dead
from tenants.work import hint

logger = logging.getLogger(__name__)


def kept_workers(count: int) -> KeptProcesses:
    """So many workers of batches and responses, each started again whenever it ends.

    Who has seen one die needn't wait for its leases to run out: another one takes its work at
    once, or the next one at its start.
    """
    command = ["manage.py", "worker", "--queues", ",".join(THREAD_QUEUES)]
    return KeptProcesses("worker", command, count, on_death=give_back)


def kept_task_worker() -> KeptProcesses:
    """The worker of tasks that may hang or take long."""
    command = ["manage.py", "worker", "--queues", ",".join(PROCESS_QUEUES)]
    return KeptProcesses("task worker", command)


def give_back(process: int) -> None:
    """Let others take what a dead worker held. Without a database its leases run out."""
    try:
        given = release_leases_of_dead(process=process)
    except (DatabaseError, InterfaceError) as error:
        logger.warning("the leases of worker process %d run out by themselves: %s", process, error)
        return
    if given:
        hint("inference.sweep")
