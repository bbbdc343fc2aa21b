"""With `async_scheduling` nothing changes but when tokens come: one step later."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest, TokenDelta
from engine.contract.sampling_params import RepetitionDetectionParams, SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.core.engine_core import EngineCore
from engine.devices import Device
from engine.devices.cpu import CpuDevice
from engine.devices.cuda import CudaDevice
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.step_inputs import StepInputs
from tests.engine.models import VOCAB

Folder = Callable[[str], Path]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "block_size": 4}
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 600}
#: Few blocks and a small budget: preemptions, chunks, sequences that wait their turn.
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 44, "max_num_batched_tokens": 24}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True, "max_tokens": 20},
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 1.0, "max_tokens": 1},
    {"temperature": 1.5, "top_p": 0.9, "max_tokens": 30},
    {"temperature": 1.0, "top_k": 5, "n": 3, "max_tokens": 12},
    {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 1.0, "max_tokens": 25},
    {"temperature": 1.0, "frequency_penalty": 2.0, "min_tokens": 9, "max_tokens": 25},
    {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 15},
    {"temperature": 2.0, "stop_token_ids": list(range(10, 90)), "max_tokens": 30},
    {"temperature": 1.0, "bad_words_token_ids": [[7, 8], [9]], "max_tokens": 20},
    {"temperature": 0, "logit_bias": {5: 50.0, 6: 50.0}, "max_tokens": 40, "ignore_eos": True}
    | {"repetition_detection": RepetitionDetectionParams(2, 1, 5)},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[a-f]{5,30}!")},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(json_object=True)},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(choice=["yes", "no"])}
    | {"logprobs": 1},
]


def make(model_folder: Folder, *, switch: bool, **settings: Any) -> EngineCore:
    settings = {**SETTINGS, **settings, "async_scheduling": switch}
    return EngineCore(EngineConfig(model=str(model_folder("llama")), **settings))


def requests(count: int, seed: int = 3) -> list[EngineRequest]:
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(30)]
    return [
        EngineRequest(
            request_id=f"r{number}",
            gateway_id="g",
            prompt_token_ids=stem[: rng.choice((0, 9, 30))]
            + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 40))],
            sampling=SamplingParams(**{"seed": number, **KINDS[number % len(KINDS)]}),
            priority=number % 3,
            tenant=f"t{number % 2}",
        )
        for number in range(count)
    ]


def outcome(deltas: list[TokenDelta]) -> dict[str, Any]:
    """What a client sees of one output, however it was cut into deltas."""
    scores = [entry for delta in deltas for entry in delta.logprobs or []]
    prompt = [entry for delta in deltas for entry in delta.prompt_logprobs or []]
    return {
        "tokens": [token for delta in deltas for token in delta.token_ids],
        "starts": [delta.start for delta in deltas],
        "logprobs": [entry.token_ids for entry in scores],
        "prompt_logprobs": [entry and entry.token_ids for entry in prompt],
        "end": (deltas[-1].finish_reason, deltas[-1].stop_reason),
        "ends": sum(delta.finish_reason is not None for delta in deltas),
    }


def run(
    core: EngineCore, messages: list[EngineRequest], spread: int = 3
) -> dict[tuple[str, int], dict[str, Any]]:
    """Requests arrive `spread` at a time, a step apart."""
    deltas_by_output: dict[tuple[str, int], list[TokenDelta]] = {}
    queue = list(messages)
    for _ in range(5000):
        for message in queue[:spread]:
            core.add_request(message)
        queue = queue[spread:]
        if not core.has_work and not queue:
            break
        for delta in core.step():
            deltas_by_output.setdefault((delta.request_id, delta.index), []).append(delta)
        core.check_integrity()
    assert not core.requests
    assert core.scheduler.kv.pool.num_free_blocks == core.capacity.num_blocks
    return {key: outcome(deltas) for key, deltas in deltas_by_output.items()}


@pytest.mark.parametrize(
    ("setting", "device", "ahead"),
    [
        (None, CudaDevice, True),
        (None, CpuDevice, False),
        (True, CpuDevice, True),
        (False, CudaDevice, False),
    ],
)
def test_by_default_only_a_gpus_steps_are_planned_ahead(
    setting: bool | None, device: type[Device], ahead: bool
) -> None:
    assert (
        EngineConfig(model="m", async_scheduling=setting).uses_async_scheduling(device.overlaps)
        is ahead
    )


def test_with_drafts_steps_are_not_planned_ahead_by_default() -> None:
    drafts = {"method": "ngram"}
    assert not EngineConfig(model="m", speculative_config=drafts).uses_async_scheduling(True)
    assert EngineConfig(
        model="m", speculative_config=drafts, async_scheduling=True
    ).uses_async_scheduling(True)


@pytest.mark.parametrize(
    ("budget", "policy"), [(ROOMY, "fair"), (TIGHT, "fair"), (TIGHT, "fcfs"), (TIGHT, "priority")]
)
def test_every_kind_of_request_gets_the_same_tokens(
    model_folder: Folder, budget: dict[str, Any], policy: str
) -> None:
    messages = requests(28)
    baseline_llm = make(model_folder, switch=False, scheduling_policy=policy, **budget)
    ahead = make(model_folder, switch=True, scheduling_policy=policy, **budget)
    expected = run(baseline_llm, messages)
    assert run(ahead, messages) == expected
    assert {result["ends"] for result in expected.values()} == {1}
    reasons = {result["end"][0] for result in expected.values()}
    assert reasons == {"stop", "length", "repetition"}
    if budget is TIGHT:
        assert baseline_llm.scheduler.num_preemptions > 0
        assert ahead.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": False},
        {"max_num_seqs": 2},
        {"block_size": 16, "long_prefill_token_threshold": 7},
    ],
)
def test_settings_that_touch_the_scheduler(model_folder: Folder, changes: dict[str, Any]) -> None:
    messages = requests(14, seed=8)
    settings = {**ROOMY, **changes}
    expected = run(make(model_folder, switch=False, **settings), messages)
    assert run(make(model_folder, switch=True, **settings), messages) == expected


def test_a_cache_that_was_filled_ahead_holds_what_it_says(model_folder: Folder) -> None:
    core = make(model_folder, switch=True, **ROOMY)
    messages = requests(14)
    cold = run(core, messages)
    hits = core.scheduler.kv.num_hit_tokens
    assert run(core, messages) == cold
    assert core.scheduler.kv.num_hit_tokens > hits


def test_a_step_is_begun_before_the_one_before_is_updated(model_folder: Folder) -> None:
    core = make(model_folder, switch=True, **ROOMY)
    core.add_request(requests(1)[0])
    assert core.step() == []
    (first,) = core.step()
    assert len(first.token_ids) == 1
    sequence = core.requests["r0"].sequences[0]
    assert sequence.num_computed_tokens == sequence.num_tokens
    assert sequence.num_placeholders == 1
    core.abort("r0")
    assert core.has_work
    assert core.step() == []
    assert not core.has_work


@pytest.mark.parametrize("steps", range(6))
def test_aborts_while_steps_run(model_folder: Folder, steps: int) -> None:
    core = make(model_folder, switch=True, **TIGHT)
    messages = requests(6)
    isolated_tokens = {key: result["tokens"] for key, result in run(core, messages[1:]).items()}
    for message in messages:
        core.add_request(message)
    matches: dict[tuple[str, int], list[int]] = {}
    for step in range(400):
        if step == steps:
            assert [delta.finish_reason for delta in core.abort("r0")] == ["abort"]
        for delta in core.step():
            assert step <= steps or delta.request_id != "r0"
            matches.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        core.check_integrity()
    matches.pop(("r0", 0), None)
    assert matches == isolated_tokens
    assert not core.has_work


def fail_at(core: EngineCore, calls: set[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make some of the steps of several sequences fail; returns the list of all such steps."""
    runner, steps_run = core.executor.worker._runner, []
    run_step = runner.run

    def failing(plan: StepPlan, inputs: StepInputs | None) -> StepResult:
        steps_run.extend([plan.step] * (len(plan.seq_ids) > 1))
        if len(steps_run) in calls and steps_run[-1] == plan.step:
            raise MemoryError("no memory")
        return run_step(plan, inputs)

    monkeypatch.setattr(runner, "run", failing)
    return steps_run


