"""Programs in the shape of vLLM's manual run with nothing but the name in their imports changed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OFFLINE = """
from vllm import LLM, SamplingParams

prompts = ["the quick brown", "the lazy dog jumps", "the"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="facebook/opt-125m")
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt, generated_text = output.prompt, output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
assert [output.prompt for output in outputs] == prompts
"""

PREFIX = """
from time import time

from vllm import LLM, SamplingParams

prefix = "the quick brown fox jumps over the lazy dog and then the quick brown fox jumps over " * 3
prompts = [prefix + end for end in ("the dog", "the fox", "a hen")]
sampling_params = SamplingParams(temperature=0.0)
regular_llm = LLM(model="facebook/opt-125m", gpu_memory_utilization=0.4)
prefix_cached_llm = LLM(model="facebook/opt-125m", enable_prefix_caching=True,
                        gpu_memory_utilization=0.4)
start_time = time()
regular = [output.outputs[0].text for output in regular_llm.generate(prompts, sampling_params)]
prefix_cached_llm.generate(prompts[0], sampling_params)
outputs = prefix_cached_llm.generate(prompts, sampling_params)
assert [output.outputs[0].text for output in outputs] == regular
assert all(output.num_cached_tokens > 0 for output in outputs)
"""

ENGINE = """
import argparse
from typing import List, Tuple

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils import FlexibleArgumentParser

finished = []

def create_test_prompts() -> List[Tuple[str, SamplingParams]]:
    return [
        ("the dog", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("the fox", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("the hen", SamplingParams(n=2, best_of=5, temperature=0.8, top_p=0.95,
                                   frequency_penalty=0.1)),
        ("the lazy", SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0)),
    ]

def process_requests(engine: LLMEngine, test_prompts: List[Tuple[str, SamplingParams]]):
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        request_outputs: List[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                print(request_output)
                finished.append(request_output)

def main(args: argparse.Namespace):
    engine_args = EngineArgs.from_cli_args(args)
    engine = LLMEngine.from_engine_args(engine_args)
    process_requests(engine, create_test_prompts())

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="Demo on using the LLMEngine class directly")
    parser = EngineArgs.add_cli_args(parser)
    main(parser.parse_args())
    by_id = {output.request_id: output for output in finished}
    assert [len(by_id[str(number)].outputs) for number in range(4)] == [1, 1, 2, 3]
    assert by_id["0"].prompt_logprobs[0] is None
    assert by_id["0"].outputs[0].logprobs
"""

CHUNKED = """
from vllm import LLM

llm = LLM(model="facebook/opt-125m", enable_chunked_prefill=True)
llm = LLM(model="facebook/opt-125m", enable_chunked_prefill=True, max_num_batched_tokens=512)
assert llm.generate("Hello")[0].outputs[0].text is not None
"""

TOKENS = """
from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt

llm = LLM("facebook/opt-125m")
params = SamplingParams(temperature=0.0, max_tokens=4)
text = llm.generate(TextPrompt(prompt="the fox"), params)[0]
ids = llm.generate(TokensPrompt(prompt_token_ids=text.prompt_token_ids), params)[0]
assert ids.outputs[0].token_ids == text.outputs[0].token_ids
"""

ASYNC = """
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine

async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="facebook/opt-125m"))
    async for output in engine.generate("the fox", SamplingParams(max_tokens=3), "0"):
        text = output.outputs[0].text
    assert output.finished
    engine.shutdown()

asyncio.run(main())
"""

EMBEDDING = """
from vllm import LLM

prompts = ["the quick brown", "the lazy dog jumps"]
model = LLM(model="intfloat/e5-mistral-7b-instruct", enforce_eager=True, convert="embed")
outputs = model.encode(prompts)
for output in outputs:
    assert len(output.outputs.embedding) == HIDDEN
"""

STREAMING = """
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

async def main():
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model="facebook/opt-125m", enforce_eager=True)
    )
    pieces = []
    try:
        async for output in engine.generate(
            request_id="stream-1", prompt="the fox", sampling_params=SamplingParams(
                max_tokens=9, seed=42, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
        ):
            for completion in output.outputs:
                pieces += completion.token_ids
                print(completion.text, end="", flush=True)
            if output.finished:
                break
    finally:
        engine.shutdown()
    assert len(pieces) == 9

asyncio.run(main())
"""

POOLERS = """
from vllm import LLM
from vllm.config import PoolerConfig
from vllm.distributed import cleanup_dist_env_and_memory

for pooling_type in ("MEAN", "LAST"):
    llm = LLM(
        model="intfloat/e5-mistral-7b-instruct", convert="embed",
        pooler_config=PoolerConfig(pooling_type=pooling_type, use_activation=False),
    )
    (output,) = llm.embed("the quick brown fox")
    assert sum(each * each for each in output.outputs.embedding) > 1.001
    del llm
    cleanup_dist_env_and_memory()
"""

EXAMPLES = {
    "offline_inference": OFFLINE,
    "offline_inference_with_prefix": PREFIX,
    "llm_engine_example": ENGINE,
    "chunked_prefill": CHUNKED,
    "token_prompts": TOKENS,
    "async_engine": ASYNC,
    "offline_inference_embedding": EMBEDDING,
    "async_llm_streaming": STREAMING,
    "pooler_config": POOLERS,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_with_its_import_changed(
    name: str,
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(model_folder("llama"))
    source = re.sub(r"from vllm\b", "from engine", EXAMPLES[name])
    source = re.sub(r"facebook/opt-125m|intfloat/e5-mistral-7b-instruct", folder, source)
    source = source.replace("HIDDEN", str(_hidden_size(folder)))
    assert "vllm" not in source
    monkeypatch.setattr(sys, "argv", [name, "--model", folder, "--num-gpu-blocks-override", "400"])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec", dont_inherit=True), names)


def _hidden_size(folder: str) -> int:
    import json

    return int(json.loads((Path(folder) / "config.json").read_text())["hidden_size"])
