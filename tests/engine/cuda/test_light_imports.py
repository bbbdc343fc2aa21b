"""The engine and its benchmarks run on a machine that has little beside torch and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: What `pip install torch triton transformers msgspec` doesn't bring.
ABSENT = (
    *("django", "rest_framework", "adrf", "channels", "channels_redis", "daphne", "uvicorn"),
    *("celery", "prometheus_client", "django_prometheus", "allauth", "pydantic", "dj_database_url"),
    *("servestatic", "corsheaders", "drf_spectacular", "redis", "hiredis", "llguidance"),
    *("openai", "playwright", "granian", "sentence_transformers", "gguf", "psutil"),
)
PROGRAM = """
import json, sys, tempfile
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in set(sys.argv[1].split(",")):
            raise ModuleNotFoundError(f"{name} isn't installed here", name=name)

sys.meta_path.insert(0, Absent())
import benchmarks.kernels.gpu, kernels.triton, kernels.attention
import benchmarks.gpu as bench
from engine import LLM, SamplingParams

with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(bench.smoke_sizes().shape))
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="float32", device="cpu",
              cpu_kernels=False, max_model_len=64, num_gpu_blocks_override=8)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    print(len(llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids))
"""


@pytest.mark.system
def test_nothing_of_the_gateway_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(ABSENT)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["3"]