@pytest.mark.parametrize("calls", [{1}, {2}, {5, 12}])
def test_fault_27_a_failed_step_takes_the_next_one_with_it_and_both_are_run_again(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch, calls: set[int]
) -> None:
    messages = [message for message in requests(12) if message.sampling.prompt_logprobs is None]
    expected = run(make(model_folder, switch=False, **ROOMY), messages, spread=20)
    core = make(model_folder, switch=True, **ROOMY)
    steps_run = fail_at(core, calls, monkeypatch)
    outputs = run(core, messages, spread=20)
    assert {k: v["tokens"] for k, v in outputs.items()} == {
        k: v["tokens"] for k, v in expected.items()
    }
    assert len(steps_run) > max(calls)
    monkeypatch.undo()
    # Nothing that was never computed is in the cache.
    again = run(core, messages, spread=20)
    assert {k: v["tokens"] for k, v in again.items()} == {
        k: v["tokens"] for k, v in expected.items()
    }


def test_fault_27_a_request_that_breaks_its_step_fails_alone(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = requests(4)
    expected = run(make(model_folder, switch=False, **ROOMY), messages[:3])
    core = make(model_folder, switch=True, **ROOMY)
    for message in messages:
        core.add_request(message)
    bad = core.requests["r3"].sequences[0].seq_id
    prepare = core.executor.worker._runner.prepare

    def failing(plan: StepPlan) -> StepInputs | None:
        inputs = prepare(plan)
        if bad in plan.seq_ids:
            raise MemoryError("no memory")
        return inputs

    monkeypatch.setattr(core.executor.worker._runner, "prepare", failing)
    deltas_by_output: dict[tuple[str, int], list[TokenDelta]] = {}
    while core.has_work:
        for delta in core.step():
            deltas_by_output.setdefault((delta.request_id, delta.index), []).append(delta)
    (end,) = deltas_by_output.pop(("r3", 0))
    assert end.finish_reason == "error"
    assert end.error is not None
    assert "no memory" in end.error.message
    assert {k: outcome(v)["tokens"] for k, v in deltas_by_output.items()} == {
        k: v["tokens"] for k, v in expected.items()
    }


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {}),
        ("qwen2-window", TIGHT),
        ("llama", {"model_impl": "transformers"}),
    ],
)
def test_other_models_and_caches(
    model_folder: Folder, family: str, changes: dict[str, Any]
) -> None:
    messages = requests(10, seed=4)
    settings = {**ROOMY, **changes}
    outcomes = [
        run(make(lambda _: model_folder(family), switch=switch, **settings), messages)
        for switch in (False, True)
    ]
    assert outcomes[0] == outcomes[1]


