"""`manage.py bench latency|throughput|serve|kernels`: measures a model's speed on this machine."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from argparse import ArgumentParser
from typing import Any
from urllib.parse import urlsplit

from django.core.management.base import BaseCommand, CommandError

from common.commands import ProgressBar
from config.bench_flags import INPUT_LEN, OUTPUT_LEN, WITH_ENGINE, add_forms
from engine.contract.command_line import expand_args
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, QuireError


def _kernel_set(core: Any) -> Any:
    """Return the `KernelSet` of the engine's worker."""
    [kernels] = core.executor.collective_rpc(lambda worker: worker.kernels)
    return kernels


class Command(BaseCommand):
    help = (
        "Measure a model's speed. Forms: 'latency' (one batch, in this process), 'throughput' "
        "(many requests, in this process), 'serve' (streaming load on a running server) or "
        "'kernels' (a GPU's). Percentages refer to the memory bandwidth and the float32 "
        "matrix-product rate measured in the same run; a model that fits the caches, or is "
        "multiplied in fewer bits, can exceed them."
    )
    requires_system_checks: list[str] = []

    def run_from_argv(self, argv: list[str]) -> None:
        """Parse the command line; engine flags like the engine's own command line does."""
        if argv[2:3] and argv[2] in WITH_ENGINE:
            try:
                argv = [*argv[:3], *expand_args(argv[3:])]
            except ConfigError as error:
                self.stderr.write(f"{argv[1]}: {error.message}")
                sys.exit(2)
        super().run_from_argv(argv)

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_forms(parser)

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
        from benchmarks import ceilings, offline

        core = self._core(options)
        self._check_lengths(core, options["input_len"], options["output_len"])
        max_num_seqs = core.config.max_num_seqs
        if options["batch_size"] > max_num_seqs:
            raise CommandError(
                f"A batch of {options['batch_size']} doesn't run together: "
                f"--max-num-seqs is {max_num_seqs}."
            )
        best = ceilings.measure()
        with ProgressBar("Batches") as bar:
            row = self._engine_of(core) | offline.latency(
                core,
                best,
                options["batch_size"],
                options["input_len"],
                options["output_len"],
                options["repeats"],
                options["warmups"],
                bar.show,
            )
        self._report(row, options)

    def _throughput(self, options: dict[str, Any]) -> None:
        from benchmarks import ceilings, offline, workload

        seed = options["workload_seed"]
        if options["dataset"] is None:
            core = self._core(options)
            lengths = options["input_len"] or INPUT_LEN, options["output_len"] or OUTPUT_LEN
            self._check_lengths(core, lengths[0][1], lengths[1][1])
            jobs = workload.random_jobs(
                options["num_prompts"], core.facts.vocab_size, *lengths, seed
            )
        else:
            if options["input_len"] or options["output_len"]:
                raise CommandError(
                    "--dataset has lengths of its own: leave --input-len and --output-len out."
                )
            conversations = workload.read_sharegpt(options["dataset"])
            core = self._core(options)
            if core.tokenizer is None:
                raise CommandError(
                    "--dataset needs the tokenizer: leave --skip-tokenizer-init out."
                )
            jobs = workload.sharegpt_jobs(
                conversations,
                core.tokenizer.encode,
                options["num_prompts"],
                core.facts.max_model_len,
                seed,
            )
        best = ceilings.measure()
        with ProgressBar("Tokens") as bar:
            row = self._engine_of(core) | offline.throughput(core, best, jobs, bar.show)
        self._report(row, options)

    def _serve(self, options: dict[str, Any]) -> None:
        from benchmarks import http_load, workload

        url = urlsplit(options["url"])
        if url.scheme not in ("http", "https") or not url.hostname:
            raise CommandError(
                f"--url must be an http:// or https:// address, got {options['url']!r}."
            )
        target = http_load.Target(
            url, options["model"] or "", options["api_key"], again=options["retry"]
        )
        target.model = target.model or asyncio.run(http_load.first_model(target))
        rate = options["request_rate"]
        for index, level in enumerate([0] if rate else options["concurrency"]):
            jobs = workload.random_jobs(
                options["num_prompts"],
                options["vocab_size"],
                options["input_len"] or INPUT_LEN,
                options["output_len"] or OUTPUT_LEN,
                # New prompts at each level: none may hit the prefix cache of an earlier level.
                options["workload_seed"] + 100 * index,
            )
            with ProgressBar("Requests") as bar:

                def show(num_finished: int, bar: ProgressBar = bar, total: int = len(jobs)) -> None:
                    bar.show(num_finished / total)

                if rate:
                    load = http_load.open_loop(target, jobs, rate, on_finished=show)
                    how: dict[str, Any] = {"request_rate": "inf" if math.isinf(rate) else rate}
                else:
                    load = http_load.closed_loop(target, jobs, level, on_finished=show)
                    how = {"concurrency": level}
                result = asyncio.run(load)
            if not result.samples:
                reason = result.failures[0] if result.failures else "no request was answered"
                raise CommandError(f"All requests failed: {reason}")
            self._report(
                {"benchmark": "serve", "model": target.model, **how, **result.row()}, options
            )
            for failure in result.failures[:3]:
                self.stderr.write(f"  failed: {failure}")

    def _kernels(self, options: dict[str, Any]) -> None:
        from benchmarks import gpu

        if not gpu.torch.cuda.is_available():
            raise CommandError(
                "torch sees no CUDA device; `python -m benchmarks.kernels` times the CPU's kernels."
            )
        gpu.run_kernels(self.stdout.write)

    def _check_lengths(self, core: Any, prompt: int, output: int) -> None:
        """Raise with the flags to change, before anything runs, if requests exceed the context."""
        max_model_len = core.facts.max_model_len
        if prompt + output > max_model_len:
            raise CommandError(
                f"Prompts of {prompt} and outputs of {output} tokens (--input-len, --output-len) "
                f"don't fit the model's context of {max_model_len}."
            )

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the validated engine settings from the command line."""
        fields = EngineConfig.__dataclass_fields__
        values = {name: options[name] for name in fields if options.get(name) is not None}
        return EngineConfig.from_mapping(values).to_mapping()

    def _core(self, options: dict[str, Any]) -> Any:
        """Run the engine in this process."""
        from engine.core.engine_core import EngineCore

        core = EngineCore(EngineConfig.from_mapping(self._settings(options)))
        facts, capacity = core.facts, core.capacity
        self.stdout.write(
            f"{facts.architecture}, {facts.num_parameters / 1e6:.1f} M parameters, "
            f"{facts.dtype}, kernels: {_kernel_set(core).name}, "
            f"{capacity.num_blocks} blocks, budget {capacity.token_budget} tokens a step"
        )
        return core

    def _engine_of(self, core: Any) -> dict[str, Any]:
        """Describe the engine that the figures belong to."""
        config, kernels = core.config, _kernel_set(core)
        return {
            "model": config.name,
            "weights": config.quantization or core.facts.dtype,
            "kernels": kernels.name,
            "threads": kernels.num_threads(),
        }

    def _report(self, row: dict[str, Any], options: dict[str, Any]) -> None:
        from benchmarks.statistics import table

        self.stdout.write(table(row))
        self._keep(row, options)

    def _keep(self, row: dict[str, Any], options: dict[str, Any]) -> None:
        """Append the figures to the file named on the command line."""
        if options["json"]:
            with options["json"].open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
