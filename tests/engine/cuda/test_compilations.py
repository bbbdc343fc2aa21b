"""No kernel is compiled while a GPU serves: the warm-up has come by every binary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.models import make_model

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "head_dim": 16}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("change", "quantization"), [({}, []), (EXPERTS, []), (EXPERTS, ["int8"]), ({}, ["int4"])],
    ids=["plain", "experts", "experts in int8", "int4"],
)  # fmt: skip
def test_serving_compiles_nothing_after_the_warm_up(
    change: dict[str, object], quantization: list[str], tmp_path: Path
) -> None:
    """A chat that grew to 8,200 tokens took 35 binaries, a second or more each."""
    folder = make_model("llama", tmp_path, num_hidden_layers=1, **change)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.cuda.compilations", str(folder), *quantization],
        capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["later"] == []
    # All of them are kernels of the operations that a step has: the count was taken at all.
    assert found["warm"] >= 16
