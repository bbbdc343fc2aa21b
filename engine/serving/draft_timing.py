"""What drafts cost here, measured before anybody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.core.engine_core import EngineCore
from engine.speculative.drafter import Drafter

#: Steps to time of each width, how often, how wide, and for how long at most.
_TIMED_STEPS = 3
_TIMED_ROUNDS = 2
_WIDEST = 64
_WIDTHS_PATIENCE_S = 2.0
#: Steps with a draft model's drafts: those that build what they need, and then those that tell.
_DRAFTED_STEPS = 6
#: `run(core, prompt, output, ...)`: one request of so many tokens.
Run = Callable[..., None]


def time_drafts(core: EngineCore, run: Run, prompt: int, room: int) -> None:
    """Run requests of `prompt` tokens and more, within `room`, where anybody gives drafts."""
    drafter = core.drafter
    if drafter is None:
        return
    _time_model(core, drafter, run, prompt, room)
    _time_widths(core, run, prompt, room)
    drafter.start_over()


def _time_model(core: EngineCore, drafter: Drafter, run: Run, prompt: int, room: int) -> None:
    """Drafts of a model, if it has any: else one that was slow at first might never be tried."""
    if drafter.model is None or room - prompt < 2:
        return
    drafter.timing = True
    for _ in range(2):
        drafter.costs.forget()
        drafter.model.costs.forget()
        run(core, prompt, room - prompt, most_steps=1 + _DRAFTED_STEPS)
    drafter.timing = False


def _time_widths(core: EngineCore, run: Run, prompt: int, room: int) -> None:
    """Steps of several widths: what checking drafts costs is known before anybody waits for it."""
    began = time.perf_counter()
    most = min(core.config.max_num_seqs, core.capacity.token_budget, _WIDEST)
    output, held = min(_TIMED_STEPS + 1, room - prompt), core.scheduler.kv.pool.num_blocks
    blocks = core.scheduler.kv.most_blocks(prompt + output, prompt)
    for _ in range(_TIMED_ROUNDS):  # a machine that was slow for one of them is no measure
        width = 1
        while output > 1 and width <= most and width * blocks <= held:
            run(core, prompt, output, outputs=width)
            width *= 2
            if time.perf_counter() - began > _WIDTHS_PATIENCE_S:
                return
