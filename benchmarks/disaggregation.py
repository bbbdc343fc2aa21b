"""Prefill and decode apart on one core each, beside one engine with both cores.

    python -m benchmarks.disaggregation MODEL [--tokens 512] [--prompts 30]

One sequence is decoded all the time while prompts come one after the other. Apart, a process on the
first core computes the prompts and another one on the second core reads their blocks from it by TCP
and answers. Prints JSON: milliseconds of the sequence's gaps and of the prompts' first tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from benchmarks.statistics import spread_ms
from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up

STREAM, PROMPT = "stream", "prompt"
NUM_OUTPUT_TOKENS = 4


def make_core(args: argparse.Namespace, cores: set[int], **settings: Any) -> EngineCore:
    """A warm engine on those cores of the processor."""
    os.sched_setaffinity(0, cores)
    core = EngineCore(
        EngineConfig(
            model=args.model,
            dtype=args.dtype,
            skip_tokenizer_init=True,
            num_threads=len(cores),
            max_model_len=8 * args.tokens,
            **settings,
        )
    )
    warm_up(core)
    return core


def handover_settings(role: str) -> dict[str, Any]:
    """Settings of one side."""
    return {
        "kv_offloading_size": 2.0,
        "kv_offloading_backend": "tcp://127.0.0.1:0",
        "kv_transfer_config": {"kv_role": role},
    }


def request(core: EngineCore, args: argparse.Namespace, number: int) -> EngineRequest:
    """A prompt; number 0 is the sequence that is decoded all the time."""
    num_tokens = args.tokens if number else 16
    max_tokens = NUM_OUTPUT_TOKENS if number else 7 * args.tokens
    return EngineRequest(
        request_id=f"{PROMPT}{number}" if number else STREAM,
        gateway_id="",
        prompt_token_ids=random.Random(number).choices(range(core.facts.vocab_size), k=num_tokens),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
    )


def prefill(connection: Connection, args: argparse.Namespace) -> None:
    """Compute the prompts whose numbers come, until None does."""
    core = make_core(args, {args.cores[0]}, **handover_settings("kv_producer"))
    handover = core.kv_handover
    if handover is None or core.scheduler.kv_connector is None:
        raise TypeError("The engine hands no blocks over.")
    connection.send(handover.address)
    while (number := connection.recv()) is not None:
        message = request(core, args, number)
        one_token = msgspec.structs.replace(message.sampling, max_tokens=1)
        core.add_request(msgspec.structs.replace(message, sampling=one_token))
        while core.has_work:
            core.step()
        core.scheduler.kv_connector.wait_until_saved(10)
        connection.send(number)
    core.shutdown()


def measure(core: EngineCore, args: argparse.Namespace, prefiller: Connection | None) -> Any:
    """Gaps and first tokens; `prefiller` computes the prompts, None: the engine does."""
    address = prefiller.recv() if prefiller is not None else ""
    gaps: list[float] = []
    first_tokens: list[float] = []
    core.add_request(request(core, args, 0))
    core.step()
    number, started, last, is_pending = 0, 0.0, time.perf_counter(), False
    while len(first_tokens) < args.prompts:
        if not is_pending:
            number += 1
            started, is_pending = time.perf_counter(), True
            if prefiller is not None:
                prefiller.send(number)
            else:
                core.add_request(request(core, args, number))
        if prefiller is not None and prefiller.poll():
            message = request(core, args, prefiller.recv())
            core.add_request(msgspec.structs.replace(message, prefilled=True, kv_peer=address))
        for delta in core.step():
            now = time.perf_counter()
            if delta.request_id == STREAM:
                gaps.append(now - last)
                last = now
            elif delta.start == 0 and delta.token_ids:
                first_tokens.append(now - started)
            if delta.finish_reason and delta.request_id != STREAM:
                is_pending = False
        if STREAM not in core.requests:
            core.add_request(request(core, args, 0))
    if prefiller is not None:
        prefiller.send(None)
    stats = core.snapshot()
    return {
        **spread_ms("gap", gaps),
        **spread_ms("ttft", first_tokens),
        "loaded_tokens": stats.external_prefix_cache_hits_total,
    }


def run(connection: Connection, args: argparse.Namespace, is_apart: bool) -> None:
    """Measure in a process of its own, which sends the result."""
    if not is_apart:
        connection.send(measure(make_core(args, set(args.cores)), args, None))
        return
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=(theirs, args))
    process.start()
    core = make_core(args, {args.cores[1]}, **handover_settings("kv_consumer"))
    connection.send(measure(core, args, ours))
    process.join()


def main() -> int:
    """Measure both, in turns."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregation", description=__doc__
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1])
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    report: dict[str, Any] = {}
    for name, is_apart in (("together", False), ("apart", True)):
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, args, is_apart))
        process.start()
        theirs.close()
        report[name] = ours.recv()
        process.join()
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
