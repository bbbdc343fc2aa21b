"""What scheduling costs by itself: `python -m benchmarks.scheduling queue|prefix-cache`.

CPU time of this thread, so that a busy machine counts for little; no model runs, but where
`--model` asks for one to compare with. `queue`: a step with everyone decoding, by how many requests
wait behind. `prefix-cache`: what hashing, looking up and evicting cost a prompt token when nothing
ever hits.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.offline import run_jobs
from benchmarks.statistics import percentile, table
from benchmarks.workload import random_jobs
from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.kv_cache.prefix_cache import BlockHashes, namespace_key
from engine.scheduler import Request, Scheduler, Sequence

_BLOCK = 16
_VOCABULARY = 50_000


def make_scheduler(
    num_blocks: int, token_budget: int, max_num_seqs: int, caching: bool
) -> Scheduler:
    """A scheduler without a model."""
    config = EngineConfig(
        max_num_seqs=max_num_seqs, block_size=_BLOCK, enable_prefix_caching=caching
    )
    return Scheduler(config, num_blocks, token_budget)


def sequence(seq_id: int, prompt: list[int], tenant: str) -> Sequence:
    """One request with one output."""
    message = EngineRequest(
        request_id=str(seq_id),
        gateway_id="",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=10_000),
        tenant=tenant,
    )
    return Sequence(
        seq_id=seq_id,
        request=Request(message),
        index=0,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_output_tokens=10_000,
        seed=0,
        block_hashes=BlockHashes(namespace_key(tenant)),
    )


def step(scheduler: Scheduler) -> list[Sequence]:
    """Schedule a step and sample for whoever caught up, as a model would."""
    _, scheduled = scheduler.schedule()
    sampled = [
        sequence for sequence in scheduled if sequence.num_computed_tokens == sequence.num_tokens
    ]
    for sequence in sampled:
        sequence.token_ids.append(7)
        scheduler.waiting.charge_output(sequence)
    return sampled


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time that this thread spends on it."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def queue(running: int, waiting: int, tenants: int, steps: int) -> dict[str, Any]:
    """A step's scheduling with `running` decodes while `waiting` requests of `tenants` queue.

    Before every step one sequence ends, so that another one starts and the queue is in use.
    """
    scheduler = make_scheduler(running * 64, running * 8, running, caching=True)
    rng = random.Random(0)
    prompts = [[rng.randrange(_VOCABULARY) for _ in range(8)] for _ in range(100)]
    for index in range(running + waiting):
        scheduler.add(sequence(index, prompts[index % 100], f"t{index % tenants}"))
    step(scheduler)  # starts everyone
    spent = []
    for _ in range(steps):
        scheduler.finish(scheduler.running[0], "stop")
        spent.append(cpu_seconds(lambda: step(scheduler)))
    return {
        "benchmark": "queue",
        "running": running,
        "waiting": waiting,
        "tenants": tenants,
        "steps": len(spent),
        "step_p50_us": round(percentile(spent, 50) * 1e6, 1),
        "step_p90_us": round(percentile(spent, 90) * 1e6, 1),
    }


def prefill_seconds(prompts: list[list[int]], caching: bool) -> float:
    """CPU seconds of scheduling these prompts, each for one token, through a small pool."""
    scheduler = make_scheduler(512, 512, 64, caching)
    for index, prompt in enumerate(prompts):
        scheduler.add(sequence(index, prompt, "t"))

    def run() -> None:
        while scheduler.has_work:
            for sequence in step(scheduler):
                scheduler.finish(sequence, "length")

    return cpu_seconds(run)


def prefix_cache(num_prompts: int, input_len: int, repeats: int) -> dict[str, Any]:
    """CPU time a prompt token of scheduling with and without caching, when nothing ever hits."""
    rng = random.Random(0)
    prompts = [[rng.randrange(_VOCABULARY) for _ in range(input_len)] for _ in range(num_prompts)]
    best = {
        caching: min(prefill_seconds(prompts, caching) for _ in range(repeats))
        for caching in (False, True)
    }
    tokens = num_prompts * input_len
    return {
        "benchmark": "prefix-cache",
        "prompts": num_prompts,
        "input_len": input_len,
        "without_us_per_token": round(best[False] / tokens * 1e6, 4),
        "with_us_per_token": round(best[True] / tokens * 1e6, 4),
        "cost_us_per_token": round((best[True] - best[False]) / tokens * 1e6, 4),
    }


def compare_with_model(row: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """The row with what the model itself takes for a prompt token, and the cost as a part of it."""
    from engine.core.engine_core import EngineCore

    core = EngineCore(config)
    vocabulary, length = core.facts.vocab_size, row["input_len"]
    run_jobs(core, random_jobs(2, vocabulary, (length, length), (1, 1), seed=0))
    jobs = random_jobs(8, vocabulary, (length, length), (1, 1), seed=1)
    seconds = run_jobs(core, jobs)["seconds"]
    model = seconds / (8 * length) * 1e6
    percent = 100 * row["cost_us_per_token"] / model
    return {**row, "model_us_per_token": round(model, 2), "cost_percent": round(percent, 3)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    queues = kinds.add_parser("queue", help="a step, by how many requests wait")
    queues.add_argument("--running", type=int, default=256)
    queues.add_argument("--waiting", default="0,1000,100000", help="numbers with commas")
    queues.add_argument("--tenants", type=int, default=10)
    queues.add_argument("--steps", type=int, default=60)
    caches = kinds.add_parser("prefix-cache", help="caching when nothing hits")
    caches.add_argument("--num-prompts", type=int, default=300)
    caches.add_argument("--input-len", type=int, default=512)
    caches.add_argument("--repeats", type=int, default=5)
    caches.add_argument("--model", help="folder of a model to compare with")
    args = parser.parse_args()
    if args.kind == "queue":
        for waiting in map(int, args.waiting.split(",")):
            print(table(queue(args.running, waiting, args.tenants, args.steps)), end="\n\n")
        return
    row = prefix_cache(args.num_prompts, args.input_len, args.repeats)
    if args.model:
        row = compare_with_model(row, EngineConfig(model=args.model, max_model_len=2048))
    print(table(row))


if __name__ == "__main__":
    main()
