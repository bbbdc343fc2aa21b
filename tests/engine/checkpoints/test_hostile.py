"""FAULT 61: what can't be is an error that names tensor and field, before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import LLM
from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError, ModelLoadError
from engine.models.layer_loader import LayerLoader
from engine.quantization.checkpoint.registry import find_format
from tests.engine.checkpoints import writers
from tests.engine.checkpoints.folders import FILE, Pair, make_pair
from tests.engine.checkpoints.packages import bitsandbytes4, compressed, scheme

AT = "model.layers.1.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
KINDS: dict[str, tuple[dict[str, Any], writers.Writer]] = {
    "gptq": (GPTQ, writers.gptq(sorted_=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, writers.awq()),
    "fp8": ({"quant_method": "fp8"}, writers.fp8("row")),
    "block": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, writers.fp8("block")),
    "bnb": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        bitsandbytes4("nf4", True),
    ),
    "ct": (scheme(**_W4), compressed("pack-quantized", **_W4)),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, writers.nvfp4),
    "hqq": ({"quant_method": "hqq", "nbits": 4, "group_size": 32}, writers.hqq(4)),
    "squeezellm": ({"quant_method": "squeezellm"}, writers.squeezellm),
    "aqlm": ({"quant_method": "aqlm"}, writers.aqlm),
}
Change = Callable[[Tensor], Tensor | None]


def gone(_: Tensor) -> None:
    return None


def nan(tensor: Tensor) -> Tensor:
    changed = tensor.float()
    changed.flatten()[-1] = float("nan")
    return changed.to(tensor.dtype)


def cut(tensor: Tensor) -> Tensor:
    return tensor[..., :-1].contiguous()


def high(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.flatten()[0] = 99
    return changed


def longer(tensor: Tensor) -> Tensor:
    return torch.cat((tensor, tensor))


@pytest.fixture(scope="module")
def pairs(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(kind: str) -> Pair:
        if kind not in made:
            config, write = KINDS[kind]
            made[kind] = make_pair(
                model_folder("llama"), tmp_path_factory.mktemp(kind), config, write
            )
        return made[kind]

    return get


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), num_gpu_blocks_override=8, max_model_len=64, **settings)


@pytest.mark.parametrize(
    ("kind", "suffix", "change"),
    [
        ("gptq", "scales", gone),
        ("gptq", "scales", nan),
        ("gptq", "scales", cut),
        ("gptq", "qzeros", gone),
        ("gptq", "qzeros", longer),
        ("gptq", "g_idx", high),
        ("gptq", "g_idx", cut),
        ("awq", "scales", nan),
        ("awq", "qzeros", cut),
        ("fp8", "weight_scale", gone),
        ("fp8", "weight_scale", nan),
        ("fp8", "weight_scale", longer),
        ("block", "weight_scale", cut),
        ("bnb", "weight.nested_absmax", gone),
        ("bnb", "weight.quant_state.bitsandbytes__nf4", gone),
        ("bnb", "weight.quant_state.bitsandbytes__nf4", cut),
        ("bnb", "weight.nested_quant_map", nan),
        ("bnb", "weight", longer),
        ("ct", "weight_scale", gone),
        ("ct", "weight_scale", nan),
        ("ct", "weight_scale", cut),
        ("ct", "weight_shape", high),
        ("nvfp4", "weight_scale", nan),
        ("nvfp4", "weight_scale_2", nan),
        ("hqq", "scale", cut),
        ("hqq", "zero", nan),
        ("hqq", "nbits", high),
        ("squeezellm", "lookup_table", nan),
        ("aqlm", "scales", nan),
        ("aqlm", "codes", cut),
    ],
)
def test_fault_61_an_unsound_tensor_is_named_before_any_layer_is_packed(
    kind: str, suffix: str, change: Change, pairs: Callable[[str], Pair], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(LayerLoader, "_pack", _forbidden)
    folder = pairs(kind).packed
    tensors = load_file(folder / FILE)
    changed = change(tensors.pop(f"{AT}.{suffix}"))
    if changed is not None:
        tensors[f"{AT}.{suffix}"] = changed
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert AT in caught.value.message
    assert caught.value.param


def _forbidden(*args: object, **kwargs: object) -> None:
    raise AssertionError("a layer was packed")


def test_a_packed_weight_of_another_shape_than_the_config_asks_for(
    pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerLoader, "_pack", _forbidden)
    with pytest.raises(
        ModelLoadError, match=r"proj' is packed with shape .*, but config.json asks"
    ):
        load(pairs("gptq").packed, hf_overrides={"intermediate_size": 128})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, None),
        ({"bits": 4}, "quant_method"),
        ({"quant_method": "magic"}, "quant_method"),
        ({"quant_method": ["gptq"]}, "quant_method"),
        ({"quant_method": "marlin"}, "quant_method"),
        ({"quant_method": "deepspeedfp"}, "quant_method"),
        ({"quant_method": "gptq", "bits": 5}, "bits"),
        ({"quant_method": "gptq", "bits": "4"}, "bits"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, -1]}, "weight_block_size"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups"),
        ({**scheme(**_W4), "format": "marlin-24"}, "format"),
        ({**scheme(**_W4), "ignore": "lm_head"}, "ignore"),
        (scheme(**{**_W4, "num_bits": 99}), "num_bits"),
        (scheme(**{**_W4, "strategy": "row"}), "strategy"),
        ({"quant_method": "modelopt", "quant_algo": "W2"}, "quant_algo"),
        ({"quant_method": "hqq", "axis": 0}, "axis"),
    ],
)
def test_an_unsound_quantization_config_names_its_field(
    config: dict[str, Any], field: str | None
) -> None:
    if field is None:
        assert find_format(config) is None
        return
    with pytest.raises(ModelLoadError) as caught:
        find_format(config)
    assert str(caught.value.param).rpartition(".")[2] == field
    assert str(caught.value.param) in caught.value.message


@pytest.mark.parametrize("text", ["re:(a+)+$", "re:(", "re:" + "a" * 999])
def test_a_pattern_that_could_take_for_ever_is_refused(text: str) -> None:
    config = scheme(**_W4)
    config["config_groups"]["group_0"]["targets"] = [text]
    with pytest.raises(ModelLoadError, match="targets"):
        find_format(config)


def test_a_config_that_says_so_of_plain_weights(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for path in model_folder("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": GPTQ}))
    with pytest.raises(ModelLoadError, match="but no layer's are"):
        load(tmp_path)


def test_packed_weights_that_nothing_is_said_of(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    for path in pairs("fp8").packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelLoadError, match=r"F8_E4M3, and no quantization_config"):
        load(tmp_path)


# -- the setting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [("gptq", "gptq_marlin"), ("ct", "compressed-tensors")])
def test_quantization_may_name_the_checkpoints_own_format(
    kind: str, name: str, pairs: Callable[[str], Pair]
) -> None:
    found = load(pairs(kind).packed, quantization=name).load_report()
    assert found == load(pairs(kind).packed).load_report()


def test_quantization_that_names_another_format_is_refused(
    pairs: Callable[[str], Pair], model_folder: Callable[[str], Path]
) -> None:
    for folder, theirs in ((pairs("gptq").packed, "by gptq"), (model_folder("llama"), "isn't")):
        with pytest.raises(ConfigError, match=theirs) as caught:
            load(folder, quantization="awq")
        assert caught.value.param == "quantization"


@pytest.mark.parametrize("name", ["marlin", "deepspeedfp", "tpu_int8"])
def test_methods_that_nothing_here_reads_say_what_to_take(name: str) -> None:
    with pytest.raises(ConfigError, match=r"take|use") as caught:
        EngineConfig(model="m", quantization=name)
    assert caught.value.param == "quantization"


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_quantised_checkpoint_can_be_rounded_further(
    bits: str, pairs: Callable[[str], Pair]
) -> None:
    reports = load(pairs("fp8").packed, quantization=bits).load_report()
    layers = [report for report in reports if "_proj" in report.layer]
    assert {report.level for report in layers} == {"read"}
    assert all(report.error < 0.2 for report in layers)
