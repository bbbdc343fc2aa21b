"""`manage.py worker`."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from celery.beat import EmbeddedService
from celery.exceptions import SecurityWarning
from celery.signals import worker_ready, worker_shutting_down
from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from config.celery import app
from config.quick_exit import end_within, serving
from config.up.stack import StartFailed, check_redis
from inference.tracing import trace_as
from tenants.commands import QuireCommand
from tenants.work import hint

SCHEDULER = "config.steady_beat:SteadyScheduler"
#: Less than `manage.py up` and service managers wait. What isn't given back by then is taken over
#: like a killed worker's.
ENDS_WITHIN_S = 12.0


class Command(QuireCommand):
    """Run what outlives a request."""

    needs_database = False
    help = (
        "Run a worker: batches, background responses, and cleaning up what has expired. Any "
        "number may run; each takes over what a dead one left."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Whether it keeps the clock too."""
        parser.add_argument(
            "--no-beat", action="store_true", help="start no scheduled tasks; other workers do"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Work until SIGTERM or Ctrl-C: what runs then is given back to other workers."""
        try:
            check_redis(settings.REDIS_URL)
        except StartFailed as error:
            raise CommandError(str(error)) from error
        serving(lambda: self._work(beats=not options["no_beat"]))

    def _work(self, *, beats: bool) -> None:
        trace_as("quire-worker")
        if beats:
            # Its own schedule file would be a pickle; nothing of it needs to outlive the process.
            beat = EmbeddedService(app, thread=True, scheduler_cls=SCHEDULER)
            worker_ready.connect(lambda **_: start(beat), weak=False)
        worker_shutting_down.connect(_end, weak=False)
        # It says that Celery dislikes root because of pickles, which no task of ours may be.
        warnings.filterwarnings("ignore", category=SecurityWarning)
        app.worker_main(
            [
                *("--quiet", "worker"),
                # Tasks only hand work to the process's own loop.
                *("--pool=threads", "--concurrency=2", "--loglevel=WARNING"),
                *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            ]
        )


def _end(**_: object) -> None:
    end_within(ENDS_WITHIN_S)


def start(beat: threading.Thread) -> None:
    """Look for what earlier workers left, at once; then at the schedule's times."""
    hint("inference.sweep")  # what it raised would end here, and the clock never begin
    beat.start()
