"""The core: what it refuses, how requests end, what a failing step does to its neighbours."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import (
    ContextLengthExceeded,
    EngineOverloaded,
    InvalidRequest,
    KVPoolTooSmall,
)
from engine.contract.messages import EngineRequest, TokenDelta
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.scheduler import Request, Sequence, StepPlan, StepResult
from tests.engine.helpers import block_ids
from tests.engine.models import VOCAB

Folder = Callable[[str], Path]


def make(model_folder: Folder, **settings: Any) -> EngineCore:
    settings = {"num_gpu_blocks_override": 64, "max_model_len": 256, **settings}
    return EngineCore(EngineConfig(model=str(model_folder("llama")), **settings))


def request(prompt: list[int], request_id: str = "r", **fields: Any) -> EngineRequest:
    sampling = fields.pop("sampling", {})
    params = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **sampling})
    return EngineRequest(
        request_id=request_id, gateway_id="g", prompt_token_ids=prompt, sampling=params, **fields
    )


def finish(core: EngineCore) -> dict[tuple[str, int], list[TokenDelta]]:
    deltas_by_output: dict[tuple[str, int], list[TokenDelta]] = {}
    for _ in range(2000):
        if not core.has_work:
            break
        for delta in core.step():
            deltas_by_output.setdefault((delta.request_id, delta.index), []).append(delta)
    core.check_integrity()
    assert core.scheduler.kv.pool.num_free_blocks == core.capacity.num_blocks
    return deltas_by_output


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("bad", [[], [-1], [VOCAB], [5, VOCAB + 7]])
def test_fault_03_token_ids_out_of_the_vocabulary_are_refused(
    model_folder: Folder, bad: list[int]
) -> None:
    core = make(model_folder)
    with pytest.raises(InvalidRequest) as error:
        core.add_request(request(bad))
    assert error.value.param == "prompt"
    assert not core.has_work


def test_fault_06_a_prompt_over_the_context_is_refused_and_an_output_over_it_is_cut(
    model_folder: Folder,
) -> None:
    core = make(model_folder)
    core.add_request(request([5] * 250, sampling={"max_tokens": 10, "ignore_eos": True}))
    deltas = finish(core)["r", 0]
    assert len(tokens(deltas)) == 6
    assert deltas[-1].finish_reason == "length"
    with pytest.raises(ContextLengthExceeded, match=r"256 tokens"):
        core.add_request(request([5] * 256, sampling={"max_tokens": None}))


def test_fault_07_what_can_never_fit_the_pool_is_refused_at_once_with_both_numbers(
    model_folder: Folder,
) -> None:
    core = make(model_folder, num_gpu_blocks_override=4)
    with pytest.raises(KVPoolTooSmall, match=r"up to 108 tokens.*holds 64"):
        core.add_request(request([5] * 100))
    with pytest.raises(KVPoolTooSmall, match=r"up to 110 tokens.*holds 64"):
        core.add_request(request([5] * 10, sampling={"max_tokens": 100}))
    assert not core.has_work


def test_an_open_end_stops_where_the_pool_ends(model_folder: Folder) -> None:
    core = make(model_folder, num_gpu_blocks_override=4)
    core.add_request(request([5] * 10, sampling={"max_tokens": None}))
    deltas = finish(core)["r", 0]
    assert len(tokens(deltas)) == 54
    assert deltas[-1].finish_reason == "length"


def test_fault_08_logprobs_over_the_limit_are_refused(model_folder: Folder) -> None:
    core = make(model_folder, max_logprobs=5)
    with pytest.raises(InvalidRequest) as error:
        core.add_request(request([5], sampling={"logprobs": 6}))
    assert error.value.param == "logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {VOCAB: 1.0}),
        ("allowed_token_ids", [VOCAB]),
        ("stop_token_ids", [VOCAB]),
        ("bad_words_token_ids", [[VOCAB]]),
    ],
)
def test_fault_09_tokens_out_of_the_vocabulary_are_refused_by_field(
    model_folder: Folder, field: str, value: Any
) -> None:
    core = make(model_folder)
    with pytest.raises(InvalidRequest) as error:
        core.add_request(request([5], sampling={field: value}))
    assert error.value.param == field.removesuffix("_token_ids") or error.value.param == field


def test_a_full_queue_refuses_with_429(model_folder: Folder) -> None:
    core = make(model_folder, max_waiting=2)
    core.add_request(request([5], "a"))
    core.add_request(request([5], "b"))
    with pytest.raises(EngineOverloaded) as error:
        core.add_request(request([5], "c"))
    assert error.value.status == 429
    assert len(finish(core)) == 2


def test_an_id_in_use_is_refused(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request([5]))
    with pytest.raises(InvalidRequest, match="in use"):
        core.add_request(request([6]))
    finish(core)


def test_stop_token_ids_end_the_output_and_are_named(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request([5, 6, 7]))
    free = tokens(finish(core)["r", 0])
    core.add_request(request([5, 6, 7], sampling={"stop_token_ids": [free[3]]}))
    deltas = finish(core)["r", 0]
    first = free.index(free[3])
    assert tokens(deltas) == free[: first + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", free[3])


def test_min_tokens_puts_off_stop_token_ids(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request([5, 6, 7]))
    stop = tokens(finish(core)["r", 0])[1]
    core.add_request(request([5, 6, 7], sampling={"stop_token_ids": [stop], "min_tokens": 5}))
    got = tokens(finish(core)["r", 0])
    assert len(got) >= 5
    assert stop not in got[:4]


def test_n_outputs_share_the_prompts_blocks(model_folder: Folder) -> None:
    core = make(model_folder)
    prompt = list(range(10, 58))
    core.add_request(request(prompt, sampling={"n": 4, "temperature": 1.0, "seed": 3}))
    core.step()
    running = core.scheduler.running
    assert len(running) == 4
    tables = [block_ids(core.scheduler, sequence) for sequence in running]
    assert all(table[:2] == tables[0][:2] for table in tables)
    used = core.capacity.num_blocks - core.scheduler.kv.pool.num_free_blocks
    assert used == 2 + 4 * (len(tables[0]) - 2)
    outputs = finish(core)
    assert {index for _, index in outputs} <= {0, 1, 2, 3}


def test_seeds_give_the_same_tokens_alone_and_in_a_crowd(model_folder: Folder) -> None:
    core = make(model_folder)
    sampled = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "n": 2}
    core.add_request(request([5, 6, 7], "x", sampling=sampled))
    isolated_outputs = finish(core)
    for index in range(10):
        core.add_request(
            request([9, 8, index + 20], f"o{index}", sampling={"temperature": 1.5, "seed": index})
        )
    core.add_request(request([5, 6, 7], "x", sampling=sampled))
    crowd = finish(core)
    for index in (0, 1):
        assert tokens(isolated_outputs["x", index]) == tokens(crowd["x", index])
    assert tokens(isolated_outputs["x", 0]) != tokens(isolated_outputs["x", 1])


def test_a_resumed_request_goes_on_as_if_it_had_never_stopped(model_folder: Folder) -> None:
    core = make(model_folder)
    sampled = {"temperature": 1.0, "seed": 11, "max_tokens": 20, "n": 2}
    core.add_request(request([5, 6, 7], "x", sampling=sampled))
    full_outputs = finish(core)
    have = [tokens(full_outputs["x", 0])[:9], tokens(full_outputs["x", 1])[:4]]
    core.add_request(request([5, 6, 7], "x", sampling=sampled, resume_token_ids=have))
    rest = finish(core)
    for index in (0, 1):
        assert rest["x", index][0].start == len(have[index])
        assert have[index] + tokens(rest["x", index]) == tokens(full_outputs["x", index])


def test_outputs_that_a_client_has_whole_are_not_generated_again(model_folder: Folder) -> None:
    core = make(model_folder)
    sampled = {"temperature": 1.0, "seed": 11, "n": 2}
    core.add_request(request([5, 6, 7], "x", sampling=sampled))
    full_outputs = finish(core)
    core.add_request(
        request(
            [5, 6, 7],
            "x",
            sampling=sampled,
            resume_token_ids=[tokens(full_outputs["x", 0]), []],
            skip_indices=[0],
        )
    )
    rest = finish(core)
    assert list(rest) == [("x", 1)]
    assert tokens(rest["x", 1]) == tokens(full_outputs["x", 1])


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_fault_25_an_abort_frees_the_blocks_at_once(model_folder: Folder, steps: int) -> None:
    core = make(model_folder, max_num_batched_tokens=16)
    core.add_request(request(list(range(10, 50)), sampling={"max_tokens": 50}))
    for _ in range(steps):
        core.step()
    deltas = core.abort("r")
    assert [delta.finish_reason for delta in deltas] == ["abort"]
    assert core.scheduler.kv.pool.num_free_blocks == core.capacity.num_blocks
    assert core.abort("r") == []
    assert finish(core) == {}


def test_one_output_of_several_can_be_stopped(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request([5, 6, 7], sampling={"n": 2, "temperature": 1.0, "seed": 1}))
    core.step()
    stopped = core.abort("r", 0, "stop")
    assert [(delta.index, delta.finish_reason) for delta in stopped] == [(0, "stop")]
    rest = finish(core)
    assert list(rest) == [("r", 1)]
    assert rest["r", 1][-1].finish_reason == "length"


class Poison(Exception):
    """What the test's executor raises."""


