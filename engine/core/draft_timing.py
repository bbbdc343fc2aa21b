"""What checking drafts costs is measured before anybody waits for it.

What wider steps take would be found out beside others' requests, a few tokens at a time; and a head
whose first draws are slow would hardly be tried.
"""

from __future__ import annotations

import time

from engine.core.engine_core import EngineCore
from engine.core.trial import PROMPT_TOKENS, run_trial
from engine.speculative.drafter import Drafter

#: Steps to time of each width at once, how often, how wide, and for how long at most.
_TIMED_STEPS = 3
_TIMED_ROUNDS = 2
_WIDEST = 64
_WIDTHS_PATIENCE_S = 2.0
#: Steps with a draft model's drafts: those that build what they need, and then those that tell.
_DRAFTED_STEPS = 6


def time_drafts(core: EngineCore) -> None:
    """Time steps of several widths and a draft model's or head's draws, where there are drafts, and
    leave no trace of what ran.
    """
    room = min(core.facts.max_model_len, core.scheduler.capacity_tokens)
    prompt = min(PROMPT_TOKENS, room - 1)
    if core.drafter is None or prompt < 1:
        return
    _time_model(core, core.drafter, prompt, room)
    _time_widths(core, core.drafter, prompt, room)
    core.drafter.start_over()
    core.reset_prefix_cache()
    core.scheduler.kv.quotas.forget_idle()
    core.reset_stats()


def _time_model(core: EngineCore, drafter: Drafter, prompt: int, room: int) -> None:
    """Drafts of a model, if it has any: else one that was slow at first might never be tried."""
    if drafter.model is None or room - prompt < 2:
        return
    drafter.timing = True
    for _ in range(2):
        drafter.costs.forget()
        drafter.model.costs.forget()
        run_trial(core, prompt, room - prompt, most_steps=1 + _DRAFTED_STEPS)
    drafter.timing = False


def _time_widths(core: EngineCore, drafter: Drafter, prompt: int, room: int) -> None:
    """Steps of several widths, each of so many rows."""
    began = time.perf_counter()
    most = min(core.config.max_num_seqs, core.capacity.token_budget, _WIDEST)
    output, held = min(_TIMED_STEPS + 1, room - prompt), core.scheduler.kv.pool.num_blocks
    blocks = core.scheduler.kv.most_blocks(prompt + output, prompt)
    for _ in range(_TIMED_ROUNDS):  # a machine that was slow for one of them is no measure
        width = 1
        while output > 1 and width <= most and width * blocks <= held:
            run_trial(core, prompt, output, outputs=width)
            width *= 2
            if time.perf_counter() - began > _WIDTHS_PATIENCE_S:
                return
