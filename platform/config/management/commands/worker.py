"""`manage.py worker`."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import signal
import threading
import warnings
from typing import Any, cast

from celery.beat import EmbeddedService
from celery.exceptions import SecurityWarning
from celery.signals import worker_process_init, worker_ready, worker_shutting_down
from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from catalog.processes import set_parent_death_signal
from common.commands import QuireCommand
from common.task_queue import send_task_best_effort
from config.celery import app
from config.embedded_redis import StartFailed, check_redis
from config.queues import PROCESS_QUEUES, THREAD_QUEUES, THREADS
from config.shutdown import exit_after_timeout, run_and_exit_fast
from inference.tracing import set_service_name

SCHEDULER = "config.celery:SingleScheduler"
#: Less than `manage.py up` and service managers wait. What isn't given back by then is taken over
#: like a killed worker's.
ENDS_WITHIN_S = 12.0


class Command(QuireCommand):
    """Run what outlives a request."""

    needs_database = False
    help = (
        "Run a worker for batches, background responses and scheduled tasks. Several workers can "
        "run; they take over each other's jobs. Webhooks, mails, the identity provider and "
        "cleaning up need a second one: --queues delivery,identity,maintenance."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--queues",
            default=",".join(THREAD_QUEUES),
            metavar="NAME,...",
            help=f"{', '.join(THREAD_QUEUES)} (threads), or some of {', '.join(PROCESS_QUEUES)} "
            "(processes with time limits); each queue needs a worker (default: %(default)s)",
        )
        parser.add_argument(
            "--no-beat", action="store_true", help="don't schedule periodic tasks on this worker"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Work until SIGTERM or Ctrl-C: what runs then is given back to other workers."""
        queues = options["queues"].split(",")
        threads = set(queues) <= set(THREAD_QUEUES)
        if not threads and not set(queues) <= set(PROCESS_QUEUES):
            raise CommandError(
                f"--queues takes some of {', '.join(THREAD_QUEUES)}, or some of "
                f"{', '.join(PROCESS_QUEUES)}, got {options['queues']!r}."
            )
        try:
            check_redis(settings.REDIS_URL)
        except StartFailed as error:
            raise CommandError(str(error)) from error
        if threads:
            run_and_exit_fast(lambda: run_threads(queues, beats=not options["no_beat"]))
        else:
            run_and_exit_fast(lambda: run_processes(queues))


def run_threads(queues: list[str], *, beats: bool) -> None:
    """Serve queues whose tasks return soon, beside what outlives them, and keep the clock."""
    set_service_name("quire-worker")
    if beats:
        # Its own schedule file would be a pickle; nothing of it needs to outlive the process.
        beat = EmbeddedService(app, thread=True, scheduler_cls=SCHEDULER)
        worker_ready.connect(lambda **_: start(cast(threading.Thread, beat)), weak=False)
    _work(queues, "--pool=threads", f"--concurrency={THREADS}")


def run_processes(queues: list[str]) -> None:
    """Serve each queue by a process of its own and its children, so that none waits for another.

    They are forks of this process, and share the memory of what it has imported. When one ends, so
    do all. Raises SystemExit with status 1 unless that was asked for.
    """
    fork = multiprocessing.get_context("fork")
    follow = set_parent_death_signal(signal.SIGTERM)

    def work(queue: str) -> None:
        if follow is not None:
            follow()
        if (die := set_parent_death_signal(signal.SIGKILL)) is not None:
            worker_process_init.connect(lambda **_: die(), weak=False)
        _work([queue], "--pool=prefork", f"--concurrency={PROCESS_QUEUES[queue]}")

    app.loader.import_default_modules()
    gc.freeze()  # what is collected in a fork is no longer shared
    children = [fork.Process(target=work, args=(queue,), name=queue) for queue in queues]
    signals: list[int] = []

    def end(number: int = 0, frame: object = None) -> None:
        signals.append(number)
        for child in children:
            child.terminate()

    for child in children:
        child.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    multiprocessing.connection.wait([child.sentinel for child in children])
    asked = bool(signals)
    end()
    for child in children:
        child.join()
    if not asked:
        raise SystemExit(1)


def _work(queues: list[str], *pool: str) -> None:
    worker_shutting_down.connect(_end, weak=False)
    # It says that Celery dislikes root because of pickles, which no task of ours may be.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app.worker_main(
        [
            *("--quiet", "worker", f"--queues={','.join(queues)}", *pool, "--loglevel=WARNING"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]
    )


def _end(**_: object) -> None:
    exit_after_timeout(ENDS_WITHIN_S)


def start(beat: threading.Thread) -> None:
    """Look for what earlier workers left, at once; then at the schedule's times."""
    send_task_best_effort(
        "inference.sweep"
    )  # what it raised would end here, and the clock never begin
    beat.start()