def poison(core: EngineCore, seq_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every step fail that holds this sequence."""
    execute = core.executor.execute

    def failing(plan: StepPlan) -> StepResult:
        if seq_id in plan.seq_ids:
            core.executor.worker._runner.batch.apply_plan(plan)
            raise Poison("out of memory")
        return execute(plan)

    monkeypatch.setattr(core.executor, "execute", failing)


def test_fault_27_a_request_that_breaks_its_step_fails_alone(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(model_folder)
    prompts = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    for index, prompt in enumerate(prompts):
        core.add_request(request(prompt, f"ok{index}"))
    isolated_outputs = finish(core)
    for index, prompt in enumerate(prompts):
        core.add_request(request(prompt, f"ok{index}"))
    core.step()
    bad = core.add_request(request([20, 21], "bad"))
    poison(core, bad.sequences[0].seq_id, monkeypatch)
    outputs = finish(core)
    assert outputs["bad", 0][-1].finish_reason == "error"
    assert outputs["bad", 0][-1].error is not None
    assert "out of memory" in outputs["bad", 0][-1].error.message
    for index in range(3):
        expected = tokens(isolated_outputs[f"ok{index}", 0])
        assert tokens(outputs[f"ok{index}", 0]) == expected[1:]


def test_fault_27_a_request_that_breaks_a_later_step_of_its_prompt_fails_alone(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the prompt's beginning is cached: each time it begins anew."""
    core = make(model_folder, max_num_batched_tokens=16, enable_prefix_caching=False)
    core.add_request(request([5, 6, 7], "ok", sampling={"max_tokens": 30}))
    core.step()
    bad = core.add_request(request(list(range(10, 50)), "bad")).sequences[0]
    execute = core.executor.execute

    def failing(plan: StepPlan) -> StepResult:
        if bad.seq_id in plan.seq_ids and bad.num_computed_tokens > 20:
            core.executor.worker._runner.batch.apply_plan(plan)
            raise Poison("out of memory")
        return execute(plan)

    monkeypatch.setattr(core.executor, "execute", failing)
    outputs = finish(core)
    assert outputs["bad", 0][-1].finish_reason == "error"
    assert outputs["ok", 0][-1].finish_reason == "length"


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_of_an_isolated_request_are_begun_beside_no_other(
    model_folder: Folder, ahead: bool
) -> None:
    core = make(model_folder, max_num_batched_tokens=16, async_scheduling=ahead)
    heard: list[set[str]] = []
    core.on_step_start = lambda under_way: heard.append({s.request.request_id for s in under_way})
    core.add_request(request([5, 6, 7], "before", sampling={"max_tokens": 30}))
    core.step()
    core.add_request(request(list(range(10, 50)), "lone", isolated=True))
    core.add_request(request([8, 9], "behind"))
    outputs = finish(core)
    with_it = [ids for ids in heard if "lone" in ids]
    assert with_it[:3] == [{"lone"}] * 3, "its prompt's three steps"
    assert {"lone", "before"} <= set.union(*with_it[3:])
    calm = make(model_folder, max_num_batched_tokens=16)
    calm.add_request(request(list(range(10, 50)), "lone"))
    assert tokens(outputs["lone", 0]) == tokens(finish(calm)["lone", 0])


def test_the_last_delta_carries_the_flight_record(model_folder: Folder) -> None:
    core = make(model_folder, max_num_batched_tokens=16)
    core.add_request(request(list(range(10, 50)), arrival_time=0.0))
    last = finish(core)["r", 0][-1]
    assert last.flight is not None
    assert last.flight.prefill_chunks == 3
    assert last.flight.num_steps == 10
    assert last.flight.cold_reason == "no_shared_prefix"
    assert last.num_prompt_tokens == 40


def test_prompt_tokens_are_counted_as_they_are_computed_and_only_then(
    model_folder: Folder,
) -> None:
    core = make(model_folder, max_num_batched_tokens=16, max_num_seqs=1)
    core.add_request(request(list(range(10, 50)), "long"))
    core.add_request(request(list(range(60, 130)), "never"))
    counted = []
    for _ in range(4):
        core.step()
        counted.append(core.stats.prompt_tokens_total)
    assert counted == [16, 32, 40, 40]
    core.abort("never")
    finish(core)
    assert core.stats.prompt_tokens_total == 40
    # Two blocks of 16 come from the cache.
    core.add_request(request(list(range(10, 50)), "again", sampling={"n": 2}))
    finish(core)
    assert core.stats.prompt_tokens_total == 48


def test_a_prompt_that_is_computed_again_after_a_preemption_counts_once(
    model_folder: Folder,
) -> None:
    core = make(model_folder, num_gpu_blocks_override=8, enable_prefix_caching=False)
    for name in "ab":
        core.add_request(request(list(range(10, 60)), name, sampling={"max_tokens": 40}))
    finish(core)
    assert core.snapshot().num_preemptions_total > 0
    assert core.stats.prompt_tokens_total == 100


def test_aborted_requests_leave_room_in_the_queue(model_folder: Folder) -> None:
    core = make(model_folder, max_num_seqs=1, max_waiting=4)
    core.add_request(request([5, 6], "runs"))
    core.step()
    for number in range(50):
        core.add_request(request([7, 8], f"gone{number}"))
        core.abort(f"gone{number}")
    assert len(core.scheduler.waiting) == 0
    for number in range(4):
        core.add_request(request([7, 8], f"waits{number}"))
    with pytest.raises(EngineOverloaded):
        core.add_request(request([7, 8], "more"))
    finish(core)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"n": 3, "temperature": 1, "seed": 1}, {"use_beam_search": True, "n": 2}, {"logprobs": 2}],
    ids=["greedy", "several", "beams", "logprobs"],
)
def test_what_ended_is_gone_before_the_collector_looks(
    model_folder: Folder, sampling: dict[str, Any]
) -> None:
    """It looks at everything then, which holds up a step; and prompts may be long."""
    core = make(model_folder)
    gc.collect()

    def alive() -> list[object]:
        # By type: what a dead weak proxy would answer for its object is an error.
        return [
            tracked for tracked in gc.get_objects() if issubclass(type(tracked), Request | Sequence)
        ]

    initial_alive = alive()
    gc.disable()
    try:
        core.add_request(request([3, 4, 5], "whole", sampling=sampling))
        core.add_request(request([3, 4, 6], "aborted", sampling=sampling))
        core.step()
        core.abort("aborted")
        finish(core)
        remaining_alive = alive()
    finally:
        gc.enable()
    assert [
        request
        for request in remaining_alive
        if not any(request is other for other in initial_alive)
    ] == []


