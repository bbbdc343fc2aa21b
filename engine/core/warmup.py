"""Warm-up requests, run to build caches and to time steps."""

from __future__ import annotations

import time

import numpy as np

from engine.contract.messages import WARMUP_REQUEST_ID, EngineRequest, MediaItem
from engine.contract.pooling_params import GENERATE, PoolingParams
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.multimodal.audio import HOP
from engine.multimodal.encoder_text import EncoderTextProcessor
from engine.multimodal.inputs import MediaTensors
from engine.multimodal.sound_processor import SoundProcessor
from engine.scheduler.prefill_budget import PrefillLimits, PrefillPace
from engine.speculative.drafter import Drafter

PROMPT_TOKENS = 8


def run_warmup_request(
    core: EngineCore,
    prompt: int,
    output: int,
    temperature: float = 0.0,
    outputs: int = 1,
    max_steps: int | None = None,
) -> None:
    """Run one request to its end, or for a number of steps."""
    sampling = SamplingParams(
        n=outputs,
        temperature=temperature or float(outputs > 1),
        top_p=0.9,
        seed=0,
        max_tokens=output,
        ignore_eos=True,
    )
    facts, tasks = core.facts, core.facts.tasks
    items: list[MediaItem] = []
    media: dict[bytes, MediaTensors] = {}
    if facts.encoder_length:
        sound = SoundProcessor(facts.num_mels, 2 * facts.encoder_length).prepare(np.zeros(HOP))
        items.append(MediaItem("audio", sound.digest, ()))
        media[sound.digest] = sound.tensors
    if facts.max_encoder_tokens:
        text = EncoderTextProcessor((), facts.max_encoder_tokens, facts.vocab_size).prepare([0])
        items.append(MediaItem(text.kind, text.digest, ()))
        media[text.digest] = text.tensors
    core.add_request(
        EngineRequest(
            request_id=WARMUP_REQUEST_ID,
            gateway_id="",
            prompt_token_ids=[index % core.facts.vocab_size for index in range(prompt)],
            sampling=sampling,
            pooling=PoolingParams(task=tasks[0]) if tasks[0] != GENERATE else None,
            media=items,
        ),
        media=media,
    )
    while core.has_work and max_steps != 0:
        core.step()
        max_steps = None if max_steps is None else max_steps - 1
    core.abort(WARMUP_REQUEST_ID)
    while core.has_work:
        core.step()


# -- The cost of verifying drafts, measured before the replica is ready.
#
# Otherwise wider steps would be measured during others' requests, a few tokens at a time, and a
# draft head whose first drafts are slow would hardly be tried.


#: Number of steps timed per width, rounds, widths, and maximum duration.
_TIMED_STEPS = 3
_TIMED_ROUNDS = 2
_WIDEST = 64
WIDTH_TIMEOUT_S = 2.0
#: Steps with a draft model's drafts: the first ones build caches, the others are measured.
_DRAFTED_STEPS = 6


def measure_draft_costs(core: EngineCore) -> None:
    """Time steps of several widths, and drafting with a draft model or head, if drafts are used.
    Removes all traces of the requests.
    """
    max_tokens = min(core.facts.max_model_len, core.scheduler.capacity_tokens)
    prompt = min(PROMPT_TOKENS, max_tokens - 1)
    if core.drafter is None or prompt < 1:
        return
    _time_model(core, core.drafter, prompt, max_tokens)
    _time_widths(core, core.drafter, prompt, max_tokens)
    core.drafter.clear_history()
    core.reset_prefix_cache()
    core.scheduler.kv.quotas.drop_idle()
    core.reset_stats()


def _time_model(core: EngineCore, drafter: Drafter, prompt: int, max_tokens: int) -> None:
    """Time the drafts of a model, if there is one: if slow at first, it might never be tried."""
    if drafter.model is None or max_tokens - prompt < 2:
        return
    drafter.timing = True
    for _ in range(2):
        drafter.costs.clear()
        drafter.model.costs.clear()
        run_warmup_request(core, prompt, max_tokens - prompt, max_steps=1 + _DRAFTED_STEPS)
    drafter.timing = False


