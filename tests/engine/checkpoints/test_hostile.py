"""FAULT 61: what can't be is an error that names tensor and field, before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import LLM
from engine.contract.checkpoint_options import QUANTIZATIONS, REFUSED_METHODS
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, ModelLoadError
from engine.models.weight_loader import WeightLoader
from engine.quantization.formats.registry import find_format
from tests.engine.checkpoints import writers
from tests.engine.checkpoints.folders import FILE, Pair, make_mxfp4, make_pair
from tests.engine.checkpoints.packages import bitsandbytes4, compressed, scheme, torchao8
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

MODULE = "model.layers.1.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
_F8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_TORCHAO, _HEADER = torchao8(32)
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
    "bnb8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, writers.bitsandbytes_int8),
    "ct8": (
        {**scheme(**_W8), "format": "int-quantized"},
        compressed("int-quantized", **_W8),
    ),
    "ct-fp8": (
        {**scheme(**_F8), "format": "float-quantized"},
        compressed("float-quantized", **_F8),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, writers.fp8("tensor")),
    "torchao": ({"quant_method": "torchao"}, _TORCHAO),
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


def empty(tensor: Tensor) -> Tensor:
    return tensor.flatten()[:0]


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64 if tensor.dtype == torch.int32 else torch.float64)


def longer(tensor: Tensor) -> Tensor:
    return torch.cat((tensor, tensor))


@pytest.fixture(scope="module")
def pairs(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pair]:
    @cache
    def get(kind: str) -> Pair:
        header = _HEADER if kind == "torchao" else None
        target = tmp_path_factory.mktemp(kind)
        return make_pair(model_folder("llama"), target, *KINDS[kind], header=header)

    return get


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("gpt_oss")
    make_checkpoint(RECIPES["gpt_oss"], target / "made")
    return make_mxfp4(target / "made", target).packed


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
        ("gptq", "qweight", gone),
        ("gptq", "qweight", wide),
        ("awq", "qweight", cut),
        ("awq", "scales", nan),
        ("awq", "qzeros", cut),
        ("fp8", "weight_scale", gone),
        ("fp8", "weight_scale", nan),
        ("fp8", "weight_scale", longer),
        ("block", "weight_scale", cut),
        ("bnb", "weight.absmax", gone),
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
        ("hqq", "nbits", empty),
        ("hqq", "shape", high),
        ("hqq", "axis", high),
        ("hqq", "scale", lambda tensor: tensor.T.contiguous()),
        ("bnb8", "SCB", gone),
        ("bnb8", "SCB", nan),
        ("bnb8", "SCB", cut),
        ("bnb8", "weight_format", empty),
        ("bnb8", "weight_format", high),
        ("ct8", "weight_scale", nan),
        ("ct8", "weight_zero_point", gone),
        ("ct8", "weight_zero_point", cut),
        ("ct-fp8", "weight_scale", gone),
        ("ct-fp8", "weight_scale", nan),
        ("modelopt", "weight_scale", gone),
        ("modelopt", "weight_scale", longer),
        ("torchao", "_weight_scale", gone),
        ("torchao", "_weight_scale", nan),
        ("torchao", "_weight_scale", cut),
        ("torchao", "_weight_zero_point", cut),
        ("squeezellm", "lookup_table", cut),
        ("squeezellm", "qweight", wide),
        ("aqlm", "codebooks", gone),
        ("squeezellm", "lookup_table", nan),
        ("aqlm", "scales", nan),
        ("aqlm", "codes", cut),
    ],
)
def test_fault_61_an_unsound_tensor_is_named_before_any_layer_is_packed(
    kind: str, suffix: str, change: Change, pairs: Callable[[str], Pair], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(WeightLoader, "pack_sources", _forbidden)
    folder = pairs(kind).packed
    tensors = load_file(folder / FILE)
    changed = change(tensors.pop(f"{MODULE}.{suffix}"))
    if changed is not None:
        tensors[f"{MODULE}.{suffix}"] = changed
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with safe_open(folder / FILE, "pt") as file:
        header = file.metadata()
    save_file(tensors, tmp_path / FILE, metadata=header)
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert MODULE in caught.value.message
    assert caught.value.param


@pytest.mark.parametrize(("kind", "size"), [("gptq", 64), ("awq", 16), ("ct", 48)])
def test_fault_61_a_group_size_that_the_scales_do_not_have(
    kind: str, size: int, pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightLoader, "pack_sources", _forbidden)
    config = json.loads(json.dumps(KINDS[kind][0]))
    groups = config["config_groups"]["group_0"]["weights"] if kind == "ct" else config
    groups["group_size"] = size
    with pytest.raises(ModelLoadError, match=r"proj\.(scales|qzeros|weight_scale)'") as caught:
        load(pairs(kind).packed, hf_overrides={"quantization_config": config})
    assert caught.value.param in ("scales", "qzeros", "weight_scale")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "I64"),
        ("dtype", "Q4"),
        ("shape", [1 << 40, 8]),
        ("shape", [-1, 8]),
        ("shape", [2, 2]),
        ("data_offsets", [0, 1 << 60]),
        ("data_offsets", [8, 0]),
    ],
)
def test_fault_61_a_header_that_lies_about_a_packed_tensor(
    field: str, value: Any, pairs: Callable[[str], Pair], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(WeightLoader, "pack_sources", _forbidden)
    for path in pairs("gptq").packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = (tmp_path / FILE).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[f"{MODULE}.qweight"][field] = value
    changed = json.dumps(header).encode()
    (tmp_path / FILE).write_bytes(len(changed).to_bytes(8, "little") + changed + content[end:])
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert FILE in caught.value.message
    assert caught.value.param


@pytest.mark.parametrize(
    ("suffix", "change", "field"),
    [
        ("_scales", gone, "_scales"),
        ("_scales", cut, "_scales"),
        ("_scales", lambda tensor: torch.full_like(tensor, 255), "_scales"),
        ("_blocks", cut, "_blocks"),
        ("_blocks", wide, "_blocks"),
    ],
)
def test_fault_61_unsound_experts_of_gpt_oss(
    suffix: str, change: Change, field: str, gpt_oss: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(WeightLoader, "pack_sources", _forbidden)
    for path in gpt_oss.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / FILE)
    name = f"model.layers.1.mlp.experts.down_proj{suffix}"
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=name) as caught:
        load(tmp_path)
    assert caught.value.param == field


def _forbidden(*args: object, **kwargs: object) -> None:
    raise AssertionError("a layer was packed")


def test_a_packed_weight_of_another_shape_than_the_config_asks_for(
    pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightLoader, "pack_sources", _forbidden)
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
        ({"quant_method": "marlin", "bits": 8}, "bits"),
        ({"quant_method": "marlin", "group_size": 64}, "group_size"),
        ({"quant_method": "deepspeedfp"}, "quant_method"),
        ({"quant_method": "gptq", "bits": 5}, "bits"),
        ({"quant_method": "gptq", "bits": "4"}, "bits"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "checkpoint_format": "bitblas"}, "checkpoint_format"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, -1]}, "weight_block_size"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups"),
        ({**scheme(**_W4), "format": "mxfp6-pack-quantized"}, "format"),
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


@pytest.mark.parametrize(
    ("targets", "groups_by_name", "path"),
    [
        (["Linear"], {"group_1": ["Linear"]}, "config_groups.group_1.targets"),
        (["re:.*down_proj"], {"group_1": ["re:.*mlp.*"]}, "config_groups.group_1.targets"),
        (["Linear"], {f"g{n}": [f"a.{n}"] for n in range(1024)}, "config_groups"),
        (["Linear"], {"group_1": [f"re:{n}" for n in range(65)]}, "config_groups"),
    ],
)
def test_groups_that_overlap_or_are_too_many_are_refused_by_their_field(
    targets: list[str],
    groups_by_name: dict[str, list[str]],
    path: str,
    pairs: Callable[[str], Pair],
) -> None:
    config = scheme(**_W4)
    groups = config["config_groups"]
    groups["group_0"]["targets"] = targets
    wider = {**_W4, "group_size": 64}
    groups |= {
        name: {"targets": targets, "weights": wider} for name, targets in groups_by_name.items()
    }
    with pytest.raises(ModelLoadError) as caught:
        load(pairs("ct").packed, hf_overrides={"quantization_config": config})
    assert caught.value.param == f"quantization_config.{path}"


def test_a_layer_that_is_named_goes_before_a_pattern_and_both_before_a_class(
    pairs: Callable[[str], Pair],
) -> None:
    """What a group says that isn't asked would be wrong for the scales that are there."""
    config = scheme(**_W4)
    invalid = {**_W4, "group_size": 16}
    config["config_groups"] |= {
        "group_1": {"targets": ["re:.*_proj"], "weights": _W4},
        "group_2": {"targets": [MODULE], "weights": _W4},
    }
    config["config_groups"]["group_0"]["weights"] = invalid
    settings = {"hf_overrides": {"quantization_config": config}}
    assert load(pairs("ct").packed, **settings).load_report()
    config["config_groups"]["group_2"]["weights"] = invalid
    with pytest.raises(ModelLoadError, match=f"{MODULE}.weight_scale"):
        load(pairs("ct").packed, **settings)


