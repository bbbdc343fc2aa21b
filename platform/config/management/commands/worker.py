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
#: Less than the grace of `manage.py up` and service managers. Work that isn't given back by then is
#: taken over like that of a killed worker.
ENDS_WITHIN_S = 12.0


class Command(QuireCommand):
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
        """Work until SIGTERM or Ctrl-C, then give unfinished work back to other workers."""
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
    """Serve the queues of short tasks in threads, and run the scheduler if `beats`."""
    set_service_name("quire-worker")
    if beats:
        # Beat's schedule file would be a pickle, and nothing in it needs to outlive the process.
        beat = EmbeddedService(app, thread=True, scheduler_cls=SCHEDULER)
        worker_ready.connect(lambda **_: start(cast(threading.Thread, beat)), weak=False)
    _work(queues, "--pool=threads", f"--concurrency={THREADS}")


def run_processes(queues: list[str]) -> None:
    """Serve each queue with its own process and child processes, so that none waits for another.

    The processes are forks of this one and share the memory of its imports. When one exits, all of
    them stop. Raises SystemExit with status 1 unless a signal asked for the exit.
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
    gc.freeze()  # a fork that collects these objects would stop sharing their memory
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
    # Celery warns against running as root because of pickles, which Quire's tasks never use.
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
    """Resume work that earlier workers left, then start the scheduler."""
    send_task_best_effort(
        "inference.sweep"
    )  # best effort: an exception here would keep the scheduler from starting
    beat.start()
