"""Several KV connectors as one, and connectors that fail."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.replica_state import EngineStats
from engine.core.engine_core import EngineCore
from engine.kv_transfer.base import KVConnectorBase, KVConnectorBase_V1, KVLoadError
from engine.kv_transfer.multi_connector import MultiConnector
from engine.kv_transfer.offloading_connector import OffloadingConnector
from engine.kv_transfer.storage_queue import all_done
from tests.engine.kv_transfer.outside import DictConnector
from tests.engine.kv_transfer.test_offloading import forget_kv_cache, make, message, prompt, run

Folder = Callable[[str], Path]

DICT = {
    "kv_connector": "DictConnector",
    "kv_connector_module_path": "tests.engine.kv_transfer.outside",
}


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def connectors_of(core: EngineCore) -> list[Any]:
    connector = core.scheduler.kv_connector
    assert isinstance(connector, MultiConnector)
    return connector.connectors


def test_all_connectors_save_and_the_first_that_has_a_block_loads(model_folder: Folder) -> None:
    core = make(
        model_folder("llama"),
        kv_offloading_size=0.01,
        kv_transfer_config=multi({"kv_connector": "OffloadingConnector"}, DICT),
    )
    offloading, blocks = connectors_of(core)
    assert isinstance(offloading, OffloadingConnector)
    assert isinstance(blocks, DictConnector)
    assert blocks.role == "kv_both"
    prompts = {"a": prompt(1, 70), "b": prompt(2, 33)}
    expected = run(core, prompts)
    assert len(offloading.host) >= 6
    assert len(blocks.blocks) == 6

    loaded: list[Any] = []
    load = blocks.start_load_kv
    blocks.start_load_kv = lambda *args: (loaded.extend(blocks._metadata.loads), load(*args))  # type: ignore[method-assign]
    forget_kv_cache(core)
    assert run(core, prompts) == expected
    assert (offloading.num_matched_tokens, loaded) == (96, [])

    offloading.host.clear()
    forget_kv_cache(core)
    assert run(core, prompts) == expected
    assert (offloading.num_matched_tokens, len(loaded)) == (96, 6)


def test_preempted_sequences_come_back_from_the_swap_space_beside_another_connector(
    model_folder: Folder,
) -> None:
    settings = {"num_gpu_blocks_override": 12, "max_model_len": 128}
    prompts = {name: prompt(seed, 50) for seed, name in enumerate("abc")}
    expected = run(make(model_folder("llama"), **settings), prompts, max_tokens=40)
    core = make(
        model_folder("llama"),
        swap_space=0.01,
        kv_transfer_config=multi(DICT, {"kv_connector": "OffloadingConnector"}),
        **settings,
    )
    assert run(core, prompts, max_tokens=40) == expected
    assert core.scheduler.num_preemptions > 0
    assert connectors_of(core)[1].num_swapped == 0


def failing(core: EngineCore) -> None:
    """From now on the connector fails to load."""
    connector = core.scheduler.kv_connector
    assert isinstance(connector, DictConnector)

    def fail(*args: Any) -> None:
        if connector._metadata.loads:  # type: ignore[union-attr]
            raise OSError("the other side is gone")

    connector.start_load_kv = fail  # type: ignore[method-assign]


def test_by_default_a_request_whose_blocks_cannot_be_loaded_is_computed(
    model_folder: Folder,
) -> None:
    core = make(model_folder("llama"), kv_transfer_config=DICT)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    forget_kv_cache(core)
    failing(core)
    assert run(core, prompts) == expected


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_with_the_policy_fail_only_the_request_that_loads_fails(
    model_folder: Folder, async_scheduling: bool
) -> None:
    core = make(
        model_folder("llama"),
        kv_transfer_config={**DICT, "kv_load_failure_policy": "fail"},
        async_scheduling=async_scheduling,
    )
    expected = run(core, {"other": prompt(2, 70)})["other"]
    run(core, {"loads": prompt(1, 70)})
    forget_kv_cache(core)
    connector = core.scheduler.kv_connector
    assert isinstance(connector, DictConnector)
    core.add_request(message("loads", prompt(1, 70)))
    other = core.add_request(message("other", prompt(2, 70))).sequences[0]
    for block_hash in other.block_hashes.hash_full_blocks(other.token_ids, 16):
        connector.blocks.pop(block_hash, None)
    failing(core)
    deltas = [delta for _ in range(200) if core.has_work for delta in core.step()]
    errors = {delta.request_id: delta.error for delta in deltas if delta.finish_reason}
    assert errors["other"] is None
    assert errors["loads"] is not None
    assert "the other side is gone" in errors["loads"].message
    tokens = [token for delta in deltas if delta.request_id == "other" for token in delta.token_ids]
    assert tokens == expected
    core.check_integrity()


def test_vllms_name_of_the_base_class_is_known() -> None:
    assert KVConnectorBase_V1 is KVConnectorBase


def test_a_request_waits_for_all_readings_and_hears_of_a_failure() -> None:
    first: Future[None] = Future()
    second: Future[None] = Future()
    both = all_done([first, second])
    first.set_exception(OSError("bad disk"))
    assert not both.done()
    second.set_result(None)
    assert isinstance(both.exception(), OSError)
    assert all_done([second]) is second


@pytest.mark.parametrize(
    "config",
    [
        multi(),
        multi(multi(DICT)),
        multi({"kv_connector": "Other"}),
        multi({}, {}),
        multi({**DICT, "kv_load_failure_policy": "fail"}),
        {"kv_connector": "MultiConnector"},
        {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [DICT], "x": 1},
        },
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [1]}},
    ],
)
def test_connectors_that_cannot_work_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(model="m", kv_transfer_config=config)
    assert refusal.value.param == "kv_transfer_config"


class Recorder(DictConnector):
    """Records when it loads, and says that blocks are sent when it is told so."""

    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name, self.sent = calls, name, set[str]()

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        self.calls.append(self.name)

    def request_finished(
        self, request: Any, block_ids: list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return True, {"by": self.name}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent, self.sent = self.sent, set()
        return sent, set()


class RecordingOffloading(OffloadingConnector):
    """Nothing but a record of its loads."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        self.calls.append("offloading")