def test_an_interrupt_while_a_step_runs_loses_nothing(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = requests(1)[0]
    expected = run(make(model_folder, switch=False, **ROOMY), [message])["r0", 0]["tokens"]
    core = make(model_folder, switch=True, **ROOMY)
    core.add_request(message)
    token_ids: list[int] = []
    waiting = Future.result
    for call in range(100):
        if not core.has_work:
            break
        if call == 4:

            def interrupt(self: Future[Any], timeout: float | None = None) -> Any:
                raise KeyboardInterrupt

            monkeypatch.setattr(Future, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                core.step()
            monkeypatch.setattr(Future, "result", waiting)
        for delta in core.step():
            token_ids += delta.token_ids
    assert token_ids == expected


def test_fault_27_what_an_aborted_prompt_had_not_computed_is_not_in_the_cache(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(model_folder, switch=True, **ROOMY)
    prompt = EngineRequest(
        request_id="r", gateway_id="g", prompt_token_ids=[5] * 40, sampling=SamplingParams()
    )

    def fail(plan: StepPlan, inputs: StepInputs | None) -> StepResult:
        raise MemoryError("no memory")

    monkeypatch.setattr(core.executor.worker._runner, "run", fail)
    core.add_request(prompt)
    core.step()
    assert core.scheduler.kv.pool.num_cached == 10
    core.abort("r")
    while core.has_work:
        assert core.step() == []
    assert core.scheduler.kv.pool.num_cached == 0
    core.check_integrity()


def test_an_engine_that_is_given_up_leaves_no_thread_and_no_model(model_folder: Folder) -> None:
    core = make(model_folder, switch=True, **ROOMY)
    run(core, requests(2))
    threads = [thread for thread in threading.enumerate() if thread.name == "steps"]
    executor = weakref.ref(core.executor)
    del core
    gc.collect()
    assert executor() is None
    for thread in threads[-1:]:
        thread.join(60)
        assert not thread.is_alive()
