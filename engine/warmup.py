"""One short request before the replica says that it is ready.

The first forward pass builds caches and threads (and, on a GPU, kernels); a client shouldn't wait
for that.
"""

from __future__ import annotations

from engine.core import EngineCore
from engine.pooling.params import GENERATE, PoolingParams
from engine.pooling.requests import tasks_of
from engine.protocol import EngineRequest
from engine.sampling_params import SamplingParams

_PROMPT_TOKENS = 8
_OUTPUT_TOKENS = 3


def warm_up(core: EngineCore) -> None:
    """Run a request through the engine and leave no trace of it."""
    room = min(core.loaded.max_model_len, core.scheduler.capacity_tokens)
    prompt = min(_PROMPT_TOKENS, room - 1)
    if prompt < 1:
        return
    output = min(_OUTPUT_TOKENS, room - prompt)
    tasks = tasks_of(core.loaded)
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(
            temperature=temperature, top_p=0.9, seed=0, max_tokens=output, ignore_eos=True
        )
        core.add_request(
            EngineRequest(
                request_id="warm-up",
                gateway_id="",
                prompt_token_ids=[index % core.loaded.spec.vocab_size for index in range(prompt)],
                sampling=sampling,
                pooling=PoolingParams(task=tasks[0]) if tasks[0] != GENERATE else None,
            )
        )
        while core.has_work:
            core.step()
    core.reset_prefix_cache()
    core.scheduler.kv.accounts.forget_idle()
    core.reset_stats()
