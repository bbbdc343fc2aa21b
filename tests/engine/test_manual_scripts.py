"""Longer programs in the shape of vLLM's manual: adapters, saved weights, drafts, quantized models.

They run with nothing but the name in their imports, their models' folders and their command lines
changed; `snapshot_download` is a function that names a folder here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.contract.errors import ModelLoadError
from tests.engine.checkpoints.folders import make_pair
from tests.engine.checkpoints.writers import awq
from tests.engine.lora.peft_oracle import make_adapter
from tests.engine.multimodal.models import phi3_vision, picture
from tests.engine.speculative import head_folders
from tests.engine.speculative.free import make_drafts_free

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 400}

LOOP = """
import gc
from typing import List, Optional, Tuple

import torch

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

finished = []

def process_requests(engine, test_prompts):
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params, lora_request = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        request_outputs: List[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                print(request_output)
                finished.append(request_output)
"""

ADAPTERS = (
    LOOP
    + """
def create_test_prompts(lora_path):
    greedy = dict(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=12,
                  stop_token_ids=[203])
    beams = dict(n=3, best_of=3, use_beam_search=True, temperature=0, max_tokens=12,
                 stop_token_ids=[203])
    return [
        ("the quick brown", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1,
                                           max_tokens=12), None),
        ("the lazy dog", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2,
                                        max_tokens=12), None),
        ("the fox", SamplingParams(**greedy), LoRARequest("sql-lora", 1, lora_path)),
        ("the hen", SamplingParams(**beams), LoRARequest("sql-lora", 1, lora_path)),
        ("the fox", SamplingParams(**greedy), LoRARequest("sql-lora2", 2, lora_path)),
        ("the hen", SamplingParams(**beams), LoRARequest("sql-lora", 1, lora_path)),
    ]

engine_args = EngineArgs(model=MODEL, enable_lora=True, max_loras=1, max_lora_rank=8,
                         max_cpu_loras=2, max_num_seqs=256, num_gpu_blocks_override=400)
engine = LLMEngine.from_engine_args(engine_args)
process_requests(engine, create_test_prompts(snapshot_download(repo_id="someone/sql-lora")))
by_id = {output.request_id: output for output in finished}
assert [len(by_id[str(number)].outputs) for number in range(6)] == [1, 1, 1, 3, 1, 3]
assert by_id["2"].outputs[0].token_ids == by_id["4"].outputs[0].token_ids
names = [by_id[str(number)].lora_request for number in (0, 2, 4)]
assert names[0] is None
assert [request.lora_name for request in names[1:]] == ["sql-lora", "sql-lora2"]
assert [each.text for each in by_id["3"].outputs] == [each.text for each in by_id["5"].outputs]
engine.add_request("bare", "the fox", SamplingParams(temperature=0.0, max_tokens=12))
while engine.has_unfinished_requests():
    process_requests(engine, [])
assert finished[-1].outputs[0].token_ids != by_id["2"].outputs[0].token_ids
"""
)

ADAPTERS_OF_A_QUANTISED_MODEL = (
    LOOP
    + """
def initialize_engine(model, quantization):
    return LLMEngine.from_engine_args(EngineArgs(
        model=model, quantization=quantization, enable_lora=True, max_loras=4, enforce_eager=True,
        num_gpu_blocks_override=400))

engine = initialize_engine(MODEL, "awq")
lora_path = snapshot_download(repo_id="someone/a-lora")
sampling = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=12)
process_requests(engine, [
    ("the name", sampling, None),
    ("the name", sampling, LoRARequest("lora-test-1", 1, lora_path)),
    ("the dog", sampling, LoRARequest("lora-test-2", 1, lora_path)),
    ("the dog", sampling, LoRARequest("lora-test-3", 1, lora_path)),
])
texts = {output.request_id: output.outputs[0].text for output in finished}
assert texts["0"] != texts["1"]
assert texts["2"] == texts["3"]
del engine
gc.collect()
torch.cuda.empty_cache()
"""
)

SHARDED = """
import dataclasses
import os
import shutil
from pathlib import Path

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.add_argument("--output", "-o", required=True, type=str)
parser.add_argument("--file-pattern", type=str)
parser.add_argument("--max-file-size", type=str, default=5 * 1024**3)
args = parser.parse_args()
engine_args = EngineArgs.from_cli_args(args)
if engine_args.enable_lora:
    raise ValueError("Saving with enable_lora=True is not supported!")
