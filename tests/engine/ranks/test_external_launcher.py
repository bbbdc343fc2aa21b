"""Under torchrun each rank has an engine, and all of them say what one rank says, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, AsyncLLM, LoRARequest, SamplingParams, StructuredOutputsParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.core.engine_core import EngineCore
from engine.executor.external_launcher import launched_state
from tests.engine.ranks.test_adapters import adapter
from tests.engine.ranks.test_tensor_parallel import PROMPTS, outputs, running

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


#: Rank 1 has a grammar and an adapter long after rank 0, which runs another request meanwhile.
LATE_RANK = """
import json, os, sys, time
from pathlib import Path
from engine.lora.adapter_cache import AdapterManager
from engine.structured_output.manager import StructuredOutputManager
from tests.engine.ranks.test_external_launcher import mixed_outputs
from tests.engine.ranks.test_tensor_parallel import running
def ready_later(gate):
    poll_ready, start = gate.poll_ready, time.monotonic()
    gate.poll_ready = lambda self, timeout_s: (
        poll_ready(self, timeout_s) if time.monotonic() > start + 2 else []
    )
settings = json.loads(sys.argv[2])
settings["distributed_executor_backend"] = "external_launcher"
with running(Path(sys.argv[1]), **settings) as llm:
    if os.environ["RANK"] == "1":
        ready_later(AdapterManager)
        ready_later(StructuredOutputManager)
    Path(sys.argv[3], os.environ["RANK"]).write_text(json.dumps(mixed_outputs(llm, sys.argv[4])))
"""


def mixed_outputs(llm: LLM, adapter_folder: str) -> list[list[int]]:
    """The tokens of a request, of one with a grammar, and of one with an adapter."""
    grammar = StructuredOutputsParams(regex="[a-z]{4,9}")
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        [
            SamplingParams(temperature=0, max_tokens=200, ignore_eos=True),
            SamplingParams(temperature=1, seed=3, max_tokens=12, structured_outputs=grammar),
            SamplingParams(temperature=1, seed=4, max_tokens=12, ignore_eos=True),
        ],
        use_tqdm=False,
        lora_request=[None, None, LoRARequest("adapter", 1, adapter_folder)],
    )
    return [list(result.outputs[0].token_ids) for result in results]


def launch(
    folder: Path,
    target: Path,
    num_processes: int,
    text: str = PROGRAM,
    arguments: Sequence[str] = (),
    **settings: Any,
) -> list[Any]:
    """What each process of a run of the program `text` writes."""
    program = target / "program.py"
    program.write_text(text)
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_processes), str(program)),
            *(str(folder), json.dumps(settings), str(target), *arguments),
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
    for ranks_output in launch(folder, tmp_path, num_processes, **options):
        assert ranks_output == [expected, expected]


@pytest.mark.slow
def test_a_rank_that_has_a_grammar_and_an_adapter_later_gives_the_same_bits(
    model_folder: Folder, tmp_path: Path
) -> None:
    folder, adapter_folder = model_folder("llama"), tmp_path / "adapter"
    adapter(folder, adapter_folder, 1)
    with running(folder, 1) as llm:
        expected = mixed_outputs(llm, str(adapter_folder))
    for ranks_output in launch(folder, tmp_path, 2, LATE_RANK, [str(adapter_folder)], size=2):
        assert ranks_output == expected


def test_asyncllm_is_refused_by_name() -> None:
    config = EngineConfig(
        model="m", tensor_parallel_size=2, distributed_executor_backend="external_launcher"
    )
    with pytest.raises(ConfigError, match="can't be used with AsyncLLM"):
        AsyncLLM(config)


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
