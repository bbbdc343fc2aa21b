"""What a replica's start must not load: each of these would add seconds to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_PROBE = """
import sys
import engine.serving.service
from engine.contract.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up
core = EngineCore(EngineConfig(model="demo/model", num_gpu_blocks_override=64))
warm_up(core)
slow = {"transformers", "torch._dynamo", "torch._inductor", "torch.onnx", "triton", "sympy",
        "scipy", "django", "llguidance", "huggingface_hub", "PIL"}
print(sorted(slow & set(sys.modules)))
"""


@pytest.mark.system
def test_a_replica_of_a_native_model_starts_without_what_is_slow_to_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
