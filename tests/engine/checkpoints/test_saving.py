"""`LLM.save_quantized`: what it writes is what was run, for us and for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from engine.checkpoints.safetensors import WeightReader
from engine.contract.errors import InvalidRequest
from engine.models.decoder import NativeDecoder
from tests.engine.checkpoints.test_formats import GREEDY, PROMPT
from tests.engine.models import Oracle, make_model

SMALL = {"dtype": "float32", "num_gpu_blocks_override": 20, "max_model_len": 64}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of whole groups of 128 in all layers."""
    folder = tmp_path_factory.mktemp("wide")
    return make_model("llama", folder, hidden_size=128, intermediate_size=256, head_dim=32)


def model_of(llm: LLM) -> NativeDecoder:
    result = llm.apply_model(lambda model: model)[0]
    assert isinstance(result, NativeDecoder)
    return result


def test_four_bits_are_written_as_they_were_run(
    source: Path, tmp_path: Path, compiler: None
) -> None:
    llm = LLM(str(source), quantization="int4", **SMALL)
    files = llm.save_quantized(tmp_path / "saved")
    assert all(file.is_file() for file in files)
    again = LLM(str(tmp_path / "saved"), quantization="compressed-tensors", **SMALL)
    ids = torch.arange(128)
    for mine, theirs in zip(model_of(llm).weights, model_of(again).weights, strict=True):
        assert mine.mlp is not None
        assert theirs.mlp is not None
        assert torch.equal(mine.attention.qkv.rows(ids), theirs.attention.qkv.rows(ids))
        assert torch.equal(mine.mlp.down.rows(ids), theirs.mlp.down.rows(ids))


@pytest.mark.parametrize("compiled", [True, False])
def test_eight_bits_are_written_with_a_scale_for_each_row(
    compiled: bool, source: Path, tmp_path: Path, compiler: None
) -> None:
    """The checkpoint's own values rounded once, not those of the grouped form that was run."""
    llm = LLM(str(source), quantization="int8", cpu_kernels=compiled, **SMALL)
    llm.save_quantized(tmp_path / "saved")
    again = LLM(str(tmp_path / "saved"), cpu_kernels=compiled, **SMALL)
    baseline_tensors = WeightReader(source).tensors()
    for number, layer in enumerate(model_of(again).weights):
        assert layer.mlp is not None
        weight = baseline_tensors[f"model.layers.{number}.mlp.down_proj.weight"]
        steps = (weight.abs().amax(1, keepdim=True) / 127).half().float()
        expected = (weight / steps).round().clamp(-127, 127) * steps
        rows = layer.mlp.down.rows(torch.arange(len(weight)))
        # A value that lies on an edge to the bit may go either way.
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)
        run = model_of(llm).weights[number].mlp
        assert run is not None
        grouped = run.down.rows(torch.arange(len(weight)))
        lost, lost_remote = ((one - weight).square().mean() for one in (rows, grouped))
        assert lost_remote < lost < 2 * lost_remote


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_written_is_small_and_kept_as_it_is(
    quantization: str, source: Path, tmp_path: Path, compiler: None
) -> None:
    files = LLM(str(source), quantization=quantization, **SMALL).save_quantized(tmp_path / "saved")
    again = LLM(str(tmp_path / "saved"), quantization="compressed-tensors", **SMALL)
    layers = [report for report in again.load_report() if "_proj" in report.layer]
    assert {report.level for report in layers} == {"kept"}
    assert max(report.error for report in layers) == 0.0
    size = sum(file.stat().st_size for file in files)
    assert size < (source / "model.safetensors").stat().st_size / 2


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_formats_own_package_reads_the_same(
    quantization: str, source: Path, tmp_path: Path
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder = tmp_path / "saved"
    LLM(str(source), quantization=quantization, cpu_kernels=False, **SMALL).save_quantized(folder)
    saved = LLM(str(folder), cpu_kernels=False, **SMALL)
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    scheme = config.config_groups["group_0"]
    tensors = WeightReader(folder).tensors()
    prefix = "model.layers.1.mlp.down_proj."
    parts = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    compressor: Any = BaseCompressor.get_value_from_registry(config.format)
    weight = compressor.decompress(dict(parts), scheme)["weight"]
    mlp = model_of(saved).weights[1].mlp
    assert mlp is not None
    # Its product is float16, ours float32, which holds it exactly.
    assert torch.equal(mlp.down.rows(torch.arange(128)).half(), weight)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_transformers_says_what_the_saved_folder_says(
    quantization: str, source: Path, tmp_path: Path
) -> None:
    """By the packed weights, activations as they are. Tables are as they were in the source, not
    rounded as at that load.
    """
    folder = tmp_path / "saved"
    LLM(str(source), quantization=quantization, **SMALL).save_quantized(folder)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    retained_tensors, tensors = WeightReader(folder).tensors(), WeightReader(source).tensors()
    assert all(torch.equal(retained_tensors[name], tensors[name]) for name in tables)
    saved, oracle = LLM(str(folder), cpu_kernels=False, **SMALL), Oracle(folder)
    for module in oracle.model.modules():
        module.quantization_enabled = False  # of inputs: weights were dequantized at load
    for prompt in (PROMPT, [9, 10, 11], [300, 2, 17, 55]):
        token_ids = saved.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert list(token_ids) == oracle.greedy(prompt, 6)


def test_what_cannot_be_saved(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="quantization='int8'"):
        LLM(str(source), **SMALL).save_quantized(tmp_path / "x")
    llm = LLM(str(source), quantization="int8", **SMALL)
    with pytest.raises(InvalidRequest, match="there already"):
        llm.save_quantized(tmp_path)
    llm.save_quantized(tmp_path / "once")
    again = LLM(str(tmp_path / "once"), quantization="int8", **SMALL)
    with pytest.raises(InvalidRequest, match="quantized already"):
        again.save_quantized(tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
