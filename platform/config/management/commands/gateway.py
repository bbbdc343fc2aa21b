from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from catalog.supervisor import TICK_S
from common.commands import QuireCommand
from common.installation import PROGRAM
from common.settings_environment import set_internal_fields, unknown_variables
from config.embedded_redis import StartFailed, check_redis
from config.up.first_run import ensure_given_keys, keys_from_environment
from config.up.processes import Gateways, listen, url_of, use_tls
from config.up.server_flags import (
    add_server_flags,
    check_server_flags,
    serve_options,
    use_server_flags,
)


class Command(QuireCommand):
    needs_database = False
    help = (
        "Run the web server alone: API, pages, WebSockets. For production, beside replicas that "
        f"`{PROGRAM} supervise` or `{PROGRAM} engine` run, with DATABASE_URL and REDIS_URL set."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
        )
        parser.add_argument(
            "--port", type=int, default=8000, help="port to listen on (default: %(default)s)"
        )
        parser.add_argument(
            "--workers", type=int, default=1, metavar="N", help="processes (default: 1)"
        )
        parser.add_argument(
            "--replica-id",
            default="",
            metavar="ID",
            help="replica in this gateway's pod; it gets requests first while it isn't busier "
            "than others by more than QUIRE.affinity_slack (default: none)",
        )
        parser.add_argument(
            "--ssl-certfile", metavar="FILE", help="certificate; then HTTPS is served"
        )
        parser.add_argument("--ssl-keyfile", metavar="FILE", help="its private key")
        parser.add_argument(
            "--otlp-traces-endpoint",
            metavar="URL",
            help="where to send traces by OTLP (default: QUIRE_OTLP_TRACES_ENDPOINT)",
        )
        add_server_flags(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Serve until SIGTERM or SIGINT; a second signal kills the processes."""
        for sentence in unknown_variables():
            self.print_hint(sentence)
        options["workers"] = options["api_server_count"] or options["workers"]
        check_server_flags(options)
        use_server_flags(options)
        if options["replica_id"]:
            set_internal_fields({"local_replica_id": options["replica_id"]})
        if not 1 <= options["workers"] <= 64:
            raise CommandError(f"--workers must be in [1, 64], got {options['workers']}.")
        use_tls(options["ssl_certfile"], options["ssl_keyfile"])
        try:
            check_redis(settings.REDIS_URL)
            ensure_given_keys(options["api_key"] or keys_from_environment())
            listener = listen(options["host"], options["port"])
        except (StartFailed, OSError) as error:
            raise CommandError(getattr(error, "strerror", None) or str(error)) from error
        grace = settings.QUIRE.drain_seconds
        names = ("ssl_certfile", "ssl_keyfile")
        gateways = Gateways(
            listener,
            options["workers"],
            {
                "server": "uvicorn",
                "grace": grace,
                **{name: options[name] for name in names},
                **serve_options(options),
            },
        )
        url = url_of(options["host"], listener.getsockname()[1], tls=bool(options["ssl_certfile"]))
        self.print_hint(f"Serving at {url}; Ctrl-C ends it.")
        serve(gateways, settings.QUIRE.shutdown_delay_seconds, grace)


def serve(gateways: Gateways, delay: float, grace: float) -> None:
    """Keep the processes running until SIGINT or SIGTERM. Raises `CommandError` if none starts.

    Args:
        delay: seconds from SIGTERM until no more connections are accepted. There's no delay after
            SIGINT, which a person sends.
        grace: seconds that open requests then have to finish.
    """
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            gateways.kill()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        while not signals:
            gateways.tick()
            if gateways.is_crash_looping:
                raise CommandError("The gateway exits at each start; its log above says why.")
            time.sleep(TICK_S)
        if signals == [signal.SIGTERM]:
            gateways.begin_draining()
            deadline = time.monotonic() + delay
            while time.monotonic() < deadline and len(signals) == 1:
                time.sleep(TICK_S)
    finally:
        gateways.stop(grace)
