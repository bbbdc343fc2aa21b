"""Batch inference by Ray Data, as vLLM's example writes it, on a Ray of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.product import ROOT
from tests.engine.models import make_model

pytest.importorskip("ray", reason="Ray isn't among the dependencies: pip install 'ray[data]'")
pytestmark = [pytest.mark.system, pytest.mark.slow]
#: vLLM's example with `engine` for `vllm`, a file for a bucket, and two instances, which ask for
#: the GPUs that Ray is told of.
PROGRAM = """
import json, sys
from typing import Dict, List

import numpy as np
import ray

from engine import LLM, SamplingParams

model, prompts = sys.argv[1:]
ray.init(num_cpus=4, num_gpus=2, include_dashboard=False)
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=8)


class LLMPredictor:
    def __init__(self):
        self.llm = LLM(model=model, tensor_parallel_size=1, dtype="float32", max_model_len=128,
                       num_gpu_blocks_override=50)

    def __call__(self, batch: Dict[str, np.ndarray]) -> Dict[str, list]:
        outputs = self.llm.generate(batch["text"], sampling_params)
        prompt: List[str] = []
        generated_text: List[str] = []
        for output in outputs:
            prompt.append(output.prompt)
            generated_text.append(" ".join([o.text for o in output.outputs]))
        return {"prompt": prompt, "generated_text": generated_text}


ds = ray.data.read_text(prompts)
ds = ds.map_batches(LLMPredictor, concurrency=2, batch_size=4, num_gpus=1)
answers = {row["prompt"]: row["generated_text"] for row in ds.take_all()}
llm = LLMPredictor()
alone = llm({"text": np.array(list(answers))})
print(json.dumps([answers, dict(zip(alone["prompt"], alone["generated_text"]))]))
"""


@pytest.mark.timeout(600)
def test_ray_data_maps_batches_over_engines(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"the quick brown fox {number}\n" for number in range(12)))
    model = make_model("llama", tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(prompts)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers, isolated = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == 12
    assert answers == isolated
