from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from catalog.cli import NAMED, parse_engine_settings
from common.commands import QuireCommand
from engine.contract.engine_config import add_cli_args


class Command(QuireCommand):
    needs_database = False
    takes_engine_settings = True
    help = (
        "Quantize a model's linear layers to 8 or 4 bits (--quantization int8 or int4) and write "
        "it to a new folder in the compressed-tensors format."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("model", metavar="PATH_OR_HUB_ID", help="folder, file or hub id")
        parser.add_argument("folder", metavar="NEW_FOLDER", help="where to write the result")
        parser.usage = "%(prog)s -q {int8,int4} [engine settings] PATH_OR_HUB_ID NEW_FOLDER"
        add_cli_args(parser, skip=NAMED)

    def handle(self, *args: Any, **options: Any) -> None:
        from engine import LLM

        llm = LLM(
            options["model"], **{"num_gpu_blocks_override": 8, **parse_engine_settings(options)}
        )
        for file in llm.save_quantized(options["folder"]):
            self.stdout.write(str(file))
        llm.llm_engine.shutdown()