def test_preempted_blocks_are_saved_before_another_connector_overwrites_them() -> None:
    calls: list[str] = []
    connector = MultiConnector([Recorder(calls, "first"), RecordingOffloading(calls)])
    connector._bound = connector.connectors
    connector.start_load_kv()
    assert calls == ["offloading", "first"]


def test_a_load_that_fails_keeps_no_other_connector_from_loading() -> None:
    class Failing(Recorder):
        def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
            raise KVLoadError("it is gone")

    calls: list[str] = []
    connector = MultiConnector([Failing(calls, "first"), Recorder(calls, "second")])
    connector._bound = connector.connectors
    with pytest.raises(KVLoadError, match="gone"):
        connector.start_load_kv()
    assert calls == ["second"]


def test_figures_of_several_connectors_are_added() -> None:
    class Counting(Recorder):
        def __init__(self, name: str, stats: dict[str, Any]) -> None:
            super().__init__([], name)
            self.stats = stats

        def fill_stats(self, stats: EngineStats) -> None:
            for field, value in self.stats.items():
                setattr(stats, field, value)

    first = {"external_prefix_cache_hits_total": 32, "kv_tier_bytes": {"host": 5, "disk": 1}}
    second = {"external_prefix_cache_hits_total": 16, "kv_tier_bytes": {"host": 2}}
    connector = MultiConnector([Counting("first", first), Counting("second", second)])
    stats = EngineStats(mm_cache_hits_total=3)
    for _ in range(2):  # totals, not what came since the last time
        connector.fill_stats(stats)
    assert stats.external_prefix_cache_hits_total == 48
    assert stats.kv_tier_bytes == {"host": 7, "disk": 1}
    assert stats.mm_cache_hits_total == 3


def test_blocks_stay_until_all_connectors_have_sent_them(model_folder: Folder) -> None:
    first, second = Recorder([], "first"), Recorder([], "second")
    connector = MultiConnector([first, second])
    request = make(model_folder("llama")).add_request(message("a", prompt(1, 20)))
    assert connector.request_finished(request.sequences[0], [[1]]) == (True, {"by": "first"})
    first.sent = {"a"}
    assert connector.get_finished({"a"}) == (set(), set())
    second.sent = {"a"}
    assert connector.get_finished(set()) == ({"a"}, set())
