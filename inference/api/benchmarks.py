"""Runs a benchmark: a closed loop of requests through the engine client, level by level.

It is `bench serve` without HTTP: a worker admits, sends and reads each request as a gateway does.
The requests belong to the benchmark tenant, under which the ledger lists them, and cost nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any

from benchmarks.http_load import Results, Sample
from benchmarks.workload import Job as PromptJob
from benchmarks.workload import random_jobs
from common.db import run_in_db_thread
from common.task_queue import BROKER_ERRORS
from engine.contract.errors import EngineFault, QuireError
from engine.contract.sampling_params import SamplingParams
from history.benchmarks import (
    MAX_LEVELS,
    TENANT,
    BenchmarkRun,
    claim_benchmark,
    complete_benchmark,
    is_benchmark_open,
    save_results,
)
from inference.generation.generation import Generation
from inference.generation.model_resolution import resolve_model
from inference.request.context import RequestContext, RequestRecord, new_id
from inference.request.job import Job, ResolvedModel
from inference.work import Lease, lease_seconds, send_job
from metering.rules import BENCHMARK
from tenants.authentication import Caller, caller_of_tenant

logger = logging.getLogger(__name__)

KIND = "benchmark"
#: Seconds between two checks whether the benchmark was stopped.
POLL_INTERVAL_S = 1.0


def enqueue_benchmark(public_id: str) -> None:
    """Notify workers of a benchmark. Without Redis they find it by themselves, later."""
    try:
        send_job(KIND, public_id)
    except BROKER_ERRORS as error:
        logger.warning("benchmark %s waits for the next sweep: %s", public_id, error)


async def run_benchmark(public_id: str, owner: str) -> None:
    """Run the remaining levels of a benchmark, unless another worker does."""
    run = await run_in_db_thread(
        claim_benchmark, public_id=public_id, owner=owner, seconds=lease_seconds()
    )
    if run is None:
        return
    async with Lease(run, owner):
        work = asyncio.create_task(_run_levels(run))
        try:
            while not work.done() and await run_in_db_thread(is_benchmark_open, run):
                await asyncio.wait([work], timeout=POLL_INTERVAL_S)
        finally:
            work.cancel()
            await asyncio.wait([work])
        if not work.cancelled():
            await run_in_db_thread(complete_benchmark, run, work.result())


async def _run_levels(run: BenchmarkRun) -> str:
    """Run all levels without results; return the error that ended them, or ""."""
    results = list(run.results)
    try:
        caller = await run_in_db_thread(caller_of_tenant, TENANT)
        model = await resolve_model(_context(caller, run), run.served_model.name)
        if model.fallback_for:
            return f"No replica of {model.fallback_for} is ready."
        for index in range(len(results), len(run.levels)):
            row = await _run_level(run, index, caller, model)
            if not row["completed"]:
                return str(row["errors"][0])
            results.append(row)
            await run_in_db_thread(save_results, run, results)
    except QuireError as error:
        return error.message
    return ""


async def _run_level(
    run: BenchmarkRun, index: int, caller: Caller, model: ResolvedModel
) -> dict[str, Any]:
    """Results of a level: `run.levels[index]` requests in flight until all are done."""
    concurrency = run.levels[index]
    queue = random_jobs(
        max(run.num_requests, concurrency),
        model.vocab_size,
        (run.input_tokens, run.input_tokens),
        (run.output_tokens, run.output_tokens),
        # New prompts for each level of each run, so that none is served from a prefix cache.
        seed=run.pk * MAX_LEVELS + index,
    )
    measured = Results()

    async def work() -> None:
        while queue:
            try:
                measured.samples.append(await _measure(queue.pop(), run, caller, model))
            except QuireError as error:
                measured.failures.append(error.message)

    started_at = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    measured.seconds = time.perf_counter() - started_at
    errors = sorted(set(measured.failures))[:3]
    row = measured.row() if measured.samples else {"completed": 0}
    # JSON has no NaN, which the time between tokens of a single output token is.
    figures = {name: None if value != value else value for name, value in row.items()}
    return {"concurrency": concurrency, **figures, "errors": errors}


async def _measure(
    prompt: PromptJob, run: BenchmarkRun, caller: Caller, model: ResolvedModel
) -> Sample:
    """Send one request and read it to its end."""
    ctx = _context(caller, run)
    started_at = time.perf_counter()
    job = Job(
        ctx=ctx,
        request_id=ctx.request_id,
        endpoint=BENCHMARK,
        model=model,
        prompts=[prompt.prompt_token_ids],
        sampling=SamplingParams(temperature=0.0, max_tokens=prompt.output_tokens, ignore_eos=True),
        stream=True,
    )
    await job.check()
    generation = await Generation.start(job)
    stamps: list[float] = []
    try:
        while not generation.finished:
            if any(delta.token_ids for delta in await generation.next()):
                stamps.append(time.perf_counter())
    finally:
        generation.release()
    if generation.usage.completion_tokens < prompt.output_tokens:  # an operator aborted it
        raise EngineFault(
            f"A request ended after {generation.usage.completion_tokens} of {prompt.output_tokens} "
            "tokens."
        )
    return Sample(
        ttft=stamps[0] - started_at,
        gaps=[later - earlier for earlier, later in itertools.pairwise(stamps)],
        tokens=generation.usage.completion_tokens,
        total=time.perf_counter() - started_at,
        prompt_tokens=len(prompt.prompt_token_ids),
    )


def _context(caller: Caller, run: BenchmarkRun) -> RequestContext:
    record = RequestRecord(BENCHMARK, model=run.served_model.name, stream=True)
    return RequestContext(caller=caller, request_id=new_id("bench"), record=record)
