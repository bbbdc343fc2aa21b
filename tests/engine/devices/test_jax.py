"""The JAX device: no program is compiled after the start, and answers are those of the CPU device.

In a process of its own: JAX has threads, which processes that fork can't have.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.devices.conformance.checks import TOLERANCE
from tests.engine.models import make_model
from tests.packages import DEVICE, install

pytest.importorskip("jax", reason="packages/jax-cpu isn't installed")
#: Processes that import JAX and compile take minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[3]
#: Generates with both devices: lone and joint requests, chunks, prefixes that are cached already
#: and those of the same step, prompts whose log probabilities are asked for.
SCRIPT = """
import json, sys
import jax
from engine import LLM, SamplingParams

folder, settings = sys.argv[1], json.loads(sys.argv[2])
events = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: events.append(event) if "/compile/" in event else None
)
prompts = [[3 + (7 * index + length) % 300 for index in range(length)]
           for length in (1, 2, 5, 16, 17, 33, 90, 41)]
greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
scored = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0, prompt_logprobs=0)
several = SamplingParams(temperature=1, seed=3, n=3, max_tokens=5, ignore_eos=True, logprobs=0)

def scores(rows):
    return [value.logprob for row in rows or [] if row for value in row.values()]

def answers(device):
    llm = LLM(folder, device=device, **settings)
    compiled = len(events)
    tokens, logprobs = [], []
    for asked, params in [
        (prompts, greedy), (prompts[5:6], greedy), (prompts, scored), (prompts[4:7], several),
        (prompts[4:7], several),
    ]:
        for request in llm.generate(asked, params, use_tqdm=False):
            logprobs += scores(request.prompt_logprobs)
            for output in request.outputs:
                tokens.append(list(output.token_ids))
                logprobs += scores(output.logprobs)
    llm.core.check_integrity()
    llm.core.shutdown()
    return tokens, logprobs, compiled

tokens, logprobs, compiled = answers("jax-cpu")
later = events[compiled:]
expected, expected_logprobs, _ = answers("cpu")
distance = max(abs(a - b) for a, b in zip(logprobs, expected_logprobs, strict=True))
print(json.dumps({"compiled": compiled, "later": later, "tokens": tokens,
                  "expected": expected, "distance": distance}))
"""
REFUSE = """
import json, sys
from engine import LLM
from engine.contract.errors import ConfigError

def refusal(folder, settings):
    try:
        LLM(folder, device="jax-cpu", **settings)
    except ConfigError as error:
        return error.param, error.message

print(json.dumps([refusal(*case) for case in json.loads(sys.argv[1])]))
"""

LOSE = """
import json, sys
import quire_jax
from engine import LLM, SamplingParams
from engine.contract.errors import EngineFault

llm = LLM(sys.argv[1], device="jax-cpu", max_model_len=64, max_num_seqs=1,
          num_gpu_blocks_override=8, dtype="float32")

def failing(shape, weights, layout, caches, *args):
    if sys.argv[2] == "lost":
        for cache in caches:
            cache.delete()
    quire_jax.run_layers = run_layers
    raise MemoryError("no room for the step")

run_layers, quire_jax.run_layers = quire_jax.run_layers, failing
try:
    output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)[0]
    print(json.dumps(str(output.error)))
except EngineFault as error:
    print(json.dumps(f"ended: {error}"))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(DEVICE.with_name("jax-cpu"), tmp_path_factory.mktemp("installed"))


def run_script(script: str, package: Path, *arguments: str) -> Any:
    """What a process with the package prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def run(folder: Path, package: Path, **settings: Any) -> dict[str, Any]:
    """What `SCRIPT` prints of a model."""
    defaults = {"dtype": "float32", "num_gpu_blocks_override": 60, "max_model_len": 128}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
    result: dict[str, Any] = run_script(
        SCRIPT, package, str(folder), json.dumps({**defaults, **limits, **settings})
    )
    return result


def assert_equal_without_compiling(result: dict[str, Any]) -> None:
    assert result["compiled"] > 0
    assert result["later"] == []
    assert result["tokens"] == result["expected"]
    assert result["distance"] <= TOLERANCE


@pytest.mark.system
def test_nothing_is_compiled_after_the_start_and_logits_are_the_cpu_devices(
    model_folder: Callable[[str], Path],
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_XLA_CACHE_PATH", str(tmp_path))
    assert_equal_without_compiling(run(model_folder("qwen2-window"), package))
    assert list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize(
    ("cache", "words"), [("kept", "no room for the step"), ("lost", "ended: .* KV cache")]
)
def test_a_step_that_loses_the_kv_cache_ends_the_engine(
    cache: str, words: str, model_folder: Callable[[str], Path], package: Path
) -> None:
    assert re.search(words, run_script(LOSE, package, str(model_folder("llama")), cache))


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("family", ["llama", "llama-rope3", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_more_families_and_block_sizes(
    family: str, block_size: int, model_folder: Callable[[str], Path], package: Path
) -> None:
    settings = {"block_size": block_size, "num_gpu_blocks_override": 960 // block_size}
    assert_equal_without_compiling(run(model_folder(family), package, **settings))


#: Model of `make_model`, settings, the field that is named, words of the sentence.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"model_type": "gpt_neox"}, {}, "model", "GPTNeoXForCausalLM has an MLP without a gate"),
    ({}, {"quantization": "int8"}, "quantization", "quantization can't be int8"),
    ({}, {"kv_cache_dtype": "int8"}, "kv_cache_dtype", "which keeps float32, bfloat16, float16"),
    ({}, {"model_impl": "transformers"}, "model", "runs models of the native decoder"),
]


@pytest.mark.system
def test_what_it_lacks_is_refused_by_name(tmp_path: Path, package: Path) -> None:
    cases = [
        (str(make_model("llama", tmp_path / str(index), **changes)), options)
        for index, (changes, options, _, _) in enumerate(REFUSED)
    ]
    answers = run_script(REFUSE, package, json.dumps(cases))
    for (_, _, param, words), (named, sentence) in zip(REFUSED, answers, strict=True):
        assert named == param
        assert words in sentence
