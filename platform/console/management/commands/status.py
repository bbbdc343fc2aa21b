from __future__ import annotations

import json
import time
from argparse import ArgumentTypeError
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from catalog.live_status import live_replicas, model_state, replica_figures, state_of
from catalog.models import DesiredState, ServedModel
from common.commands import QuireCommand
from common.installation import PROGRAM
from common.redaction import without_credentials
from engine.contract.messages import Heartbeat
from metering.redis_scripts import sync_client
from metering.settlement import spool_key

HEAD = ("MODEL", "STATE", "REPLICA", "RUNNING", "WAITING", "KV CACHE", "CONTEXT", "WHERE")
#: States that don't make the command exit with an error.
WELL = ("ready", "sleeping")
WATCH_INTERVAL_S, MIN_WATCH_INTERVAL_S, MAX_WATCH_INTERVAL_S = 2.0, 0.2, 86_400.0
#: ANSI codes: move the cursor to the top left and clear everything below.
CLEAR_SCREEN = "\x1b[H\x1b[J"


def _interval(text: str) -> float:
    """Parse seconds. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not MIN_WATCH_INTERVAL_S <= value <= MAX_WATCH_INTERVAL_S:
        limits = f"{MIN_WATCH_INTERVAL_S:g} to {MAX_WATCH_INTERVAL_S:.0f}"
        raise ArgumentTypeError(f"must be {limits} seconds, got {text!r}")
    return value


class Command(QuireCommand):
    help = (
        "Show the state of Redis, the usage spool, models and replicas. The exit status is 1 "
        "while a loaded model is unavailable, so that scripts can wait for it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options of the output."""
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument(
            "--watch",
            type=_interval,
            nargs="?",
            const=WATCH_INTERVAL_S,
            metavar="S",
            help=f"print it again every S seconds until Ctrl-C (default: {WATCH_INTERVAL_S:g})",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        while True:
            unavailable = self._print(as_json=options["json"])
            if options["watch"] is None:
                break
            try:
                time.sleep(options["watch"])
            except KeyboardInterrupt:
                return
            if self.stdout.isatty() and not options["json"]:
                self.stdout.write(CLEAR_SCREEN, ending="")
        if unavailable:
            raise CommandError(unavailable)

    def _print(self, *, as_json: bool) -> str:
        """Print the state once; return why requests can't be served, or ""."""
        loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED, idle_since=None)
        models = list(loaded.prefetch_related("replicas"))
        beats = live_replicas()
        client = sync_client()
        try:
            version, num_pending = client.info("server")["redis_version"], client.xlen(spool_key())
        finally:
            client.close()
        states = {
            model.name: model_state(heartbeats_of(model, beats), model.replicas.all())
            for model in models
        }
        waiting = [name for name, state in states.items() if state["state"] not in WELL]
        if as_json:
            report = {
                "redis_version": version,
                "pending_usage_records": num_pending,
                "models": [
                    {
                        "name": model.name,
                        "state": states[model.name]["state"],
                        "replicas": [
                            replica_figures(beat, operator=True)
                            for beat in heartbeats_of(model, beats)
                        ],
                    }
                    for model in models
                ],
            }
            self.stdout.write(json.dumps(report))
        else:
            self._print_tables(models, beats, states, version, num_pending)
        if not models:
            return f"No model is loaded. See {PROGRAM} load_model."
        return f"These can't answer now: {', '.join(waiting)}." if waiting else ""

    def _print_tables(
        self,
        models: list[ServedModel],
        beats: list[Heartbeat],
        states: dict[str, dict[str, Any]],
        version: str,
        num_pending: int,
    ) -> None:
        self.stdout.write(f"Redis {version} at {without_credentials(settings.REDIS_URL)} answers.")
        self.stdout.write(f"{num_pending} usage records wait to be written.")
        if not models:
            return
        self.stdout.write("")
        self.table(HEAD, [row for model in models for row in rows(model, beats, states)])
        for beat in beats:
            if beat.detail:
                self.print_hint(f"{beat.replica_id}: {beat.detail}")


def heartbeats_of(model: ServedModel, beats: list[Heartbeat]) -> list[Heartbeat]:
    return [beat for beat in beats if beat.model.name == model.name]


def rows(
    model: ServedModel, beats: list[Heartbeat], states: dict[str, dict[str, Any]]
) -> list[tuple[object, ...]]:
    """Table rows of the model's live replicas, or one row without a replica."""
    live = heartbeats_of(model, beats)
    if not live:
        state = states[model.name]["state"]
        return [(model.name, state, "none", "-", "-", "-", model.max_model_len or "?", "-")]
    return [
        (
            model.name,
            state_of(beat),
            beat.replica_id,
            beat.stats.num_requests_running,
            beat.stats.num_requests_waiting,
            f"{beat.stats.kv_cache_usage_perc:.0%}",
            beat.model.max_model_len,
            f"{beat.host}, process {beat.pid}",
        )
        for beat in live
    ]
