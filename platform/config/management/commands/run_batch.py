from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from catalog.cli import NAMED, parse_engine_settings
from common.commands import ProgressBar, QuireCommand
from config.batch_client import BatchClient, NoServer, Totals, private_server
from config.management.commands.chat import find_server
from engine.contract.engine_config import add_cli_args


class Command(QuireCommand):
    needs_database = False
    takes_engine_settings = True
    help = (
        "Answer a file of requests in OpenAI's batch format, one JSON object a line, and write the "
        "results to another file. With --model no server needs to run: one is started for as long "
        "as it takes, with its own data. Else the instance in the data dir answers, or --url."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "-i", "--input-file", required=True, metavar="FILE", help="the requests"
        )
        parser.add_argument(
            "-o", "--output-file", required=True, metavar="FILE", help="where results go"
        )
        parser.add_argument(
            "--model", metavar="PATH_OR_HUB_ID", help="model to serve for this batch"
        )
        parser.add_argument(
            "--served-model-name", metavar="NAME", help="model name used in the requests"
        )
        parser.add_argument("--url", help="URL of a running server")
        parser.add_argument("--api-key", help="(default: QUIRE_API_KEY, or the data dir's)")
        parser.add_argument(
            "--concurrency", type=int, default=32, metavar="N", help="(default: %(default)s)"
        )
        parser.add_argument("--insecure", action="store_true", help="accept any certificate")
        add_cli_args(parser, skip=NAMED)
        parser.usage = "%(prog)s -i FILE -o FILE [--model PATH_OR_HUB_ID] [engine settings]"

    def handle(self, *args: Any, **options: Any) -> None:
        """Process all requests, then move the output to its final path."""
        if not 1 <= options["concurrency"] <= 1024:
            raise CommandError(f"--concurrency must be in [1, 1024], got {options['concurrency']}.")
        if options["model"] and options["url"]:
            raise CommandError("--model and --url can't be used together.")
        source, target = Path(options["input_file"]), Path(options["output_file"])
        partial = target.with_name(f".{target.name}.partial")
        try:
            with source.open("rb") as lines, partial.open("w", encoding="utf-8") as output:
                totals = self._answer(lines, output, options)
            os.replace(partial, target)
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}") from error
        except NoServer as error:
            raise CommandError(f"The model can't be served.\n{error}") from error
        finally:
            partial.unlink(missing_ok=True)
        self.print_hint(f"{totals.completed} completed, {totals.failed} failed: {target}")

    def _answer(self, lines: IO[bytes], output: IO[str], options: dict[str, Any]) -> Totals:
        with self._server(options) as (url, api_key):
            client = BatchClient(
                url, api_key, options["concurrency"], verify=not options["insecure"]
            )
            try:
                with ProgressBar("Requests sent") as bar:
                    return asyncio.run(client.run(_counted(lines, bar), output))
            except* httpx.TransportError as errors:
                first = errors.exceptions[0]
                raise CommandError(f"{url} can't be reached: {first}") from errors

    @contextlib.contextmanager
    def _server(self, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
        if not options["model"]:
            data_dir = Path(settings.DATA_DIR)
            url, key = find_server(data_dir, options["url"], options["api_key"])
            yield url.rstrip("/").removesuffix("/v1"), key
            return
        self.print_hint(f"Loading {options['model']} ...")
        with private_server(_flags(options)) as server:
            yield server


def _counted(lines: IO[bytes], bar: ProgressBar) -> Iterator[bytes]:
    """Yield the lines; a progress bar shows the share of the bytes read, except for a pipe."""
    total_bytes, num_bytes = os.fstat(lines.fileno()).st_size, 0
    for line in lines:
        yield line
        num_bytes += len(line)
        if total_bytes:
            bar.show(num_bytes / total_bytes)


def _flags(options: dict[str, Any]) -> list[str]:
    """Return the engine settings from the command line, as for `manage.py up`."""
    flags = ["--model", options["model"]]
    if options["served_model_name"]:
        flags += ["--served-model-name", options["served_model_name"]]
    for name, value in parse_engine_settings(options).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            flags.append(f"--{flag}={text}")
    return flags
