"""Host-side cost of a step, without the model: `python -m benchmarks.host`.

Scheduling, input preparation and output handling of a decode step of many sequences, each part in
microseconds: medians over steps, the model and the sampler left out. A second table has a long
queue waiting behind the running sequences; a third compares prompts that miss the prefix cache with
a cache that is off; a fourth is ready for drafts in a batch in which none can pay.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.statistics import percentile, table
from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.contract.speculative_config import SpeculativeConfig
from engine.core.output_processor import OutputProcessor
from engine.core.stats import EngineStatsCollector
from engine.sampling.sampler import SamplerOutput
from engine.scheduler import Request, Scheduler, Sequence, StepResult
from engine.speculative.drafter import Drafter
from engine.structured_output.manager import StructuredOutputManager
from engine.worker.input_batch import InputBatch
from engine.worker.sampling_io import append_accepted

EOS = 2
BLOCK_SIZE = 16


@dataclass(slots=True)
class Parts:
    """Seconds of each step's parts."""

    schedule: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)
    append_tokens: list[float] = field(default_factory=list)
    output: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Medians in microseconds, and their sum."""
        parts = {
            "schedule_us": self.schedule,
            "prepare_inputs_us": self.prepare,
            "append_tokens_us": self.append_tokens,
            "handle_output_us": self.output,
        }
        row = {name: round(1e6 * percentile(times, 50), 1) for name, times in parts.items()}
        row["total_us"] = round(sum(row.values()), 1)
        return row


class Host:
    """An engine without a model: every sampled token is the same."""

    def __init__(self, running: int, prompt_tokens: int, **settings: Any) -> None:
        longest = prompt_tokens + 4096
        blocks = (running + 2) * -(-longest // BLOCK_SIZE)
        self.config = EngineConfig(
            model="", block_size=BLOCK_SIZE, max_num_seqs=running, **settings
        )
        self.scheduler = Scheduler(self.config, blocks, running * prompt_tokens + running)
        self.batch = InputBatch(running, longest, BLOCK_SIZE)
        structured = StructuredOutputManager(None, 1000, [EOS])
        counters = EngineStatsCollector(self.scheduler)
        self.outputs = OutputProcessor(self.scheduler, structured, counters, {}, [EOS])
        self._count = 0
        self.drafter: Drafter | None = None

    def be_ready_for_drafts(self) -> None:
        """Have drafts asked for in each step, and none pay: a wider step takes as much longer."""
        drafter = Drafter(SpeculativeConfig(method="ngram"), 1 << 20)
        for width in (1, 4096):
            for _ in range(100):
                drafter.costs.record(width, 0.001 * width)
        self.drafter = self.scheduler.drafts.source = drafter

    def add(self, prompt_token_ids: list[int], max_tokens: int = 4000) -> Sequence:
        """Queue a request."""
        message = EngineRequest(
            request_id=str(self._count),
            gateway_id="",
            prompt_token_ids=prompt_token_ids,
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
        )
        request = Request(message)
        sequence = Sequence(
            seq_id=self._count,
            request=request,
            index=0,
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            max_output_tokens=max_tokens,
            seed=0,
        )
        request.sequences.append(sequence)
        self._count += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self, parts: Parts) -> None:
        """One step, its parts timed."""
        start = time.perf_counter()
        plan, scheduled = self.scheduler.schedule()
        scheduled_at = time.perf_counter()
        self.batch.apply_plan(plan)
        inputs = self.batch.prepare_inputs(plan)
        self.batch.token_ids(inputs)
        prepared_at = time.perf_counter()
        token_ids = [7] * len(inputs.sampled)
        self.batch.append_sampled(inputs, token_ids)
        result = StepResult([[token_id] for token_id in token_ids])
        if inputs.drafted:  # now and then some are tried
            drawn = torch.full((len(token_ids) + sum(map(len, plan.drafts.values())),), 7)
            output = SamplerOutput(drawn, [])
            append_accepted(self.batch, inputs, drawn.tolist(), output, result)
        appended_at = time.perf_counter()
        if self.drafter is not None:
            self.drafter.record_tracking(result.tracking_seconds)
        self.outputs.process_outputs(plan, scheduled, result)
        if self.drafter is not None:
            self.drafter.note_step(plan, 0.001 * plan.num_tokens)
        done_at = time.perf_counter()
        parts.schedule.append(scheduled_at - start)
        parts.prepare.append(prepared_at - scheduled_at)
        parts.append_tokens.append(appended_at - prepared_at)
        parts.output.append(done_at - appended_at)


def decode(
    running: int, waiting: int, steps: int, prompt_tokens: int = 100, *, drafts: bool = False
) -> dict[str, float]:
    """Decode steps of `running` sequences while `waiting` others are queued."""
    host = Host(running, prompt_tokens)
    if drafts:
        host.be_ready_for_drafts()
    for number in range(running):
        host.add([10 + number % 900] * prompt_tokens)
    host.step(Parts())
    for _ in range(waiting):
        host.add([5] * 8)
    for _ in range(8):
        host.step(Parts())
    parts = Parts()
    for _ in range(steps):
        host.step(parts)
    return parts.row()


def admission(requests: int, prompt_tokens: int, *, caching: bool) -> float:
    """Microseconds to schedule a prompt that finds nothing in the prefix cache."""
    host = Host(requests, prompt_tokens, enable_prefix_caching=caching)
    for number in range(requests):
        host.add([10 + (number * 7919 + offset) % 900 for offset in range(prompt_tokens)])
    start = time.perf_counter()
    _, scheduled = host.scheduler.schedule()
    return round(1e6 * (time.perf_counter() - start) / len(scheduled), 1)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print(f"A decode step of {args.running} sequences:")
    print(table(decode(args.running, 0, args.steps)))
    print(f"The same with {args.waiting:,} requests waiting:")
    print(table(decode(args.running, args.waiting, args.steps)))
    cold = {
        "cached_us": admission(64, 1024, caching=True),
        "uncached_us": admission(64, 1024, caching=False),
    }
    print("Scheduling one prompt of 1,024 tokens, none of it in the cache:")
    print(table(cold))
    print(f"A decode step of {args.running} sequences, ready for drafts of which none can pay:")
    print(table(decode(args.running, 0, args.steps, drafts=True)))


if __name__ == "__main__":
    main()
