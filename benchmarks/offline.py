"""Latency and throughput of the engine in this process, without gateway or Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.ceilings import Ceilings
from benchmarks.statistics import percentile, spread_ms
from benchmarks.workload import Job, random_jobs
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore

#: Called with a fraction in [0, 1].
OnProgress = Callable[[float], None]


def run_jobs(
    core: EngineCore, jobs: list[Job], on_progress: OnProgress | None = None
) -> dict[str, Any]:
    """Run all jobs at once, greedily and past EOS. Returns seconds, TTFTs, ITLs and step times."""
    num_tokens, total_tokens = 0, sum(job.output_tokens for job in jobs)
    last_token: dict[str, float] = {}
    ttft: list[float] = []
    itl: list[float] = []
    steps: list[float] = []
    start = time.perf_counter()
    for index, job in enumerate(jobs):
        core.add_request(
            EngineRequest(
                request_id=str(index),
                gateway_id="",
                prompt_token_ids=job.prompt_token_ids,
                sampling=SamplingParams(
                    temperature=0, max_tokens=job.output_tokens, ignore_eos=True
                ),
            )
        )
    while core.has_work:
        step_start = time.perf_counter()
        deltas = core.step()
        now = time.perf_counter()
        steps.append(now - step_start)
        for delta in deltas:
            if delta.request_id in last_token:
                itl.append(now - last_token[delta.request_id])
            else:
                ttft.append(now - start)
            last_token[delta.request_id] = now
            num_tokens += len(delta.token_ids)
        if on_progress:
            on_progress(num_tokens / total_tokens)
    return {
        "seconds": time.perf_counter() - start,
        "ttft": ttft,
        "itl": itl,
        "steps": steps,
    }


def latency(
    core: EngineCore,
    ceilings: Ceilings,
    batch_size: int,
    input_len: int,
    output_len: int,
    repeats: int,
    warmups: int = 1,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Time of one batch from submission to last token, and its decode speed.

    `decode_bandwidth_percent` is the weights and KV that every decode step must read, over the time
    that the steps took, against the measured read bandwidth.
    """
    vocab = core.facts.vocab_size
    totals: list[float] = []
    decode: list[float] = []
    ttft: list[float] = []
    itl: list[float] = []
    for seed in range(repeats + warmups):
        core.reset_prefix_cache()
        lengths = (input_len, input_len), (output_len, output_len)
        result = run_jobs(core, random_jobs(batch_size, vocab, *lengths, seed=seed))
        if on_progress:
            on_progress((seed + 1) / (repeats + warmups))
        if seed < warmups:
            continue
        totals.append(result["seconds"])
        ttft += result["ttft"]
        itl += result["itl"]
        decode.append(percentile(result["itl"], 50))
    step = percentile(decode, 50)
    kv = core.capacity.kv_bytes_per_token * batch_size * (input_len + output_len / 2)
    moved = core.facts.decode_bytes + kv
    return {
        "benchmark": "latency",
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "repeats": repeats,
        **spread_ms("latency", totals),
        **spread_ms("ttft", ttft),
        **spread_ms("itl", itl),
        "output_tok_s": round(batch_size * output_len / percentile(totals, 50), 2),
        "decode_step_p50_ms": round(step * 1000, 3),
        "decode_tok_s": round(batch_size / step, 2),
        "decode_gb_s": round(moved / step / 1e9, 2),
        "read_bandwidth_gb_s": round(ceilings.read_bandwidth / 1e9, 2),
        "decode_bandwidth_percent": round(100 * moved / step / ceilings.read_bandwidth, 1),
    }


def throughput(
    core: EngineCore,
    ceilings: Ceilings,
    jobs: list[Job],
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """All jobs at once: tokens/s, and the arithmetic against the measured matrix-product rate."""
    warm = random_jobs(2, core.facts.vocab_size, (16, 16), (4, 4), seed=1)
    run_jobs(core, warm)
    core.reset_prefix_cache()
    result = run_jobs(core, jobs, on_progress)
    prompt = sum(len(job.prompt_token_ids) for job in jobs)
    output = sum(job.output_tokens for job in jobs)
    seconds = result["seconds"]
    flops = 2 * core.facts.num_parameters * (prompt + output)
    return {
        "benchmark": "throughput",
        "requests": len(jobs),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "seconds": round(seconds, 3),
        "requests_s": round(len(jobs) / seconds, 2),
        "output_tok_s": round(output / seconds, 1),
        "total_tok_s": round((prompt + output) / seconds, 1),
        "gflop_s": round(flops / seconds / 1e9, 1),
        "sgemm_gflop_s": round(ceilings.sgemm_flops / 1e9, 1),
        "sgemm_percent": round(100 * flops / seconds / ceilings.sgemm_flops, 1),
        **spread_ms("ttft", result["ttft"]),
        **spread_ms("itl", result["itl"]),
        **spread_ms("step", result["steps"]),
    }