model_path = engine_args.model
llm = LLM(**dataclasses.asdict(engine_args))
Path(args.output).mkdir(exist_ok=True)
model_executor = llm.llm_engine.model_executor
model_executor.save_sharded_state(path=args.output, pattern=args.file_pattern,
                                  max_size=args.max_file_size)
for file in os.listdir(model_path):
    if os.path.splitext(file)[1] not in (".bin", ".pt", ".safetensors"):
        shutil.copy(os.path.join(model_path, file), args.output)
"""

TENSORIZED = """
import argparse
import dataclasses
import json
import os
import uuid

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.tensorizer import (TensorizerArgs, TensorizerConfig,
                                                         WRITE)
from vllm.utils import FlexibleArgumentParser

parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="An example"))
subparsers = parser.add_subparsers(dest="command")
serialize_parser = subparsers.add_parser("serialize", help="Write a model")
serialize_parser.add_argument("--suffix", type=str, required=False)
serialize_parser.add_argument("--serialized-directory", type=str, required=True)
serialize_parser.add_argument("--keyfile", type=str, required=False)
deserialize_parser = subparsers.add_parser("deserialize", help="Read one")
deserialize_parser.add_argument("--path-to-tensors", type=str, required=True)
deserialize_parser.add_argument("--keyfile", type=str, required=False)
TensorizerArgs.add_cli_args(deserialize_parser)
args = parser.parse_args()
credentials = {
    "s3_access_key_id": getattr(args, "s3_access_key_id", None),
    "s3_secret_access_key": getattr(args, "s3_secret_access_key", None),
    "s3_endpoint": getattr(args, "s3_endpoint", None),
}
keyfile = args.keyfile if args.keyfile else None
if args.command == "serialize":
    eng_args_dict = {f.name: getattr(args, f.name) for f in dataclasses.fields(EngineArgs)}
    engine_args = EngineArgs.from_cli_args(argparse.Namespace(**eng_args_dict))
    input_dir = args.serialized_directory.rstrip("/")
    suffix = args.suffix if args.suffix else uuid.uuid4().hex
    base_path = f"{input_dir}/{suffix}"
    if engine_args.tensor_parallel_size > 1:
        model_path = f"{base_path}/model-rank-%03d.tensors"
    else:
        model_path = f"{base_path}/model.tensors"
    config = TensorizerConfig(tensorizer_uri=model_path, encryption_keyfile=keyfile, **credentials)
    WRITE(engine_args, config)
elif args.command == "deserialize":
    config = TensorizerConfig(tensorizer_uri=args.path_to_tensors, encryption_keyfile=keyfile,
                              **credentials)
    llm = LLM(model=args.model, load_format="tensorizer", num_gpu_blocks_override=400,
              tensor_parallel_size=args.tensor_parallel_size, model_loader_extra_config=config)
"""

DRAFTS = """
import gc
import time

from vllm import LLM, SamplingParams

def time_generation(llm, prompts, sampling_params):
    llm.generate(prompts, sampling_params)
    start = time.time()
    outputs = llm.generate(prompts, sampling_params)
    end = time.time()
    print((end - start) / sum([len(o.outputs[0].token_ids) for o in outputs]))
    return [output.outputs[0].text for output in outputs]

