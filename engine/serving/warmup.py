"""Some short requests before the replica says that it is ready.

The first forward pass builds caches and threads (and, on a GPU, kernels); a client shouldn't wait
for that. And on a CPU prompts are timed, so that they leave room for others' decodes.
"""

from __future__ import annotations

import time

from engine.core.draft_timing import time_drafts
from engine.core.engine_core import EngineCore
from engine.core.trial import PROMPT_TOKENS, run_trial
from engine.scheduler.prefill_pace import PrefillPace
from engine.scheduler.prefill_share import PrefillShare
from kernels.ablations import is_on

_OUTPUT_TOKENS = 3
#: How long the prompt tokens that share a step with decodes may take at most.
_SECONDS_BESIDE_DECODES = 0.09
#: `PrefillShare.full_at` and `PrefillShare.least`.
_FULL_SHARE_AT = 64
_LEAST_TOKENS = 72
#: Prompts to time, each so often, but no more once it has taken so long.
_TIMED_TOKENS = (32, 128)
_TIMES = 3
_PATIENCE_S = 0.5
#: A prompt that tells what context costs, if it takes no longer than this; else so many tokens of
#: it are taken to cost as much as a token, until more is known.
_LONG_PROMPT, _LONG_PROMPT_S = 512, 0.15
_REACH = 2048


def warm_up(core: EngineCore) -> None:
    """Run requests through the engine and leave no trace of them."""
    room = min(core.facts.max_model_len, core.scheduler.capacity_tokens)
    prompt = min(PROMPT_TOKENS, room - 1)
    if prompt < 1:
        return
    output = min(_OUTPUT_TOKENS, room - prompt)
    for temperature in (0.0, 1.0):
        run_trial(core, prompt, output, temperature)
    if _sets_share(core):
        seconds = _seconds_per_token(core, room - 1)
        full_at = _FULL_SHARE_AT if is_on("prefill-by-load") else 0
        least = _LEAST_TOKENS if is_on("prefill-least") else 1
        core.scheduler.limits.share = PrefillShare(1, full_at, least)
        per_read = _seconds_per_read(core, room - 1, seconds)
        core.pace = PrefillPace(core.scheduler.limits, seconds, _SECONDS_BESIDE_DECODES, per_read)
    time_drafts(core)
    core.reset_prefix_cache()
    core.scheduler.kv.quotas.forget_idle()
    core.reset_stats()
    core.executor.serving()


def _sets_share(core: EngineCore) -> bool:
    """Whether prompts beside decodes are bounded by time."""
    told = core.config.prefill_tokens_beside_decodes is not None
    return not told and core.executor.times_prompts and core.facts.pooling is None


def _seconds_per_token(core: EngineCore, room: int) -> float:
    """What a prompt token takes in a step of its own; the best of some runs."""
    best, began = 1.0, time.perf_counter()
    for tokens in (min(tokens, room, core.capacity.token_budget) for tokens in _TIMED_TOKENS):
        for _ in range(_TIMES):
            best = min(best, _prompt_seconds(core, tokens) / tokens)
            if time.perf_counter() - began > _PATIENCE_S:
                return best
    return best


def _seconds_per_read(core: EngineCore, room: int, per_token: float) -> float:
    """What each token before it adds to the time that a prompt's token takes."""
    tokens, short = min(_LONG_PROMPT, room, core.capacity.token_budget), max(_TIMED_TOKENS)
    if tokens < 2 * short or tokens * per_token > _LONG_PROMPT_S:
        return per_token / _REACH
    best = min(_prompt_seconds(core, tokens) for _ in range(_TIMES)) / tokens
    # `per_token` holds some context, too: half of a short prompt's tokens.
    return max(0.0, best - per_token) / ((tokens - short) / 2)


def _prompt_seconds(core: EngineCore, tokens: int) -> float:
    """What a prompt of so many tokens takes in a step of its own."""
    core.reset_prefix_cache()
    started = time.perf_counter()
    run_trial(core, tokens, 1, 0.0)
    return time.perf_counter() - started
