"""Under torchrun each rank has an engine, and all of them say what one rank says, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.core.engine_core import EngineCore
from engine.executor.external_launcher import launched_state
from tests.engine.ranks.test_tensor_parallel import outputs, running

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]
ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, os, sys
from pathlib import Path
from tests.engine.ranks.test_tensor_parallel import outputs, running
settings = json.loads(sys.argv[2])
settings["distributed_executor_backend"] = "external_launcher"
with running(Path(sys.argv[1]), **settings) as llm:
    assert llm.get_world_size() == llm.core.config.world_size
    Path(sys.argv[3], os.environ["RANK"]).write_text(json.dumps([outputs(llm), outputs(llm)]))
"""


def launch(folder: Path, target: Path, num_processes: int, **settings: Any) -> list[Any]:
    """What each process of a run says, twice in a row."""
    arguments = [PROGRAM, str(folder), json.dumps(settings), str(target)]
    program = target / "program.py"
    program.write_text(PROGRAM)
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_processes), str(program), *arguments[1:]),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=240,
    )
    return [json.loads((target / str(rank)).read_text()) for rank in range(num_processes)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "options"),
    [
        (2, {"size": 2}),
        (4, {"size": 2, "pipeline_parallel_size": 2}),
        (2, {"size": 1}),  # two models
        (2, {"size": 2, "async_scheduling": True}),
    ],
)
def test_ranks_of_torchrun_give_the_bits_of_one(
    model_folder: Folder, tmp_path: Path, num_processes: int, options: dict[str, Any]
) -> None:
    folder = model_folder("llama")
    with running(folder, 1) as llm:
        expected = json.loads(json.dumps(outputs(llm)))
    for said in launch(folder, tmp_path, num_processes, **options):
        assert said == [expected, expected]


def test_processes_are_dealt_into_models() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2)
    launched = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert launched_state(config, {**launched, "RANK": "3"}).rank == 1
    with pytest.raises(ConfigError, match=r"a multiple of .*, 2; got 3"):
        launched_state(config, {**launched, "RANK": "0", "WORLD_SIZE": "3"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT isn't set"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "is measured"),
    ],
)
def test_what_a_launcher_cannot_run_is_refused_by_name(
    model_folder: Folder, changes: dict[str, Any], reason: str
) -> None:
    config = EngineConfig(
        model=str(model_folder("llama")),
        tensor_parallel_size=2,
        distributed_executor_backend="external_launcher",
        **changes,
    )
    with pytest.raises(ConfigError, match=reason):
        EngineCore(config)
