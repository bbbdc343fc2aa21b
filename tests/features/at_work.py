"""Features that change nothing but how results come about: with them all is as without them, so it
must be seen that they were at work.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.executor.multiproc_executor import MultiprocExecutor
from tests.features.lab import Run
from tests.features.workload import LENGTHS


def _hits(run: Run) -> object:
    return run.hits


def _in_chunks(run: Run) -> object:
    return run.cores[0].capacity.token_budget < max(LENGTHS)


def _both_worked(run: Run) -> object:
    return all(core.stats.steps_total for core in run.cores)


def _num_accepted_drafts(run: Run) -> object:
    stats = run.cores[0].stats
    return stats.spec_decode_num_accepted_tokens_total and any(
        output.flight.num_accepted_tokens for output in run.outputs.values()
    )


def _overlaps(run: Run) -> object:
    return run.cores[0].config.uses_async_scheduling(False)


#: Feature -> whether it was at work in a run.
AT_WORK: dict[str, Callable[[Run], object]] = {
    "prefix cache": _hits,
    "chunks": _in_chunks,
    "preemption": lambda run: run.num_preemptions,
    "failover": lambda run: run.resumed,
    "tier": lambda run: run.loaded,
    "disaggregated": lambda run: run.loaded,
    "sleep": lambda run: run.slept,
    "async scheduling": _overlaps,
    "several replicas": _both_worked,
    "speculation": _num_accepted_drafts,
    "draft model": _num_accepted_drafts,
    "heads": _num_accepted_drafts,
    "ranks": lambda run: isinstance(run.cores[0].executor, MultiprocExecutor),
}
