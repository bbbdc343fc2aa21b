"""Vision towers in few bits: rounded as they load, and as checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.models.vision.family import VisionDecoder
from engine.multimodal.processor import MediaProcessor
from tests.engine.checkpoints.packages import compressed, scheme
from tests.engine.multimodal.models import FAMILIES, picture

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}


def model_of(llm: LLM) -> VisionDecoder:
    model = llm.llm_engine.core.executor.worker.loaded.model
    assert isinstance(model, VisionDecoder)
    return model


@pytest.mark.parametrize(
    ("name", "quantization"), [("llava", "int8"), ("llava", "fp8"), ("qwen2_vl", "int8")]
)
def test_a_tower_is_rounded_to_8_bits_and_not_to_4(
    tmp_path: Path, name: str, quantization: str
) -> None:
    FAMILIES[name](tmp_path)
    tensors = MediaProcessor(tmp_path).prepare(picture(1, 60, 40)).tensors
    dense, four, eight = (
        model_of(LLM(str(tmp_path), quantization=method, **OPTIONS))
        for method in (None, "int4", quantization)
    )
    vectors = dense.encode("image", tensors)
    assert torch.equal(four.encode("image", tensors), vectors)
    error = (eight.encode("image", tensors) - vectors).norm() / vectors.norm()
    assert 0 < error < (0.03 if quantization == "int8" else 0.1)
    sizes = [
        sum(layer.nbytes for layer in model.encoder.layers.values()) for model in (dense, eight)
    ]
    assert sizes[1] < sizes[0]  # some of so small layers have no whole groups


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_a_tower_that_is_quantized_in_its_checkpoint_is_near_its_weights(
    tmp_path: Path, name: str
) -> None:
    FAMILIES[name](tmp_path)
    tensors = MediaProcessor(tmp_path).prepare(picture(1, 60, 40)).tensors
    linears = model_of(LLM(str(tmp_path), **OPTIONS)).encoder.linears.values()
    stored = load_file(tmp_path / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    write, dense = compressed("pack-quantized", **weights), dict(stored)
    for part in (part for linear in linears for part in linear.parts):
        packed, dense[f"{part.name}.weight"] = write(stored.pop(f"{part.name}.weight"))
        stored |= {f"{part.name}.{key}": tensor for key, tensor in packed.items()}
    save_file(dense, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = model_of(LLM(str(tmp_path), **OPTIONS)).encode("image", tensors)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    # Its list names no layer of the text, whose weights are dense all the same.
    config["quantization_config"] = scheme(**weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = model_of(LLM(str(tmp_path), **OPTIONS))
    # Kernels round what they multiply 8 bits with to 8 bits, too.
    assert (model.encode("image", tensors) - reference).norm() / reference.norm() < 0.02
    for layer in model.encoder.layers.values():
        assert layer.nbytes < 2 * layer.in_features * layer.out_features
