"""Celery tasks of this app.

A check takes long, so checks run in a separate thread, one at a time: the worker's threads stay
free for other tasks.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from celery import shared_task
from celery.signals import worker_shutting_down
from django.db import close_old_connections

from adapters import pins, version_jobs

logger = logging.getLogger(__name__)

CHECK = "adapters.check"
_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-adapters")
_queued: set[int] = set()
_lock = threading.Lock()


@shared_task(name=CHECK)
def check(pk: int) -> None:
    """Process a version, unless this worker already does."""
    with _lock:
        if pk in _queued:
            return
        _queued.add(pk)
    _pool.submit(_work, pk)


@shared_task(name="adapters.sweep")
def sweep() -> None:
    """Process versions that no worker is processing, and remove unreferenced content."""
    for pk in version_jobs.waiting():
        check(pk)
    if removed := version_jobs.sweep():
        logger.info("removed %d adapters' files", removed)


@shared_task(name=pins.TASK)
def keep_pins() -> None:
    """Send replicas the adapters to pin and unpin."""
    if sent := pins.sync_pins():
        logger.info("synced %d pinned adapters to replicas", sent)


@worker_shutting_down.connect
def _stop(**_: object) -> None:
    """Release the versions that are being processed, and start no others."""
    version_jobs.shutdown_event.set()


def _work(pk: int) -> None:
    close_old_connections()
    try:
        if not version_jobs.shutdown_event.is_set():
            version_jobs.process_version(pk)
    except Exception:
        logger.exception("Working on the adapter version %d failed; it's tried again.", pk)
    finally:
        close_old_connections()
        with _lock:
            _queued.discard(pk)
