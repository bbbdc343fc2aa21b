"""First tokens from a disk tier: cold, and after SIGKILL and a restart.

    python -m benchmarks.kv_tiers MODEL --folder DIR [--tokens 4096] [--rounds 3]

Each measurement is in a process of its own. One computes a prompt, writes its KV blocks and kills
itself; the next one has the same prompt. With `--idle` also how long decode steps of one sequence
take with a tier and without, in turns. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up
from engine.kv_transfer.offloading_connector import OffloadingConnector

DECODES = 64


def make_core(args: argparse.Namespace, *, tier: bool = True) -> EngineCore:
    """A warm engine; its pool holds the prompt and a little more."""
    settings: dict[str, Any] = {}
    if tier:
        settings = {"kv_offloading_size": args.gib, "kv_offloading_backend": args.folder}
    core = EngineCore(
        EngineConfig(
            model=args.model,
            dtype=args.dtype,
            skip_tokenizer_init=True,
            max_model_len=args.tokens + 2 * DECODES,
            num_gpu_blocks_override=args.tokens // 16 + 64,
            **settings,
        )
    )
    warm_up(core)
    return core


def first_token(core: EngineCore, num_tokens: int) -> dict[str, Any]:
    """Seconds to the first token of a prompt, and the tokens that are said."""
    prompt = random.Random(0).choices(range(core.facts.vocab_size), k=num_tokens)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    started = time.perf_counter()
    core.add_request(
        EngineRequest(request_id="r", gateway_id="", prompt_token_ids=prompt, sampling=sampling)
    )
    seconds, tokens = 0.0, []
    while core.has_work:
        for delta in core.step():
            seconds = seconds or time.perf_counter() - started
            tokens += delta.token_ids
    return {"seconds": seconds, "tokens": tokens}


def run_once(args: argparse.Namespace) -> None:
    """Print one measurement, and die once the blocks are written."""
    core = make_core(args)
    result = first_token(core, args.tokens)
    connector = core.scheduler.kv_connector
    if not isinstance(connector, OffloadingConnector) or connector.storage is None:
        raise TypeError("The engine has no disk tier.")
    connector.storage.flush()
    result["loaded_tokens"] = connector.num_matched_tokens
    print(json.dumps(result), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def measure_round(args: argparse.Namespace) -> dict[str, Any]:
    """Cold and restarted first tokens, with an empty folder at first."""
    for path in Path(args.folder).glob("*.kv"):
        path.unlink()
    command = [sys.executable, "-m", "benchmarks.kv_tiers", *sys.argv[1:], "--once"]
    cold, warm = (
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
        for _ in range(2)
    )
    if cold["tokens"] != warm["tokens"]:
        raise ValueError(f"The tokens differ: {cold['tokens']}, {warm['tokens']}.")
    return {
        "cold_s": cold["seconds"],
        "restarted_s": warm["seconds"],
        "ratio": warm["seconds"] / cold["seconds"],
        "loaded_tokens": warm["loaded_tokens"],
    }


def idle_cost(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a decode step with a tier and without; medians of runs in turns."""
    cores = {tier: make_core(args, tier=tier) for tier in (True, False)}
    times: dict[bool, list[float]] = {True: [], False: []}
    sampling = SamplingParams(temperature=0, max_tokens=DECODES, ignore_eos=True)
    for number in range(2 * args.rounds + 2):
        for tier, core in cores.items():
            prompt = random.Random(number).choices(range(core.facts.vocab_size), k=16)
            core.add_request(
                EngineRequest(
                    request_id="r", gateway_id="", prompt_token_ids=prompt, sampling=sampling
                )
            )
            core.step()
            started = time.perf_counter()
            while core.has_work:
                core.step()
            times[tier].append((time.perf_counter() - started) * 1000 / (DECODES - 1))
    with_tier, without = (statistics.median(times[tier]) for tier in (True, False))
    return {"with_ms": with_tier, "without_ms": without, "ratio": with_tier / without}


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_tiers", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--folder", required=True, help="empty folder for the tier")
    parser.add_argument("--gib", type=float, default=4.0, help="bytes of the tier (default: 4 GiB)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", action="store_true", help="measure decode steps, too")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        run_once(args)
    report: dict[str, Any] = {"first_token": [measure_round(args) for _ in range(args.rounds)]}
    if args.idle:
        report["idle"] = idle_cost(args)
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
