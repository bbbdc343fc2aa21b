"""A replica's engine, loaded and warmed up, with a bar and a log of what it is."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from engine.contract.config import EngineConfig
from engine.contract.loading import WARM_UP, note
from engine.core.engine_core import EngineCore
from engine.serving.warmup import warm_up

log = logging.getLogger("engine.serving")


def load_core(config: EngineConfig, told: Callable[[float], None]) -> EngineCore:
    """The engine; `told` is called with the loaded part of its weights, up to 1, now and then."""
    started = time.perf_counter()
    # A supervisor whose terminal this ends up on says so; else tqdm looks for itself.
    hidden = False if os.environ.get("QUIRE_TERMINAL") else None
    with tqdm(desc="Loading weights", unit="layer", disable=hidden, file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            told(done / total)

        core = EngineCore(config, progress)
    note(WARM_UP)
    warm_up(core)
    _describe(core)
    log.info("Ready after %.2f s", time.perf_counter() - started)
    return core


def _describe(core: EngineCore) -> None:
    """Log the model and its KV cache."""
    facts, scheduler, capacity = core.facts, core.scheduler, core.capacity
    log.info(
        "Model %s: %s, %.1f M parameters, dtype %s, context %d, loaded in %.2f s",
        core.config.name,
        facts.architecture,
        facts.num_parameters / 1e6,
        facts.dtype,
        facts.max_model_len,
        facts.load_seconds,
    )
    if facts.runs_whole_prompts:
        budget = capacity.token_budget
        log.info("No KV cache: prompts run whole; token budget %d a step", budget)
    else:
        log.info(
            "KV cache: %d blocks of %d tokens, a request up to %d; maximum concurrency at %d "
            "tokens a request: %.1fx; token budget %d a step, %d of it for prompts while "
            "others decode",
            capacity.num_blocks,
            core.config.block_size,
            scheduler.capacity_tokens,
            facts.max_model_len,
            scheduler.concurrency(facts.max_model_len),
            capacity.token_budget,
            min(scheduler.limits.share.most, capacity.token_budget),
        )
