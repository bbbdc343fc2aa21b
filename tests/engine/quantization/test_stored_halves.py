"""A float32 model keeps the 16 bits of its checkpoint's weights, and answers as with 32."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from tests.engine.gguf.files import everywhere, write_gguf
from tests.engine.models import make_model


def _answers(folder: Path) -> tuple[int, list[object]]:
    """The bytes of the linear layers, and the log probabilities of two answers."""
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    try:
        prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(3, 60))}]
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        nbytes = sum(report.nbytes for report in llm.load_report())
        return nbytes, [(output.prompt_logprobs, output.outputs[0].logprobs) for output in outputs]
    finally:
        llm.llm_engine.shutdown()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_halves_take_half_the_memory_and_give_the_same_bits(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    halves, floats = tmp_path / "halves", tmp_path / "floats"
    shutil.copytree(make_model("llama", floats, model_type=family), halves)
    weights = load_file(halves / "model.safetensors")
    rounded = {name: tensor.to(dtype) for name, tensor in weights.items()}
    save_file(rounded, halves / "model.safetensors", {"format": "pt"})
    widened = {name: tensor.float() for name, tensor in rounded.items()}
    save_file(widened, floats / "model.safetensors", {"format": "pt"})
    (small, answers), (large, expected) = _answers(halves), _answers(floats)
    assert answers == expected
    assert small == large // 2


def test_so_does_a_gguf_file(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    rounded = {name: tensor.half().float() for name, tensor in weights.items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    files = [
        write_gguf(folder, tmp_path / f"{k.name}.gguf", everywhere(k)) for k in (Kind.F16, Kind.F32)
    ]
    (small, answers), (large, expected) = map(_answers, files)
    assert answers == expected
    assert small == large // 2
