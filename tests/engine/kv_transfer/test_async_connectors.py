"""Connectors that load while steps run, and that keep the blocks of ended requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.errors import EngineOverloaded, InvalidRequest
from engine.contract.messages import TokenDelta
from engine.core.engine_core import EngineCore
from engine.executor.worker import Worker
from engine.scheduler.request import SequenceStatus
from tests.engine.kv_transfer.outside import AsyncConnector
from tests.engine.kv_transfer.test_connectors import multi
from tests.engine.kv_transfer.test_offloading import forget_kv_cache, make, message, prompt, run

Folder = Callable[[str], Path]

ASYNC = {
    "kv_connector": "AsyncConnector",
    "kv_connector_module_path": "tests.engine.kv_transfer.outside",
}


def connector_of(core: EngineCore) -> AsyncConnector:
    connector: Any = core.scheduler.kv_connector
    [connector] = [c for c in getattr(connector, "connectors", [connector]) if hasattr(c, "sends")]
    assert isinstance(connector, AsyncConnector)
    return connector


def make_saved(
    folder: Path,
    prompts: dict[str, list[int]],
    other_prompts: dict[str, list[int]] | None = None,
    **settings: Any,
) -> tuple[EngineCore, AsyncConnector, dict[str, list[int]]]:
    """An engine whose connector alone has the prompts' blocks, but not the others', and the tokens
    of all.
    """
    core = make(folder, **{"kv_transfer_config": ASYNC, **settings})
    connector, expected = connector_of(core), run(core, prompts)
    saved = dict(connector.blocks)
    expected |= run(core, other_prompts or {})
    connector.blocks = saved
    forget_kv_cache(core)
    return core, connector, expected


def step_until(core: EngineCore, is_done: Callable[[], object]) -> list[TokenDelta]:
    deltas: list[TokenDelta] = []
    for _ in range(2000):
        if is_done():
            return deltas
        assert core.has_work
        deltas += core.step()
        core.check_integrity()
    raise AssertionError("It never came.")


def tokens_of(deltas: list[TokenDelta], request_id: str) -> list[int]:
    return [
        token for delta in deltas if delta.request_id == request_id for token in delta.token_ids
    ]


@pytest.mark.parametrize(
    "kv_transfer_config", [ASYNC, multi({"kv_connector": "OffloadingConnector"}, ASYNC)]
)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_waits_for_its_blocks_while_others_run(
    model_folder: Folder, async_scheduling: bool, kv_transfer_config: dict[str, Any]
) -> None:
    offloads = {"swap_space": 0.01} if "Multi" in kv_transfer_config["kv_connector"] else {}
    core, connector, expected = make_saved(
        model_folder("llama"), {"a": prompt(1, 70)}, {"b": prompt(2, 20)},
        async_scheduling=async_scheduling, kv_transfer_config=kv_transfer_config, **offloads,
    )  # fmt: skip
    sequence = core.add_request(message("a", prompt(1, 70))).sequences[0]
    core.add_request(message("b", prompt(2, 20)))
    deltas = step_until(core, lambda: "b" not in core.requests)
    assert tokens_of(deltas, "b") == expected["b"]
    assert sequence.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
    assert (core.snapshot().num_requests_waiting, connector.all_finished) == (1, {"a", "b"})
    connector.receive()
    assert run(core, {"a": []}) == {"a": expected["a"]}
    assert sequence.num_cached_tokens == 64
    assert not core.snapshot().kv_tier_failures_total


def test_blocks_that_were_not_received_are_computed_with_those_after_them(
    model_folder: Folder,
) -> None:
    core, connector, expected = make_saved(model_folder("llama"), {"a": prompt(1, 70)})
    sequence = core.add_request(message("a", prompt(1, 70))).sequences[0]
    step_until(core, lambda: connector.receiving)
    connector.receive(num_lost=3)
    assert run(core, {"a": []}) == expected
    assert sequence.num_cached_tokens == 16
    assert core.snapshot().kv_tier_failures_total == {"load_error": 3}


def test_with_the_policy_fail_a_request_whose_blocks_were_not_received_ends(
    model_folder: Folder,
) -> None:
    config = {**ASYNC, "kv_load_failure_policy": "fail"}
    core, connector, _ = make_saved(
        model_folder("llama"), {"a": prompt(1, 70)}, kv_transfer_config=config
    )
    core.add_request(message("a", prompt(1, 70)))
    step_until(core, lambda: connector.receiving)
    connector.receive(num_lost=1)
    [delta] = step_until(core, lambda: not core.requests)
    assert delta.error is not None
    assert "KV blocks" in delta.error.message
    assert run(core, {}) == {}


def test_blocks_that_come_late_never_meet_another_requests(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, connector, expected = make_saved(model_folder("llama"), {"a": prompt(1, 70)})
    monkeypatch.setattr("engine.scheduler.kv_transfers.READ_TIMEOUT_S", 0.0)
    core.add_request(message("a", prompt(1, 70)))
    deltas = step_until(core, lambda: not core.requests)
    assert tokens_of(deltas, "a") == expected["a"]
    assert core.snapshot().kv_tier_failures_total == {"late": 1}
    allocated = {block_id for _, block_id in connector.receiving["a"]}
    assert len(allocated) == core.capacity.num_blocks - core.scheduler.kv.pool.num_free_blocks == 4
    assert allocated.isdisjoint(
        block.block_id for block in core.scheduler.kv.pool.free_blocks_in_order
    )
    connector.receive()
    assert run(core, {}) == {}  # all blocks are free


def test_an_aborted_requests_blocks_stay_until_its_load_has_ended(model_folder: Folder) -> None:
    core, connector, _ = make_saved(
        model_folder("llama"), {"a": prompt(1, 70)}, enable_sleep_mode=True
    )
    core.add_request(message("a", prompt(1, 70), tenant="t"))
    step_until(core, lambda: connector.receiving)
    [delta] = core.abort("a")
    assert delta.finish_reason == "abort"
    core.check_integrity()
    assert core.scheduler.kv.quotas.get("t").used == 4
    assert not core.reset_prefix_cache()
    with pytest.raises(EngineOverloaded, match="of 1 requests"):
        core.sleep()
    connector.receive()
    assert run(core, {}) == {}
    assert core.reset_prefix_cache()


def test_the_blocks_of_an_ended_request_stay_until_they_are_sent(model_folder: Folder) -> None:
    prompts = {name: prompt(seed, 70) for seed, name in enumerate("abcdef")}
    expected = run(make(model_folder("llama")), prompts)
    core = make(model_folder("llama"), kv_transfer_config=ASYNC, num_gpu_blocks_override=24)
    connector = connector_of(core)
    connector.sends, connector.blocks = True, {}
    for name, token_ids in prompts.items():
        core.add_request(message(name, token_ids))
    deltas: list[TokenDelta] = []
    while core.requests:
        deltas += step_until(core, lambda: not core.requests or len(connector.sending) > 1)
        connector.send()
    assert {name: tokens_of(deltas, name) for name in prompts} == expected
    ends = [delta.kv_transfer_params for delta in deltas if delta.finish_reason]
    assert ends == [{"remote_port": 5600}] * len(prompts)
    assert run(core, {}) == {}


def test_a_failed_step_forgets_no_load_that_it_should_have_begun(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_prompts = {"b": prompt(2, 20), "c": prompt(3, 20)}  # one alone would end with the error
    core, connector, expected = make_saved(
        model_folder("llama"), {"a": prompt(1, 70)}, other_prompts
    )
    execute, failures = Worker.execute, [RuntimeError("once")]

    def fail_once(worker: Worker, plan: Any) -> Any:
        if failures:
            raise failures.pop()
        return execute(worker, plan)

    monkeypatch.setattr(Worker, "execute", fail_once)
    core.add_request(message("a", prompt(1, 70)))
    assert run(core, {"a": [], **other_prompts}) == expected
    assert not connector.receiving


def test_each_output_of_a_request_and_each_tenant_waits_for_its_own_blocks(
    model_folder: Folder,
) -> None:
    core, connector, expected = make_saved(model_folder("llama"), {"a": prompt(1, 70)})
    request = message("x", prompt(1, 70), tenant="t")
    request.sampling.n = 2
    core.add_request(request)
    core.add_request(message("y", prompt(1, 70), tenant="u", cache_namespace="u"))
    deltas = step_until(core, lambda: len(connector.receiving) == 2)
    deltas += step_until(
        core, lambda: "y" not in core.requests
    )  # nothing is saved in its namespace
    assert set(connector.receiving) == {"x", "1_x"}
    connector.receive()
    deltas += step_until(core, lambda: not core.requests)
    for index in range(2):
        outputs = [delta for delta in deltas if (delta.request_id, delta.index) == ("x", index)]
        assert tokens_of(outputs, "x") == expected["a"]
    assert tokens_of(deltas, "y") == expected["a"]
    assert run(core, {}) == {}


def test_many_loads_in_a_small_pool_leave_every_text_as_it_is(model_folder: Folder) -> None:
    prompts = {name: prompt(seed, 50) for seed, name in enumerate("abcdefgh")}
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 14,
        "max_model_len": 128,
        "max_num_seqs": 4,
    }
    core, connector, expected = make_saved(model_folder("llama"), prompts, **settings)
    for name, token_ids in prompts.items():
        core.add_request(message(name, token_ids))
    deltas: list[TokenDelta] = []
    for _ in range(2000):
        if not core.has_work:
            break
        deltas += core.step()
        core.check_integrity()
        if len(connector.receiving) > 2 or core.scheduler.num_steps % 5 == 0:
            connector.receive(num_lost=core.scheduler.num_steps % 2)
    assert {name: tokens_of(deltas, name) for name in prompts} == expected
    assert run(core, {}) == {}


def test_a_tenant_that_waits_for_its_loads_keeps_no_other_from_starting(
    model_folder: Folder,
) -> None:
    core, connector, expected = make_saved(
        model_folder("llama"), {"a": prompt(1, 70)}, {"b": prompt(2, 90)},
        max_num_seqs=1, scheduling_policy="fair",
    )  # fmt: skip
    core.add_request(message("a", prompt(1, 70), tenant="first"))
    step_until(core, lambda: connector.receiving)
    core.add_request(message("again", prompt(1, 70), tenant="first"))
    core.add_request(message("b", prompt(2, 90), tenant="second"))
    deltas = step_until(core, lambda: "b" not in core.requests)
    assert tokens_of(deltas, "b") == expected["b"]
    connector.receive()
    assert run(core, {"a": [], "again": []}) == {"a": expected["a"], "again": expected["a"]}


def test_without_a_prefix_cache_what_would_be_loaded_meanwhile_is_computed(
    model_folder: Folder,
) -> None:
    core, connector, expected = make_saved(
        model_folder("llama"), {"a": prompt(1, 70)}, enable_prefix_caching=False
    )
    assert run(core, {"a": prompt(1, 70)}) == expected
    assert not connector.receiving


def test_blocks_that_came_late_are_not_loaded_again_under_the_same_id(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, connector, expected = make_saved(model_folder("llama"), {"a": prompt(1, 70)})
    monkeypatch.setattr("engine.scheduler.kv_transfers.READ_TIMEOUT_S", 0.0)
    request = core.add_request(message("a", prompt(1, 70)))
    deltas = step_until(core, lambda: request.sequences[0].num_output_tokens > 1)
    first = connector.receiving["a"]
    deltas += core.preempt_all()
    core.scheduler.kv.uncache_all(request.sequences[0].block_hashes)
    deltas += step_until(core, lambda: not core.requests)
    assert tokens_of(deltas, "a") == expected["a"]
    assert connector.receiving["a"] == first
    connector.receive()
    assert run(core, {}) == {}


def test_an_id_is_in_use_until_its_blocks_are_free(model_folder: Folder) -> None:
    core, connector, expected = make_saved(model_folder("llama"), {"a": prompt(1, 70)})
    core.add_request(message("a", prompt(1, 70)))
    step_until(core, lambda: connector.receiving)
    core.abort("a")
    with pytest.raises(InvalidRequest, match="'a'") as refusal:
        core.add_request(message("a", prompt(2, 70)))
    assert refusal.value.param == "request_id"
    connector.receive()
    assert run(core, {}) == {}
    core.add_request(message("a", prompt(1, 70)))
    step_until(core, lambda: connector.receiving)
    connector.receive()
    assert run(core, {"a": []}) == expected


def test_blocks_that_an_aborted_request_did_not_get_are_no_failure_of_another(
    model_folder: Folder,
) -> None:
    prompts = {name: prompt(seed, 70) for seed, name in enumerate("abc")}
    core, connector, expected = make_saved(
        model_folder("llama"), prompts, num_gpu_blocks_override=9, max_model_len=96
    )
    for name in "ac":
        core.add_request(message(name, prompts[name]))
    step_until(core, lambda: len(connector.receiving) == 2)
    other_loads = {"c": connector.receiving.pop("c")}  # whose load goes on
    core.abort("a")
    connector.receive(num_lost=4)
    core.step()
    core.add_request(message("b", prompts["b"]))
    deltas = step_until(core, lambda: "b" in connector.receiving)
    connector.receive()
    connector.receiving |= other_loads
    connector.receive()
    deltas += step_until(core, lambda: not core.requests)
    assert {name: tokens_of(deltas, name) for name in "bc"} == {
        name: expected[name] for name in "bc"
    }
    assert not core.snapshot().kv_tier_failures_total


def test_sleep_waits_until_what_the_last_step_ended_is_sent(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(
        model_folder("llama"),
        kv_transfer_config=ASYNC,
        enable_sleep_mode=True,
        async_scheduling=True,
    )
    connector = connector_of(core)
    connector.sends, connector.blocks = True, {}
    get_finished = connector.get_finished

    def send(finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        connector.send()
        return get_finished(finished_req_ids)

    monkeypatch.setattr(connector, "get_finished", send)
    request = core.add_request(message("a", prompt(1, 20), max_tokens=2))
    step_until(core, lambda: request.sequences[0].ends_in_flight)
    assert core.sleep()[-1].finish_reason == "length"
    assert core.is_sleeping
