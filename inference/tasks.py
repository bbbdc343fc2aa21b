"""Celery's tasks. They return at once: long work runs on the worker's own event loop."""

from __future__ import annotations

import logging
import threading

from celery import shared_task
from celery.signals import worker_shutdown

from history.benchmarks import waiting_benchmarks
from inference.api.batches.runner import run_batch
from inference.api.benchmarks import KIND, run_benchmark
from inference.api.responses.runner import run_response
from inference.work import RUN_TASK, JobRunner, Runner, send_job
from storage.access import claimable_batches, unclaimed_responses
from storage.actions import remove_ended_uploads, remove_expired

logger = logging.getLogger(__name__)

#: Maximum number of jobs of each kind that a worker process runs at a time.
LIMITS = {"batch": 16, "response": 32, KIND: 4}

WAITING = {
    "batch": claimable_batches,
    "response": unclaimed_responses,
    KIND: waiting_benchmarks,
}

_starting = threading.Lock()
_loop: JobRunner | None = None


def work_loop() -> JobRunner:
    """This process's job runner, started by the first call from any thread."""
    global _loop
    runners: dict[str, Runner] = {
        "batch": run_batch,
        "response": run_response,
        KIND: run_benchmark,
    }
    with _starting:
        if _loop is None:
            _loop = JobRunner(runners, LIMITS, WAITING)
    return _loop


@shared_task(name=RUN_TASK)
def run(kind: str, public_id: str) -> None:
    """Run a batch or a background response, unless another worker does."""
    work_loop().start(kind, public_id)


@shared_task(name="inference.sweep")
def sweep() -> None:
    """Find jobs that no worker runs: a message was lost, a worker died, or all were busy."""
    for kind, waiting in WAITING.items():
        for public_id in waiting():
            send_job(kind, public_id)


@shared_task(name="inference.expire")
def expire() -> None:
    """Delete expired files and responses."""
    removed = remove_expired() + remove_ended_uploads()
    if removed:
        logger.info("removed %d expired objects", removed)


@worker_shutdown.connect
def _stop_loop(**_: object) -> None:
    """Release a worker's jobs when it shuts down."""
    if _loop is not None:
        _loop.stop()
