"""What LoRA adapters cost: `python -m benchmarks.lora --model FOLDER`.

Tokens a second of CPU time, and by the clock, by what the rows of a batch go through: adapters
turned off; on and unused; one of rank 16 on all rows; 10, 100 and 1,000 of rank 8, each row's drawn
evenly or by Zipf's law, with room for `--resident` of them on the device. Adapters are random and
written to a folder that goes afterwards; what loading them takes counts.

A case runs between two batches with adapters turned off, and is compared with these: so a machine
that grows busier counts for both. Each engine has a process of its own, for the second engine of a
process is slower than the first. The median over the turns is told; "off" is a third engine, again
with adapters turned off, and tells how much is noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file

from benchmarks.apart import Apart
from benchmarks.statistics import percentile, table
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE, LoRARequest
from engine.contract.sampling_params import SamplingParams
from engine.lora.target_modules import TargetModules
from engine.models.registry import decoder_spec, read_config
from engine.offline.llm import LLM

_PROMPT_TOKENS = 8


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> LoRARequest:
    """A random adapter of all linear layers, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    modules = TargetModules(decoder_spec(read_config(model)))
    tensors = {}
    for layer in modules.layers:
        for linear in layer.values():
            for part in linear.parts:
                for name, shape in (("A", (rank, linear.columns)), ("B", (part.rows, rank))):
                    values = 0.01 * torch.randn(shape, generator=generator)
                    tensors[f"base_model.model.{part.name}.lora_{name}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    return LoRARequest(folder.name, seed + 1, str(folder))


def chosen(
    adapters: Sequence[LoRARequest], count: int, law: str, seed: int
) -> list[LoRARequest | None]:
    """An adapter for each of `count` requests."""
    if not adapters:
        return [None] * count
    weights = [1.0 if law == "uniform" else 1 / (rank + 1) for rank in range(len(adapters))]
    return list(random.Random(seed).choices(adapters, weights, k=count))


def tokens_per_second(
    llm: LLM, requests: Sequence[LoRARequest | None], num_tokens: int, seed: int
) -> tuple[float, float]:
    """Of CPU time and by the clock, of one batch of random prompts; loads of adapters that aren't
    there count, and that their digests are found doesn't: the platform knows them beforehand.
    """
    for request in requests:
        if request is not None:
            request.ref()
    draw, vocab = random.Random(seed), llm.core.facts.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(_PROMPT_TOKENS)] for _ in requests]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started, clock = time.process_time(), time.perf_counter()
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        use_tqdm=False,
        lora_request=list(requests),
    )
    tokens = len(requests) * num_tokens
    return tokens / (time.process_time() - started), tokens / (time.perf_counter() - clock)


@dataclass(frozen=True, slots=True)
class Case:
    """One case of one turn: tokens a second of CPU time and by the clock.

    Attributes:
        speed: its own.
        of_off: over what was run before it and after it, with adapters turned off.
    """

    speed: tuple[float, float]
    of_off: tuple[float, float]

    @classmethod
    def between(
        cls,
        previous_off: tuple[float, float],
        measured: tuple[float, float],
        off_after: tuple[float, float],
    ) -> Self:
        """A case, and what was run before it and after it."""
        cpu, clock = (
            2 * seconds / sum(off)
            for seconds, *off in zip(measured, previous_off, off_after, strict=True)
        )
        return cls(measured, (cpu, clock))


class Batches:
    """Runs batches with one engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def speed(
        self, requests: Sequence[LoRARequest | None], num_tokens: int, seed: int
    ) -> tuple[float, float]:
        """As `tokens_per_second`."""
        return tokens_per_second(self._llm, requests, num_tokens, seed)


def _engine(model: Path, **options: object) -> contextlib.AbstractContextManager[Apart]:
    return Apart.started(
        Batches, str(model), skip_tokenizer_init=True, enable_prefix_caching=False, **options
    )


def run(model: Path, args: argparse.Namespace, folder: Path) -> dict[str, list[Case]]:
    """What comes of each turn, by case."""
    wide = [write_adapter(folder / "wide", model, 16, 0)]
    narrow = [
        write_adapter(folder / str(i), model, 8, 1 + i)
        for i in range(max(args.adapters, default=0))
    ]
    with (
        _engine(model, max_num_seqs=args.batch, enable_lora=False) as off,
        _engine(model, max_num_seqs=args.batch, enable_lora=False) as off_again,
        _engine(model, max_num_seqs=args.batch, max_loras=args.resident) as on,
    ):
        cases: dict[str, tuple[Apart, Sequence[LoRARequest], str]] = {
            "off": (off_again, [], ""),
            "on_unused": (on, [], ""),
            "one_rank_16": (on, wide, "uniform"),
        }
        for law in ("uniform", "zipf"):
            for count in args.adapters:
                cases[f"{count}_rank_8_{law}"] = on, narrow[:count], law
        results: dict[str, list[Case]] = {name: [] for name in cases}
        for turn in range(args.turns + 1):

            def speed(
                engine: Apart,
                adapters: Sequence[LoRARequest] = (),
                law: str = "",
                turn: int = turn,
            ) -> tuple[float, float]:
                requests = chosen(adapters, args.requests, law, turn)
                speeds: tuple[float, float] = engine.call("speed", requests, args.tokens, turn)
                return speeds

            previous_off = speed(off)
            for name, case in cases.items():
                measured, off_after = speed(*case), speed(off)
                if turn:  # the first is to warm up
                    results[name].append(Case.between(previous_off, measured, off_after))
                previous_off = off_after
    return results


def summarize(results: dict[str, list[Case]], counts: Sequence[int]) -> dict[str, float]:
    """Medians over the turns; `counts`: of adapters, the least and most of which are compared."""
    row: dict[str, float] = {}
    for name, turns in results.items():
        row[f"{name}_tok_s"] = round(_median(turn.speed[0] for turn in turns), 1)
        row[f"{name}_of_off"] = round(_median(turn.of_off[0] for turn in turns), 3)
        row[f"{name}_of_off_by_the_clock"] = round(_median(turn.of_off[1] for turn in turns), 3)
    for law in ("uniform", "zipf") if len(counts) > 1 else ():
        few, many = (results[f"{count}_rank_8_{law}"] for count in (min(counts), max(counts)))
        for index, how in enumerate(("", "_by_the_clock")):
            of_few = _median(
                more.of_off[index] / less.of_off[index]
                for more, less in zip(many, few, strict=True)
            )
            row[f"{max(counts)}_of_{min(counts)}_{law}{how}"] = round(of_few, 3)
    return row


def _median(values: Iterable[float]) -> float:
    return percentile(list(values), 50)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lora", description="What LoRA adapters cost."
    )
    parser.add_argument("--model", required=True, type=Path, help="the model's folder")
    parser.add_argument("--batch", type=int, default=16, help="requests that run at once")
    parser.add_argument("--requests", type=int, default=64, help="requests of a turn")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each request")
    parser.add_argument("--turns", type=int, default=5, help="how often each case is run")
    parser.add_argument(
        "--adapters", type=int, nargs="*", default=[10, 100, 1000], help="how many of rank 8"
    )
    parser.add_argument(
        "--resident", type=int, default=256, help="adapters that the device has room for"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        row = summarize(run(args.model, args, Path(folder)), args.adapters)
    print(table(row))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
