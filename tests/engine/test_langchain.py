"""LangChain's class on this engine, with `langchain-core` of the client libraries' environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.product import ROOT
from tests.e2e.test_clients import PYTHON
from tests.engine.models import make_model
from tests.services import missing

pytestmark = pytest.mark.system
#: The manual's snippet, with further fields and calls.
PROGRAM = """
import json, sys
sys.path.append(sys.argv[1])
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from engine.integrations.langchain import VLLM
from engine import LLM, SamplingParams

llm = VLLM(
    model=sys.argv[2],
    trust_remote_code=True,
    max_new_tokens=8,
    top_k=10,
    top_p=0.95,
    temperature=0.0,
    dtype="float32",
    vllm_kwargs={"max_model_len": 128, "num_gpu_blocks_override": 50},
)
prompts = ["What is the capital of France ?", "the quick brown"]
params = SamplingParams(temperature=0.0, max_tokens=8, top_k=10, top_p=0.95)
try:
    llm.invoke("x", temperature=-1)
except ValueError as error:
    refused = str(error)
set_llm_cache(InMemoryCache())
asked = llm.invoke(prompts[0])
cut = llm.model_copy(update={"max_new_tokens": 2}).invoke(prompts[0])
stopped = llm.model_copy(update={"stop": [asked[1:]]}).invoke(prompts[0])
smaller = LLM(sys.argv[2], max_model_len=8, num_gpu_blocks_override=50)
set_llm_cache(cache := InMemoryCache())
for client in (llm.client, smaller, smaller):
    VLLM(client=client, max_new_tokens=2).invoke("x")
set_llm_cache(None)
several = llm.generate(prompts, n=2, temperature=1.0, seed=1)
print(json.dumps({
    "called": llm(prompts[0]),
    "batch": llm.batch(prompts),
    "expected": [output.outputs[0].text for output in llm.client.generate(prompts, params)],
    "cut": llm.invoke(prompts[0], max_tokens=2),
    "counts": [len(generations) for generations in several.generations],
    "type": llm._llm_type,
    "refused": refused,
    "cached": [asked, cut, stopped],
    "keys": len(cache._cache),
}))
"""


def test_the_manuals_snippet_runs_on_langchains_class(tmp_path: Path) -> None:
    folders = list(PYTHON.parent.parent.glob("lib/python3*/site-packages/langchain_core"))
    if not folders:
        missing(f"langchain-core isn't beside {PYTHON} (make test installs it)")
    command = [sys.executable, "-c", PROGRAM, str(folders[0].parent)]
    done = subprocess.run(
        [*command, str(make_model("llama", tmp_path))],
        cwd=ROOT,
        env={**os.environ, "LANGSMITH_TRACING": "false"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["batch"] == answer["expected"]
    assert answer["called"] == answer["expected"][0]
    assert answer["expected"][0].startswith(answer["cut"])
    assert answer["counts"] == [2, 2]
    assert "temperature" in answer["refused"]
    # LangChain's cache tells models of other settings apart.
    assert answer["cached"] == [answer["called"], answer["cut"], answer["called"][:1]]
    assert answer["keys"] == 2
