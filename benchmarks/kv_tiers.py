"""First tokens from a disk tier: cold, and after SIGKILL and a restart.

    python -m benchmarks.kv_tiers MODEL --folder DIR [--tokens 4096] [--rounds 3]

Each measurement is in a process of its own. One computes a prompt, writes its KV blocks and kills
itself; the next one has the same prompt. With `--idle` also how long decode steps of one sequence
take with a tier and without, in turns; with `--writing` the gaps of a stream beside prompts whose
blocks are written, and without a tier; with `--checks` the parts of a block's restore; with
`--lengths` first tokens of shorter prompts, restored and computed. Prints JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up
from engine.kv_transfer.block_buffers import StoredPayload
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.offloading_connector import OffloadingConnector

DECODES = 64
#: Of blocks that are walked over: more than the processor's caches hold.
COLD_BYTES = 2**28


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
    gc.collect()
    gc.freeze()  # as a replica does
    return core


def add_request(
    core: EngineCore, rng: random.Random, num_tokens: int, max_tokens: int, request_id: str = "r"
) -> None:
    """Add a request for greedy tokens after a random prompt."""
    core.add_request(
        EngineRequest(
            request_id=request_id,
            gateway_id="",
            prompt_token_ids=rng.choices(range(core.facts.vocab_size), k=num_tokens),
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        )
    )


def first_token(core: EngineCore, num_tokens: int) -> dict[str, Any]:
    """Seconds to the first token of a prompt, and the tokens that are said."""
    rng, started = random.Random(0), time.perf_counter()
    add_request(core, rng, num_tokens, 4)
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
    for number in range(2 * args.rounds + 2):
        for tier, core in cores.items():
            add_request(core, random.Random(number), 16, DECODES)
            core.step()
            started = time.perf_counter()
            while core.has_work:
                core.step()
            times[tier].append((time.perf_counter() - started) * 1000 / (DECODES - 1))
    with_tier, without = (statistics.median(times[tier]) for tier in (True, False))
    return {"with_ms": with_tier, "without_ms": without, "ratio": with_tier / without}


def writing_cost(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a stream's gaps, 99th percentile, beside prompts with a tier that writes all
    their blocks and without one; in turns.
    """
    cores = {tier: make_core(args, tier=tier) for tier in (True, False)}
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * args.rounds):
        order = list(cores.items())
        for tier, core in order if number % 2 else reversed(order):
            rng = random.Random(number)

            add_request(core, rng, 16, args.tokens // 2, "stream")
            last, num_prompts = 0.0, 0
            while "stream" in core.requests:
                if len(core.requests) == 1:
                    num_prompts += 1
                    add_request(core, rng, args.tokens // 4, 1, f"prompt{num_prompts}")
                if any(delta.request_id == "stream" for delta in core.step()):
                    now = time.perf_counter()
                    if last:
                        gaps[tier].append((now - last) * 1000)
                    last = now
            for name in list(core.requests):
                core.abort(name)
    with_tier, without = (statistics.quantiles(gaps[tier], n=100)[98] for tier in (True, False))
    return {
        "with_p99_ms": with_tier,
        "without_p99_ms": without,
        "ratio": with_tier / without,
        "gaps": len(gaps[True]),
    }


def checks(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per block of a restore and of its parts: from disk past the page cache, opening
    (AES-GCM decrypts and authenticates in one) and checksum in host memory, best of several; and
    copying into the KV cache with and without checking, medians of walks over more blocks than the
    processor's caches hold, in turns.
    """
    core = make_core(args)
    connector = core.scheduler.kv_connector
    if not isinstance(connector, OffloadingConnector) or connector.storage is None:
        raise TypeError("The engine has no disk tier.")
    tier, buffers = connector.storage.tier, connector._buffers
    [payload], key = buffers.read(0, 0), bytes(32)
    cipher = tier._cipher  # type: ignore[attr-defined]
    nonce, sealed = cipher.seal(key, payload, "")
    num_blocks = min(COLD_BYTES // buffers.block_bytes, core.capacity.num_blocks)
    host = HostTier(COLD_BYTES)
    keys = [number.to_bytes(32, "little") for number in range(num_blocks)]
    host.put([(one, payload.copy()) for one in keys], "")

    def best_ms(run: Callable[[], object]) -> float:
        times = []
        for _ in range(50):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1000)
        return min(times)

    def walk_ms(write: Callable[[int, StoredPayload], object]) -> float:
        started = time.perf_counter()
        for block_id, one in enumerate(keys):
            if (stored := host.read(one)) is not None:
                write(block_id, stored)
        return (time.perf_counter() - started) * 1000 / num_blocks

    unchecked, verified = [], []
    for _ in range(9):
        unchecked.append(walk_ms(lambda block, stored: buffers.write(0, block, [stored.payload])))
        verified.append(walk_ms(lambda block, stored: buffers.write_verified(0, block, [stored])))
    read_and_open = min(tier.measure_read() for _ in range(50)) * 1000
    opening = best_ms(lambda: cipher.open(key, nonce, sealed, ""))
    checksum = best_ms(lambda: StoredPayload.checksum_of(payload, 1))
    copying, checked = statistics.median(unchecked), statistics.median(verified)
    return {
        "block_bytes": buffers.block_bytes,
        "read_ms": read_and_open - opening,
        "open_ms": opening,
        "checksum_ms": checksum,
        "copy_ms": copying,
        "checked_copy_ms": checked,
        "checks_part_of_host_restore": 1 - copying / checked,
        "checks_part_of_disk_restore": (opening + checksum + checked - copying)
        / (read_and_open + checksum + checked),
    }


def by_length(args: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds to first tokens of prompts of 64 tokens and more, in turns: computed without a tier,
    restored from one whatever it has measured, and as it decides by what it has measured. Medians,
    and the 95th percentile of the last over the better of the others, by their 95th percentiles and
    medians; the same of restoring once more shows how much of that is noise. Computing is left out
    once it is seen to be slower by far.
    """
    core, without = make_core(args), make_core(args, tier=False)
    connector = core.scheduler.kv_connector
    if not isinstance(connector, OffloadingConnector) or connector.storage is None:
        raise TypeError("The engine has no disk tier.")
    decision = connector._loads_host, connector._loads_storage

    def from_tier(length: int, loads: tuple[bool, bool]) -> float:
        core.scheduler.kv.reset_prefix_cache()
        connector.host.clear()
        connector._loads_host, connector._loads_storage = loads
        seconds: float = first_token(core, length)["seconds"]
        return seconds

    rows = []
    for length in args.lengths or [2**power for power in range(6, args.tokens.bit_length())]:
        from_tier(length, (True, True))
        connector.storage.flush()
        os.sync()
        computed, restored, again, decided = [list[float]() for _ in range(4)]
        for number in range(args.rounds):
            if number < 3 or min(computed) < 2 * max(restored):
                without.scheduler.kv.reset_prefix_cache()
                computed.append(first_token(without, length)["seconds"])
            turns = [(restored, (True, True)), (again, (True, True)), (decided, decision)]
            for times, loads in turns[number % 3 :] + turns[: number % 3]:
                times.append(from_tier(length, loads))
        slow, better = (
            percentile_95(decided),
            min(percentile_95(computed), percentile_95(restored)),
        )
        rows.append(
            {
                "tokens": length,
                "computed_s": statistics.median(computed),
                "restored_s": statistics.median(restored),
                "decided_s": statistics.median(decided),
                "decided_p95_s": slow,
                "p95_over_better": slow / better,
                "again_p95_over_better": percentile_95(again) / better,
                "p95_over_median": slow
                / min(statistics.median(computed), statistics.median(restored)),
            }
        )
    return rows


def percentile_95(times: list[float]) -> float:
    """The 95th percentile, interpolated."""
    return statistics.quantiles(times, n=20, method="inclusive")[18]


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
    parser.add_argument("--writing", action="store_true", help="measure gaps beside writes, too")
    parser.add_argument("--checks", action="store_true", help="measure parts of a restore, too")
    parser.add_argument(
        "--lengths", type=int, nargs="*", help="measure prompts of these lengths (default: all)"
    )
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        run_once(args)
    report: dict[str, Any] = {}
    if args.lengths is None:
        report["first_token"] = [measure_round(args) for _ in range(args.rounds)]
    if args.idle:
        report["idle"] = idle_cost(args)
    if args.writing:
        report["writing"] = writing_cost(args)
    if args.lengths is not None:
        report["by_length"] = by_length(args)
    if args.checks:
        report["checks"] = checks(args)
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