def test_a_tensor_that_two_files_have_is_refused_by_its_name(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    for path in pairs("gptq").packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / FILE)
    twice = {f"{MODULE}.scales": tensors[f"{MODULE}.scales"] * 2}
    save_file(twice, tmp_path / "other.safetensors", metadata={"format": "pt"})
    index = {"weight_map": {"a": FILE, "b": "other.safetensors"}}
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=f"{MODULE}.scales' is in {FILE}, too"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["gptq", "awq", "ct"])
def test_a_weight_that_is_there_both_packed_and_plain_is_refused_by_its_name(
    kind: str, pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    for path in pairs(kind).packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / FILE)
    tensors[f"{MODULE}.weight"] = pairs(kind).weights[MODULE]
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"{MODULE}.weight' is there beside") as caught:
        load(tmp_path)
    assert caught.value.param == "weight"


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
    for path in pairs("gptq").packed.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match=r"no '.*', but '.*': if that is quantized"):
        load(tmp_path)


def test_a_weight_of_a_kind_that_the_format_does_not_have(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    for path in pairs("fp8").packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / FILE)
    tensors[f"{MODULE}.weight"] = tensors[f"{MODULE}.weight"].view(torch.uint8).long()
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"is kept as int64, and nothing .* fp8") as caught:
        load(tmp_path)
    assert MODULE in caught.value.message
    assert caught.value.param == "weight"