prompts = ["the quick brown fox jumps over the lazy dog"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=40)
llm = LLM(model=MODEL, num_gpu_blocks_override=400)
without = time_generation(llm, prompts, sampling_params)
del llm
gc.collect()
llm = LLM(model=MODEL, speculative_model=DRAFT, use_v2_block_manager=True,
          num_gpu_blocks_override=400)
assert time_generation(llm, prompts, sampling_params) == without
metrics = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
assert metrics["vllm:spec_decode_num_drafts"] > 0
"""


PROCESSORS = """
import torch
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

class DummyLogitsProcessor(LogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams):
        target_token: Any | None = params.extra_args and params.extra_args.get("target_token")
        if target_token is not None and not isinstance(target_token, int):
            raise ValueError(f"target_token value {target_token} is not int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.req_info: dict[int, int] = {}
        self.vocab_size = vllm_config.model_config.get_vocab_size()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        def extract_extra_arg(params: SamplingParams) -> int | None:
            self.validate_params(params)
            return params.extra_args and params.extra_args.get("target_token")

        process_dict_updates(self.req_info, batch_update,
                             lambda params, _, __: extract_extra_arg(params))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[1] == self.vocab_size
        if not self.req_info:
            return logits
        cols = torch.tensor(list(self.req_info.values()), dtype=torch.long, device=logits.device)
        rows = torch.tensor(list(self.req_info.keys()), dtype=torch.long, device=logits.device)
        values_to_keep = logits[rows, cols].clone()
        logits[rows] = float("-inf")
        logits[rows, cols] = values_to_keep
        return logits
"""

WRAPPED = """
import torch
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

class DummyPerReqLogitsProcessor:
    def __init__(self, target_token: int) -> None:
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        val_to_keep = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token] = val_to_keep
        return logits

class DummyLogitsProcessor(AdapterLogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams):
        target_token: Any | None = params.extra_args and params.extra_args.get("target_token")
        if target_token is not None and not isinstance(target_token, int):
            raise ValueError(f"target_token value {target_token} is not int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        super().__init__(vllm_config, device, is_pin_memory)
        self.is_cuda = device.type == "cuda"

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target_token: Any | None = params.extra_args and params.extra_args.get("target_token")
        return None if target_token is None else DummyPerReqLogitsProcessor(target_token)
"""

WITH_TARGETS = """
prompts = ["the quick brown", "the lazy dog", "the fox", "the hen"]
sampling_params_list = [
    SamplingParams(temperature=0.0, extra_args={"target_token": 128}),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, extra_args={"target_token": 67}),
    SamplingParams(temperature=0.0),
]
llm = LLM(model=MODEL, logits_processors=[DummyLogitsProcessor], num_gpu_blocks_override=400)
outputs = llm.generate(prompts, sampling_params_list)
assert [output.prompt for output in outputs] == prompts
"""

PICTURE = """
from PIL import Image

from vllm import LLM, SamplingParams

def run_phi3v():
    llm = LLM(model=MODEL, trust_remote_code=True, max_num_seqs=5, num_gpu_blocks_override=64)
    image = Image.open(FILE)
    prompt = "<|user|>\\n<|image_1|>\\nWhat is the season?<|end|>\\n<|assistant|>\\n"
    sampling_params = SamplingParams(temperature=0, max_tokens=8)
    outputs = llm.generate(
        {
            "prompt": prompt,
            "multi_modal_data": {
                "image": image
            },
        },
        sampling_params=sampling_params)
    for o in outputs:
        generated_text = o.outputs[0].text
        print(generated_text)
    return outputs

if __name__ == "__main__":
    outputs = run_phi3v()
