"""Some short requests before the replica says that it is ready.

The first forward pass builds caches and threads (and, on a GPU, kernels); a client shouldn't wait
for that. And on a CPU prompts are timed, so that they leave room for others' decodes.
"""

from __future__ import annotations

import time

from engine.contract.pooling_params import GENERATE, PoolingParams
from engine.contract.protocol import WARM_UP, EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.scheduler.prefill_pace import PrefillPace
from engine.scheduler.prefill_share import PrefillShare
from engine.serving.draft_timing import time_drafts
from kernels.ablations import is_on

_PROMPT_TOKENS = 8
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


def warm_up(core: EngineCore) -> None:
    """Run requests through the engine and leave no trace of them."""
    room = min(core.facts.max_model_len, core.scheduler.capacity_tokens)
    prompt = min(_PROMPT_TOKENS, room - 1)
    if prompt < 1:
        return
    output = min(_OUTPUT_TOKENS, room - prompt)
    for temperature in (0.0, 1.0):
        _run(core, prompt, output, temperature)
    if _sets_share(core):
        seconds = _seconds_per_token(core, room - 1)
        full_at = _FULL_SHARE_AT if is_on("prefill-by-load") else 0
        least = _LEAST_TOKENS if is_on("prefill-least") else 1
        core.scheduler.limits.share = PrefillShare(1, full_at, least)
        core.pace = PrefillPace(core.scheduler, seconds, _SECONDS_BESIDE_DECODES)
    time_drafts(core, _run, prompt, room)
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
            core.reset_prefix_cache()
            started = time.perf_counter()
            _run(core, tokens, 1, 0.0)
            best = min(best, (time.perf_counter() - started) / tokens)
            if time.perf_counter() - began > _PATIENCE_S:
                return best
    return best


def _run(
    core: EngineCore,
    prompt: int,
    output: int,
    temperature: float = 0.0,
    outputs: int = 1,
    most_steps: int | None = None,
) -> None:
    """One request, to its end or for so many steps."""
    sampling = SamplingParams(
        n=outputs,
        temperature=temperature or float(outputs > 1),
        top_p=0.9,
        seed=0,
        max_tokens=output,
        ignore_eos=True,
    )
    tasks = core.facts.tasks
    core.add_request(
        EngineRequest(
            request_id=WARM_UP,
            gateway_id="",
            prompt_token_ids=[index % core.facts.vocab_size for index in range(prompt)],
            sampling=sampling,
            pooling=PoolingParams(task=tasks[0]) if tasks[0] != GENERATE else None,
        )
    )
    while core.has_work and most_steps != 0:
        core.step()
        most_steps = None if most_steps is None else most_steps - 1
    core.abort(WARM_UP)
    while core.has_work:
        core.step()