# -- the setting ----------------------------------------------------------------------------------


#: Of vLLM 0.32.0, without those that round plain weights while they load.
NAMES = (
    "awq", "auto_awq", "fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4",
    "modelopt_mxfp8", "modelopt_mixed", "auto_gptq", "gptq", "gptq_marlin", "awq_marlin", "humming",
    "compressed-tensors", "quark", "moe_wna16", "torchao", "inc", "mxfp4", "gpt_oss_mxfp4",
    "deepseek_v4_fp8",
)  # fmt: skip
#: Those.
AT_LOAD = (
    "experts_int8", "online", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel",
    "int8_per_channel_weight_only", "nvfp4_per_token", "mxfp8",
)  # fmt: skip


def test_every_name_of_vllms_is_taken_or_refused_with_what_to_take() -> None:
    method_names = {*QUANTIZATIONS, *REFUSED_METHODS}
    assert method_names.issuperset(NAMES)
    assert {name for name in AT_LOAD if "int8" in REFUSED_METHODS[name]} == set(AT_LOAD)
    assert not REFUSED_METHODS.keys() & set(QUANTIZATIONS)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gptq", "gptq_marlin"), ("gptq", "auto_gptq"), ("gptq", "inc"), ("awq", "auto_awq"),
        ("ct", "compressed-tensors"), ("nvfp4", "modelopt_mixed"),
    ],
)  # fmt: skip
def test_quantization_may_name_the_checkpoints_own_format(
    kind: str, name: str, pairs: Callable[[str], Pair]
) -> None:
    report = load(pairs(kind).packed, quantization=name).load_report()
    assert report == load(pairs(kind).packed).load_report()


def test_quantization_that_names_another_format_is_refused(
    pairs: Callable[[str], Pair], model_folder: Callable[[str], Path]
) -> None:
    for folder, theirs in ((pairs("gptq").packed, "by gptq"), (model_folder("llama"), "isn't")):
        with pytest.raises(ConfigError, match=theirs) as caught:
            load(folder, quantization="awq")
        assert caught.value.param == "quantization"


@pytest.mark.parametrize("name", ["qqq", "tpu_int8", "online", "humming"])
def test_methods_that_nothing_here_reads_say_what_to_take(name: str) -> None:
    with pytest.raises(ConfigError, match=r"take|use") as caught:
        EngineConfig(model="m", quantization=name)
    assert caught.value.param == "quantization"


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_quantized_checkpoint_can_be_rounded_further(
    bits: str, pairs: Callable[[str], Pair]
) -> None:
    reports = load(pairs("fp8").packed, quantization=bits).load_report()
    layers = [report for report in reports if "_proj" in report.layer]
    assert {report.level for report in layers} == {"read"}
    assert all(report.error < 0.2 for report in layers)