def test_totals_count_what_ran(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request([5, 6, 7], "a", sampling={"n": 2}))
    core.add_request(request([5, 6], "b"))
    finish(core)
    stats = core.snapshot()
    assert stats.prompt_tokens_total == 5
    assert stats.generation_tokens_total == 24
    assert stats.requests_finished_total == {"length": 3}
    assert stats.prefix_cold_total == {"shorter_than_a_block": 3}
    assert stats.num_requests_running == stats.num_requests_waiting == 0
    assert stats.num_free_blocks == 64


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 0.0),
        ("weight", float("nan")),
        ("kv_reserved_fraction", -0.1),
        ("kv_reserved_fraction", float("nan")),
        ("kv_max_fraction", 0.0),
        ("kv_max_fraction", 1.5),
    ],
)
def test_shares_that_are_no_shares_are_refused(
    model_folder: Folder, field: str, value: float
) -> None:
    core = make(model_folder)
    with pytest.raises(InvalidRequest) as error:
        core.add_request(request([5], **{field: value}))
    assert error.value.param == field
    assert not core.has_work


def test_fault_07_what_never_fits_a_tenants_maximum_is_refused_at_once(
    model_folder: Folder,
) -> None:
    core = make(model_folder, num_gpu_blocks_override=16)
    with pytest.raises(KVPoolTooSmall, match=r"up to 108 tokens.*holds 64 for it"):
        core.add_request(request([5] * 100, kv_max_fraction=0.25))
    core.add_request(request([5] * 10, kv_max_fraction=0.25, sampling={"max_tokens": None}))
    deltas = finish(core)["r", 0]
    assert len(tokens(deltas)) == 54
    assert deltas[-1].finish_reason == "length"