def _time_widths(core: EngineCore, drafter: Drafter, prompt: int, max_tokens: int) -> None:
    """Time steps of several widths with `num_rows` rows."""
    began = time.perf_counter()
    max_width = min(core.config.max_num_seqs, core.capacity.token_budget, _WIDEST)
    output, num_blocks = (
        min(_TIMED_STEPS + 1, max_tokens - prompt),
        core.scheduler.kv.pool.num_blocks,
    )
    blocks = core.scheduler.kv.max_blocks_per_sequence(prompt + output, prompt)
    for _ in range(_TIMED_ROUNDS):  # the machine may be slow during one of them
        width = 1
        while output > 1 and width <= max_width and width * blocks <= num_blocks:
            run_warmup_request(core, prompt, output, outputs=width)
            width *= 2
            if time.perf_counter() - began > WIDTH_TIMEOUT_S:
                return


# -- Short requests before the replica reports that it is ready.
#
# The first forward pass builds caches and threads (and, on a GPU, kernels), which no client should
# wait for. And on a CPU prompts are timed, so that they can be limited in favour of decodes.


_OUTPUT_TOKENS = 3
#: Maximum time of the prompt tokens that share a step with decodes.
MAX_PREFILL_SECONDS = 0.09
#: `PrefillLimits.saturation_decodes` and `PrefillLimits.min_step_tokens`.
SATURATION_DECODES = 64
_MIN_STEP_TOKENS = 72
#: Lengths of the prompts to time, repetitions, and a time limit after which no more are run.
_TIMED_TOKENS = (32, 128)
_TIMES = 3
TIMING_TIMEOUT_S = 0.5
#: A prompt that measures the cost of context, if it takes no longer than this; otherwise this many
#: context tokens are assumed to cost as much as one token, until more is measured.
_LONG_PROMPT, _LONG_PROMPT_S = 512, 0.15
_REACH = 2048


def warm_up(core: EngineCore) -> None:
    """Run requests through the engine, and remove all traces of them."""
    max_tokens = min(core.facts.max_model_len, core.scheduler.capacity_tokens)
    prompt = min(PROMPT_TOKENS, max_tokens - 1)
    if prompt < 1 or core.config.only_encodes:
        return
    output = min(_OUTPUT_TOKENS, max_tokens - prompt)
    connector = core.scheduler.kv_connector
    core.use_kv_connector(None)
    for temperature in (0.0, 1.0):
        run_warmup_request(core, prompt, output, temperature)
    reads_text = core.facts.pooling is None and not core.facts.encoder_length
    is_set = core.config.prefill_tokens_beside_decodes is not None
    if reads_text and core.executor.measures_prefill_pace and not is_set:
        seconds = _seconds_per_token(core, max_tokens - 1)
        core.scheduler.limits.share = PrefillLimits(1, SATURATION_DECODES, _MIN_STEP_TOKENS)
        per_read = _seconds_per_context_token(core, max_tokens - 1, seconds)
        core.prefill_pace = PrefillPace(
            core.scheduler.limits, seconds, MAX_PREFILL_SECONDS, per_read
        )
    if connector is not None:
        connector.set_prefill_pace(_seconds_per_token(core, max_tokens - 1))
    measure_draft_costs(core)
    core.reset_prefix_cache()
    core.scheduler.kv.quotas.drop_idle()
    core.reset_stats()
    core.use_kv_connector(connector)
    core.executor.on_serving()


def _seconds_per_token(core: EngineCore, max_tokens: int) -> float:
    """Seconds per prompt token in a step without decodes; the best of several runs."""
    best, began = 1.0, time.perf_counter()
    for tokens in (min(tokens, max_tokens, core.capacity.token_budget) for tokens in _TIMED_TOKENS):
        for _ in range(_TIMES):
            best = min(best, _prompt_seconds(core, tokens) / tokens)
            if time.perf_counter() - began > TIMING_TIMEOUT_S:
                return best
    return best


def _seconds_per_context_token(core: EngineCore, max_tokens: int, per_token: float) -> float:
    """Seconds that each token of context adds to the time of a prompt token."""
    tokens, short = min(_LONG_PROMPT, max_tokens, core.capacity.token_budget), max(_TIMED_TOKENS)
    if tokens < 2 * short or tokens * per_token > _LONG_PROMPT_S:
        return per_token / _REACH
    best = min(_prompt_seconds(core, tokens) for _ in range(_TIMES)) / tokens
    # `per_token` includes some context, too: half of a short prompt's tokens.
    return max(0.0, best - per_token) / ((tokens - short) / 2)


def _prompt_seconds(core: EngineCore, tokens: int) -> float:
    core.reset_prefix_cache()
    started = time.perf_counter()
    run_warmup_request(core, tokens, 1, 0.0)
    return time.perf_counter() - started
