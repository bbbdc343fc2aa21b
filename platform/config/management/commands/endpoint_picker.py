from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand
from config.embedded_redis import StartFailed, check_redis


class Command(QuireCommand):
    needs_database = False
    help = (
        "Pick the pod that answers a request, for a Gateway of Kubernetes' Gateway API with an "
        "InferencePool: by Envoy's external processing, over gRPC. Any number may run on one "
        "Redis. Needs the extra `gateway-api`."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
        )
        parser.add_argument(
            "--port", type=int, default=9002, help="port to listen on (default: %(default)s)"
        )
        parser.add_argument(
            "--gateways",
            default="",
            metavar="HOST:PORT",
            help="name whose addresses are gateways, such as a headless Service: they get what no "
            "replica is ready for (default: none)",
        )
        parser.add_argument(
            "--ssl-certfile", type=Path, metavar="FILE", help="certificate; then TLS is served"
        )
        parser.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its private key")

    def handle(self, *args: Any, **options: Any) -> None:
        """Serve until SIGTERM or SIGINT."""
        host, port, gateways = options["host"], options["port"], options["gateways"]
        if not 1 <= port <= 65535:
            raise CommandError(f"--port must be in [1, 65535], got {port}.")
        name, _, number = gateways.rpartition(":")
        if gateways and not (name and number.isdecimal() and 1 <= int(number) <= 65535):
            raise CommandError(f"--gateways must be HOST:PORT, got {gateways!r}.")
        if (options["ssl_certfile"] is None) != (options["ssl_keyfile"] is None):
            raise CommandError("--ssl-certfile and --ssl-keyfile are given together.")
        try:
            from inference.endpoint_picker.server import ServerOptions, serve
        except ImportError as error:
            raise CommandError(
                f"{error}. Install what pickers need: pip install 'quire[gateway-api]'."
            ) from error
        try:
            check_redis(settings.REDIS_URL)
        except StartFailed as error:
            raise CommandError(str(error)) from error
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.print_hint(f"Picking endpoints at {address}; Ctrl-C ends it.")
        asyncio.run(
            serve(
                ServerOptions(
                    address,
                    gateways,
                    options["ssl_certfile"],
                    options["ssl_keyfile"],
                    settings.QUIRE.drain_seconds,
                )
            )
        )
