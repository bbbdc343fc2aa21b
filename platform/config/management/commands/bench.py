"""`manage.py bench latency|throughput|serve|kernels`: how fast this machine runs a model."""

from __future__ import annotations

import asyncio
import json
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from engine.config import EngineConfig, add_cli_args
from engine.errors import QuireError

OWN_FLAGS = frozenset({"model", "served_model_name"})


class Command(BaseCommand):
    """Measure latency, throughput or a running server."""

    help = (
        "Measure a model's speed: 'latency' (one batch, in this process), 'throughput' (many "
        "requests, in this process), 'serve' (streaming load on a running server) or 'kernels' (a "
        "GPU's kernels, and an 8B-shaped model on them). Percentages refer to the memory bandwidth "
        "and matrix-product rate measured in the same run."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        forms = parser.add_subparsers(
            dest="form", required=True, metavar="latency|throughput|serve|kernels"
        )
        forms.add_parser("kernels", help="the GPU's kernels and an 8B-shaped model")
        latency = forms.add_parser("latency", help="one batch from prompt to last token")
        self._engine_arguments(latency)
        latency.add_argument("--batch-size", type=int, default=1, metavar="N")
        latency.add_argument("--input-len", type=int, default=32, metavar="N")
        latency.add_argument("--output-len", type=int, default=128, metavar="N")
        latency.add_argument("--repeats", type=int, default=3, metavar="N")
        throughput = forms.add_parser("throughput", help="many requests at once")
        self._engine_arguments(throughput)
        self._workload_arguments(throughput)
        serve = forms.add_parser("serve", help="streaming load on a running server")
        serve.add_argument("--url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
        serve.add_argument("--model", required=True, help="the served model's name")
        serve.add_argument(
            "--api-key", default=os.environ.get("QUIRE_API_KEY", ""), help="or QUIRE_API_KEY"
        )
        serve.add_argument(
            "--concurrency", default="1,8,32", help="closed loop: levels, comma-separated"
        )
        serve.add_argument(
            "--request-rate", type=float, metavar="X", help="open loop: requests a second instead"
        )
        serve.add_argument("--vocab-size", type=int, default=2048, metavar="N", help="of prompts")
        self._workload_arguments(serve)

    def _engine_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--model", default=str(settings.BASE_DIR / "demo" / "model"), help="(default: the demo)"
        )
        parser.add_argument("--json", metavar="FILE", help="also append the figures to FILE")
        add_cli_args(parser, skip=OWN_FLAGS)

    def _workload_arguments(self, parser: ArgumentParser) -> None:
        for action in parser._actions:
            if action.dest == "json":
                break
        else:
            parser.add_argument("--json", metavar="FILE", help="also append the figures to FILE")
        parser.add_argument("--num-prompts", type=int, default=64, metavar="N")
        parser.add_argument("--input-len", default="128-512", metavar="N|LOW-HIGH")
        parser.add_argument("--output-len", default="64-128", metavar="N|LOW-HIGH")
        parser.add_argument("--workload-seed", type=int, default=7, metavar="N")

    def handle(self, *args: Any, **options: Any) -> None:
        run = {
            "latency": self._latency,
            "throughput": self._throughput,
            "serve": self._serve,
            "kernels": self._kernels,
        }
        try:
            run[options["form"]](options)
        except QuireError as error:
            raise CommandError(error.message) from error

    def _latency(self, options: dict[str, Any]) -> None:
        from engine.bench import ceilings, offline

        core = self._core(options)
        row = offline.latency(
            core,
            ceilings.measure(),
            options["batch_size"],
            options["input_len"],
            options["output_len"],
            options["repeats"],
        )
        self._report(row, options)

    def _throughput(self, options: dict[str, Any]) -> None:
        from engine.bench import ceilings, offline, workload

        core = self._core(options)
        jobs = workload.random_jobs(
            options["num_prompts"],
            core.loaded.spec.vocab_size,
            _range(options["input_len"], "--input-len"),
            _range(options["output_len"], "--output-len"),
            options["workload_seed"],
        )
        self._report(offline.throughput(core, ceilings.measure(), jobs), options)

    def _serve(self, options: dict[str, Any]) -> None:
        from engine.bench import http_load, workload

        url = urlsplit(options["url"])
        if url.scheme != "http" or not url.hostname:
            raise CommandError(f"--url must be an http:// address, got {options['url']!r}.")
        target = http_load.Target(url, options["model"], options["api_key"])
        levels = [0] if options["request_rate"] else _levels(options["concurrency"])
        for at, level in enumerate(levels):
            jobs = workload.random_jobs(
                options["num_prompts"],
                options["vocab_size"],
                _range(options["input_len"], "--input-len"),
                _range(options["output_len"], "--output-len"),
                # Fresh prompts a level: none is served from an earlier level's prefix cache.
                options["workload_seed"] + 100 * at,
            )
            if options["request_rate"]:
                found = asyncio.run(http_load.open_loop(target, jobs, options["request_rate"]))
                how: dict[str, Any] = {"request_rate": options["request_rate"]}
            else:
                found = asyncio.run(http_load.closed_loop(target, jobs, level))
                how = {"concurrency": level}
            if not found.samples:
                reason = found.failures[0] if found.failures else "no request was answered"
                raise CommandError(f"All requests failed: {reason}")
            self._report(
                {"benchmark": "serve", "model": options["model"], **how} | found.row(), options
            )
            for failure in found.failures[:3]:
                self.stderr.write(f"  failed: {failure}")

    def _kernels(self, options: dict[str, Any]) -> None:
        from engine.bench import gpu

        if not gpu.torch.cuda.is_available():
            raise CommandError(
                "torch sees no CUDA device; `python -m kernels.bench` times the CPU's kernels."
            )
        gpu.run_kernels(self.stdout.write)

    def _core(self, options: dict[str, Any]) -> Any:
        """The engine, in this process."""
        from engine.core import EngineCore

        known = EngineConfig.__dataclass_fields__
        given = {name: options[name] for name in known if options.get(name) is not None}
        config = EngineConfig.from_mapping(given)
        core = EngineCore(config)
        loaded = core.loaded
        self.stdout.write(
            f"{loaded.spec.architecture}, {loaded.spec.num_parameters / 1e6:.1f} M parameters, "
            f"{loaded.dtype}, kernels: {loaded.model.ops.name}, "
            f"{core.executor.num_blocks} blocks, budget {core.executor.token_budget} tokens a step"
        )
        return core

    def _report(self, row: dict[str, Any], options: dict[str, Any]) -> None:
        from engine.bench.statistics import table

        self.stdout.write(table(row))
        if options.get("json"):
            with Path(options["json"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _range(text: str, flag: str) -> tuple[int, int]:
    """`128` or `128-512`, both ends included."""
    low, _, high = str(text).partition("-")
    try:
        bounds = int(low), int(high or low)
    except ValueError as error:
        raise CommandError(f"{flag} must be N or LOW-HIGH, got {text!r}.") from error
    if not 1 <= bounds[0] <= bounds[1]:
        raise CommandError(f"{flag} must rise from at least 1, got {text!r}.")
    return bounds


def _levels(text: str) -> list[int]:
    """Comma-separated concurrency levels."""
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise CommandError(f"--concurrency must be numbers, got {text!r}.") from error
    if any(level < 1 for level in levels):
        raise CommandError("--concurrency must be at least 1.")
    return levels
