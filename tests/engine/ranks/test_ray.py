"""Ranks as actors of Ray say what one rank says, to the bit, and end with the engine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, EngineFault
from engine.core.engine_core import EngineCore
from tests.engine.ranks.test_tensor_parallel import outputs, running

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray isn't installed: pip install 'quire[ray]'.")
    ray.init(num_cpus=8, include_dashboard=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"worker_use_ray": True}),
        (1, {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2}),
        (2, {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2}),
    ],
)
def test_ranks_in_actors_give_the_bits_of_one(
    cluster: Any, model_folder: Folder, size: int, options: dict[str, Any]
) -> None:
    folder = model_folder("llama")
    with running(folder, 1) as llm:
        expected = outputs(llm)
    with running(folder, size, **options) as llm:
        assert outputs(llm) == expected
        process_ids = llm.core.executor.process_ids
        assert len(process_ids) == llm.get_world_size() - 1
    end = time.monotonic() + 60
    while any(Path(f"/proc/{process_id}").exists() for process_id in process_ids):
        assert time.monotonic() < end


@pytest.mark.slow
def test_a_killed_actor_ends_the_engine_and_is_named(cluster: Any, model_folder: Folder) -> None:
    with running(model_folder("llama"), 2, distributed_executor_backend="ray") as llm:
        assert outputs(llm)
        os.kill(llm.core.executor.process_ids[0], signal.SIGKILL)
        end = time.monotonic() + 60
        with pytest.raises(EngineFault, match="Rank 1"):  # noqa: PT012
            while time.monotonic() < end:
                outputs(llm)


@pytest.mark.slow
def test_a_cluster_without_the_cpus_is_refused_with_the_numbers(
    cluster: Any, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.executor.ray_ranks._PLACEMENT_TIMEOUT_S", 1.0)
    config = EngineConfig(
        model=str(model_folder("llama")),
        tensor_parallel_size=2,
        num_threads=64,
        distributed_executor_backend="ray",
    )
    with pytest.raises(ConfigError, match=r"no 32 CPUs for the ranks; it has \d free of 8"):
        EngineCore(config)


@pytest.mark.slow
def test_a_placement_group_goes_with_ranks_that_do_not_meet(
    cluster: Any, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise EngineFault("Rank 1 did not join.")

    monkeypatch.setattr("engine.executor.remote_ranks.Rendezvous", refuse)
    config = EngineConfig(
        model=str(model_folder("llama")),
        tensor_parallel_size=2,
        num_threads=2,
        distributed_executor_backend="ray",
    )
    with pytest.raises(EngineFault, match="did not join"):
        EngineCore(config)
    end = time.monotonic() + 60
    table = cluster.util.placement_group_table
    while any(group["state"] != "REMOVED" for group in table().values()):
        assert time.monotonic() < end


def test_without_ray_it_is_said_what_to_install(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = EngineConfig(
        model=str(model_folder("llama")),
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )
    with pytest.raises(ConfigError, match=r"needs Ray: pip install 'quire\[ray\]'"):
        EngineCore(config)
