"""Requests that nobody asked for, to see what their steps take."""

from __future__ import annotations

from engine.contract.pooling_params import GENERATE, PoolingParams
from engine.contract.protocol import WARM_UP, EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore

PROMPT_TOKENS = 8


def run_trial(
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
