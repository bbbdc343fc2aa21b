from __future__ import annotations

import dataclasses
import json
from typing import Any

from django.core.management.base import CommandParser

from catalog.cli import NAMED, parse_engine_settings
from common.commands import QuireCommand
from engine.contract.engine_config import add_cli_args

_COLUMNS = ("layer", "format", "level", "bytes", "error")


class Command(QuireCommand):
    needs_database = False
    takes_engine_settings = True
    help = (
        "Load a model in this process and print for each layer: the checkpoint's format, the "
        "format that the weights are kept in, their size, and the largest rounding error, relative "
        "to the largest weight."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("model", metavar="PATH_OR_HUB_ID", help="folder, file or hub id")
        parser.add_argument("--json", action="store_true", help="an object a line, not a table")
        add_cli_args(parser, skip=NAMED)
        parser.usage = "%(prog)s [--json] [engine settings] PATH_OR_HUB_ID"

    def handle(self, *args: Any, **options: Any) -> None:
        from engine import LLM

        # The smallest possible KV cache: nothing is generated.
        settings = {"num_gpu_blocks_override": 8, **parse_engine_settings(options)}
        llm = LLM(options["model"], **settings)
        rows = [dataclasses.asdict(report) for report in llm.load_report()]
        llm.llm_engine.shutdown()
        if options["json"]:
            for row in rows:
                self.stdout.write(json.dumps(row))
            return
        self.table(
            _COLUMNS,
            [
                (row["layer"], row["format"], row["level"], row["nbytes"], f"{row['error']:.1e}")
                for row in rows
            ],
        )
