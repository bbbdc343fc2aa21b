"""An executor's threads end with it, and one that can run no more steps says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import EngineFault
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.executor.abstract import Executor
from engine.serving.service import EngineService

Folder = Callable[[str], Path]


def make_config(model_folder: Folder) -> EngineConfig:
    return EngineConfig(
        model=str(model_folder("llama")), num_gpu_blocks_override=64, async_scheduling=True
    )


def run_one(core: EngineCore) -> None:
    core.add_request(
        EngineRequest(
            request_id="r",
            gateway_id="g",
            prompt_token_ids=[5, 6, 7],
            sampling=SamplingParams(temperature=0, max_tokens=3),
        )
    )
    while core.has_work:
        core.step()


def test_threads_end_with_the_executor(model_folder: Folder) -> None:
    initial = set(threading.enumerate())
    core = EngineCore(make_config(model_folder))
    run_one(core)
    (thread,) = [path for path in set(threading.enumerate()) - initial if path.name == "steps"]
    core.check_health()
    core.shutdown()
    thread.join(60)
    assert not thread.is_alive()


def test_an_executor_without_its_thread_is_not_healthy(model_folder: Folder) -> None:
    core = EngineCore(make_config(model_folder))
    run_one(core)
    thread = core.executor._thread
    thread.close()
    thread._thread.join(60)
    with pytest.raises(EngineFault, match="thread that runs steps"):
        core.check_health()


def test_a_replica_that_can_run_no_more_steps_ends(
    model_folder: Folder, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model_folder)
    service = EngineService(config, "lost", redis.Redis.from_url(redis_url), "lost")

    def lost() -> None:
        raise EngineFault("The device is lost.")

    def load() -> EngineCore:
        core = EngineCore(config)
        monkeypatch.setattr(core.executor, "check_health", lost)
        return core

    monkeypatch.setattr(service, "_load", load)
    assert service.run(1.0) == 70
    assert service.core is not None


def test_the_executor_in_this_process_is_an_executor(model_folder: Folder) -> None:
    core = EngineCore(make_config(model_folder))
    missing = [
        name
        for name in vars(Executor)
        if not name.startswith("_") and not hasattr(core.executor, name)
    ]
    assert not missing
