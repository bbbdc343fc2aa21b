"""A rank is killed or frozen at any moment: the engine ends and names it, and leaves no process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from chaos.connections import end_connections
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import EngineFault
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.serving.service import EXIT_FAULT, EngineService
from engine.system.step_record import VARIABLE, SharedStepRecord

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]
ROOT = Path(__file__).resolve().parents[3]
#: Longer than anything takes; only a process that hangs comes to it.
PATIENCE_S = 60.0

_ENGINE = """
import sys
from chaos.connections import end_connections
from engine.contract.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
core = EngineCore(EngineConfig(model=sys.argv[1], tensor_parallel_size=2,
                               num_gpu_blocks_override=64))
print(*core.executor.process_ids, flush=True)
sys.stdin.read()
"""


def make_core(folder: Path) -> EngineCore:
    return EngineCore(
        EngineConfig(model=str(folder), tensor_parallel_size=2, num_gpu_blocks_override=64)
    )


def serve(core: EngineCore) -> None:
    """Run steps, and watch the ranks when there are none to run, as a replica does."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        core.check_health()
        if core.has_work:
            core.step()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return status != "Z"


def send(number: int) -> Callable[[int], object]:
    """Has a process get a signal."""
    return lambda process: os.kill(process, number)


def strike(folder: Path, blow: Callable[[int], object], delay_s: float) -> None:
    """Harm a rank's process while steps run: the engine ends, and the rank with it."""
    core = make_core(folder)
    (process,) = core.executor.process_ids
    try:
        core.add_request(
            EngineRequest(
                request_id="r",
                gateway_id="g",
                prompt_token_ids=list(range(3, 60)),
                sampling=SamplingParams(temperature=0, max_tokens=400, ignore_eos=True),
            )
        )
        timer = threading.Timer(delay_s, blow, (process,))
        timer.start()
        with pytest.raises(EngineFault, match="Rank 1"):
            serve(core)
        timer.join()
        with pytest.raises(EngineFault, match="Rank 1"):
            core.check_health()
    finally:
        core.shutdown()
    assert not is_running(process)


@pytest.mark.parametrize("blow", [send(signal.SIGKILL), send(signal.SIGSTOP), end_connections])
def test_a_lost_rank_ends_the_engine(model_folder: Folder, blow: Callable[[int], object]) -> None:
    strike(model_folder("llama"), blow, random.uniform(0.0, 0.3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_a_rank_lost_at_any_moment_ends_the_engine(model_folder: Folder, seed: int) -> None:
    rng = random.Random(seed)
    blow = send(rng.choice([signal.SIGKILL, signal.SIGSTOP]))
    strike(model_folder("llama"), blow, rng.uniform(0.0, 0.5))


def test_a_replica_ends_with_its_rank_and_says_which(
    model_folder: Folder, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(model_folder("llama")), tensor_parallel_size=2, num_gpu_blocks_override=64
    )
    record = SharedStepRecord.create()
    assert record is not None
    monkeypatch.setenv(VARIABLE, str(record.fd))
    service = EngineService(config, "ranks", redis.Redis.from_url(redis_url), "ranks")
    load = service._load

    def load_and_strike() -> EngineCore:
        core = load()
        os.kill(core.executor.process_ids[0], signal.SIGKILL)
        return core

    service._load = load_and_strike
    assert service.run(1.0) == EXIT_FAULT
    assert record.read_fault().startswith("Rank 1 ")  # what its supervisor shows


def test_no_rank_outlives_a_first_one_that_is_killed(model_folder: Folder) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(model_folder("llama"))],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with engine:
        process = int(engine.stdout.readline())
        assert is_running(process)
        engine.kill()
    end = time.monotonic() + PATIENCE_S
    while is_running(process) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(process)