def test_a_limit_that_shrinks_under_a_running_request_ends_it_with_a_typed_error(
    model_folder: Folder,
) -> None:
    core = make(model_folder, num_gpu_blocks_override=16)
    core.add_request(request([5] * 40, "long", sampling={"max_tokens": 100}))
    core.step()
    core.add_request(request([6], "short", kv_max_fraction=0.25))
    outputs = finish(core)
    last = outputs["long", 0][-1]
    assert last.finish_reason == "error"
    assert last.error is not None
    assert last.error.code == KVPoolTooSmall("").code
    assert outputs["short", 0][-1].finish_reason == "length"


def test_histograms_tell_of_every_output_and_step(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request([1, 2, 3, 4], sampling={"n": 2, "max_tokens": 3}))
    finish(core)
    stats = core.snapshot()
    for name in ("queue", "prefill", "decode", "inference"):
        assert sum(stats.histograms[f"request_{name}_time_seconds"].counts) == 2
    steps = stats.histograms["iteration_tokens_total"]
    assert sum(steps.counts) == stats.steps_total
    assert stats.histograms["request_num_preemptions"].total == 0
    computed = stats.histograms["request_prefill_kv_computed_tokens"].total
    assert computed == 8 - stats.prefix_cache_hits_total


def test_what_never_began_is_in_no_histogram(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request([1, 2, 3, 4]))
    core.abort("r")
    assert not any(sum(histogram.counts) for histogram in core.snapshot().histograms.values())
