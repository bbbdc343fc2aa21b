"""No kernel is compiled while a GPU serves: the warm-up has come by every binary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.models import make_model
from tests.engine.speculative.eagle_folders import eagle_parts
from tests.engine.speculative.head_folders import write

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "head_dim": 16}  # fmt: skip

GLM = {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32, "head_dim": 16, "first_k_dense_replace": 0,
       "n_shared_experts": 1}  # fmt: skip

#: DeepSeek V3's: latents of 64 values, experts of two groups out of four.
LATENTS = {"model_type": "deepseek_v3", "kv_lora_rank": 64, "q_lora_rank": 24, "head_dim": 16,
           "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 4,
           "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "first_k_dense_replace": 0}  # fmt: skip

#: Changes of a model's settings, and its quantization, by what they are called.
CASES: dict[str, tuple[dict[str, object], str]] = {
    "plain": ({}, ""),
    "experts": (EXPERTS, ""),
    "experts in int8": (EXPERTS, "int8"),
    "int4": ({}, "int4"),
    "heads": ({}, ""),
    "sigmoids": (GLM, ""),
    "latents": (LATENTS, ""),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was found of each case, by one process: to import all it needs takes longer than one."""
    words: list[str] = []
    for name, (change, quantization) in CASES.items():
        folder = tmp_path_factory.mktemp("counted")
        words += str(make_model("llama", folder, num_hidden_layers=1, **change)), quantization
        if name == "heads":
            write(folder / "heads", *eagle_parts())
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.cuda.compilations", *words],
        capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_serving_compiles_nothing_after_the_warm_up(
    counted: dict[str, dict[str, Any]], case: str
) -> None:
    """A chat that grew to 8,200 tokens took 35 binaries, a second or more each."""
    compilations = counted[case]
    assert compilations["later"] == []
    # All of them are kernels of the operations that a step has: the count was taken at all.
    assert compilations["warm"] >= 16
