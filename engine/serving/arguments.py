"""The command line of a replica's process."""

from __future__ import annotations

import argparse
import os
import sys

from engine.contract import protocol
from engine.contract.command_line import expanded
from engine.contract.config import add_cli_args


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
        "--key-prefix", default=protocol.KEY_PREFIX, help="of all keys (default: %(default)s)"
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
        "--log-level", default="info", choices=("debug", "info", "warning", "error")
    )
    add_cli_args(parser)
    return parser.parse_args(expanded(sys.argv[1:] if argv is None else argv, parser))
