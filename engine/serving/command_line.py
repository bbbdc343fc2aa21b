"""The command line of a replica's process, and its entry point."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from types import FrameType

from engine.contract import redis_keys
from engine.contract.command_line import expand_args
from engine.contract.engine_config import EngineConfig, add_cli_args
from engine.contract.errors import ConfigError
from engine.contract.messages import EXIT_CONFIG
from engine.contract.observability import configure_logging
from engine.serving.inbox import IncarnationReplaced
from engine.serving.service import EXIT_FAULT, EngineService
from engine.system.redis_client import replica_client

log = logging.getLogger(__name__)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The process's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.serving", description="Run one engine replica."
    )
    parser.add_argument("--replica-id", required=True, help="unique name of this replica")
    parser.add_argument(
        "--redis-url",
        default=os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"),
        help="where requests come from (default: REDIS_URL or %(default)s)",
    )
    parser.add_argument(
        "--key-prefix", default=redis_keys.KEY_PREFIX, help="of all keys (default: %(default)s)"
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests get after SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--spare",
        action="store_true",
        help="take requests only while no other replica of the model does",
    )
    parser.add_argument(
        "--health-port",
        type=int,
        metavar="PORT",
        help="answer GET /live, /ready and /metrics over HTTP at this port (default: don't)",
    )
    parser.add_argument(
        "--endpoint",
        default="",
        metavar="HOST:PORT",
        help="address of the gateway in this replica's pod, for endpoint pickers (default: none)",
    )
    parser.add_argument(
        "--adapter-fetch-command",
        metavar="COMMAND",
        help="prints the path of the adapter whose digest is its last argument, once its files are "
        "on this machine (default: they are where requests say)",
    )
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error")
    )
    add_cli_args(parser)
    return parser.parse_args(expand_args(sys.argv[1:] if argv is None else argv, parser))


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse_args(argv)
    try:
        configure_logging(args.log_level)
        config = EngineConfig.from_cli_args(args)
        if not config.model:
            raise ConfigError("--model is required.", param="model")
        if config.needs_equal_requests:
            raise ConfigError(
                "distributed_executor_backend=external_launcher is for programs that use LLM: each "
                "rank would serve the same requests.",
                param="distributed_executor_backend",
            )
    except ConfigError as error:
        log.error("%s", error.message)
        return EXIT_CONFIG
    threading.excepthook = _die_with_thread
    client = replica_client(args.redis_url)
    try:
        service = EngineService(
            config,
            args.replica_id,
            client,
            args.key_prefix,
            spare=args.spare,
            health_port=args.health_port,
            endpoint=args.endpoint,
            adapter_fetch_command=args.adapter_fetch_command,
        )
    except ConfigError as error:
        log.error("%s", error.message)
        return EXIT_CONFIG

    def on_signal(number: int, frame: FrameType | None) -> None:
        if service.draining or service.core is None:
            # A second signal, or nothing to finish yet.
            os._exit(128 + number)
        service.drain()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return service.run(args.drain_timeout)


def _die_with_thread(args: threading.ExceptHookArgs) -> None:
    """End the process when a thread dies: without it the replica would only seem alive."""
    name = args.thread.name if args.thread else "?"
    if isinstance(args.exc_value, IncarnationReplaced):
        log.critical("%s", args.exc_value)
    else:
        log.critical("Thread %s failed; the replica ends.", name, exc_info=args.exc_value)
    logging.shutdown()
    os._exit(EXIT_FAULT)