"""


@pytest.fixture(scope="module")
def model(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("llama")


def run(source: str, monkeypatch: pytest.MonkeyPatch, *words: str, **names: Any) -> dict[str, Any]:
    """Run a program; its names at the end."""
    source = re.sub(r"from vllm\b", "from engine", source)
    monkeypatch.setattr(sys, "argv", ["program", *words])
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(source, "program", "exec", dont_inherit=True), namespace)
    return namespace


def test_adapters_beside_the_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = str(make_adapter(model, tmp_path / "adapter"))
    run(ADAPTERS, monkeypatch, MODEL=str(model), snapshot_download=lambda repo_id: adapter)


def test_adapters_of_a_quantized_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = str(make_adapter(model, tmp_path / "adapter"))
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    packed = str(make_pair(model, tmp_path, {**config, "version": "gemm"}, awq()).packed)
    source = ADAPTERS_OF_A_QUANTISED_MODEL
    run(source, monkeypatch, MODEL=packed, snapshot_download=lambda repo_id: adapter)


def test_weights_are_saved_in_shards(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "saved"
    words = ("--model", str(model), "--tensor-parallel-size", "1", "--output", str(output))
    run(SHARDED, monkeypatch, *words, "--num-gpu-blocks-override", "400")
    saved = LLM(model=str(output), load_format="sharded_state", tensor_parallel_size=1, **SMALL)
    assert answer(saved) == answer(LLM(str(model), **SMALL))


@pytest.mark.parametrize("encrypted", [False, True])
def test_weights_are_tensorized(
    encrypted: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TENSORIZED.replace("WRITE", "tensorize_" + "vllm_model")
    key = ("--keyfile", str(tmp_path / "key")) if encrypted else ()
    options = ("serialize", "--serialized-directory", str(tmp_path), "--suffix", "v1", *key)
    run(source, monkeypatch, "--model", str(model), *options)
    path = tmp_path / "v1" / "model.tensors"
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in (file for file in model.iterdir() if file.suffix != ".safetensors"):
        (bare / file.name).write_bytes(file.read_bytes())
    read = ("deserialize", "--path-to-tensors", str(path), *key)
    names = run(source, monkeypatch, "--model", str(bare), *read)
    assert answer(names["llm"]) == answer(LLM(str(model), **SMALL))
    if encrypted:
        assert (tmp_path / "key").stat().st_mode & 0o077 == 0
        (tmp_path / "key").write_bytes(b"x" * 31)
        with pytest.raises(ModelLoadError, match="is no key: 31 bytes"):
            run(source, monkeypatch, "--model", str(bare), *read)


def test_drafts_of_a_small_network(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On so small a model drafts never pay; here a wider step costs nothing.
    make_drafts_free(monkeypatch)
    draft = str(head_folders.write(tmp_path / "heads", *head_folders.mlp_parts()))
    run(DRAFTS, monkeypatch, MODEL=str(model), DRAFT=draft)


@pytest.mark.parametrize("source", [PROCESSORS, WRAPPED], ids=["rows", "requests"])
def test_logits_processors_of_the_engine(
    source: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run(source + WITH_TARGETS, monkeypatch, MODEL=str(model))
    tokens = [output.outputs[0].token_ids for output in names["outputs"]]
    assert (set(tokens[0]), set(tokens[2])) == ({128}, {67})
    baseline_outputs = LLM(str(model), **SMALL).generate(
        names["prompts"], SamplingParams(temperature=0), use_tqdm=False
    )
    assert [tokens[1], tokens[3]] == [
        baseline_outputs[index].outputs[0].token_ids for index in (1, 3)
    ]
    invalid_sampling_params = SamplingParams(extra_args={"target_token": "x"})
    with pytest.raises(ValueError, match="target_token value x is not int"):
        names["llm"].generate("the", invalid_sampling_params, use_tqdm=False)


def test_a_question_about_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    phi3_vision(folder)
    file = tmp_path / "cherry_blossom.jpg"
    picture(1, 60, 40).save(file)
    [output] = run(PICTURE, monkeypatch, MODEL=str(folder), FILE=str(file))["outputs"]
    assert len(output.outputs[0].token_ids) == 8


def answer(llm: LLM) -> list[int]:
    return llm.generate("the quick brown fox", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
