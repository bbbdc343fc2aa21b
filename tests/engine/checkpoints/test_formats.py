"""Every format says what the plain weights that it stands for say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.checkpoints.quantized_weights import QuantizedWeights
from engine.checkpoints.safetensors import WeightReader
from engine.quantization.formats.registry import find_format
from tests.engine.checkpoints import packages, writers
from tests.engine.checkpoints.folders import Pair, make_pair
from tests.engine.checkpoints.packages import compressed, scheme
from tests.engine.checkpoints.rounded import (
    RoundedModel,
    Rounding,
    float8_words,
    half_minima,
    half_points,
    half_scales,
    logits_of,
    table_words,
)
from tests.engine.checkpoints.writers import Writer
from tests.engine.greedy import greedy_all
from tests.engine.models import Oracle

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
SMALL: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 50, "max_model_len": 128,
}  # fmt: skip
#: Of logits, in parts of the largest: what sums of float32 in another order make of them.
NEAR = 1e-5
PROMPT = [5, 6, 7, 8, 200, 31, 77, 300, 12, 13, 9, 45]


@dataclass(frozen=True, slots=True)
class Format:
    config: dict[str, Any]
    write: Writer
    level: str
    rounding: Rounding = field(default_factory=Rounding)
    header: dict[str, str] = field(default_factory=dict)


def _gptq(level: str, **how: Any) -> Format:
    bits, group = how.get("bits", 4), how.get("group", 32)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": True}
    if how.get("version") == 2:
        config["checkpoint_format"] = "gptq_v2"
    rounding = Rounding(group=None if group == -1 else group, sorted_="sorted_" in how)
    return Format(config, writers.gptq(**how), level, rounding)


def _compressed(kind: str, level: str, **weights: Any) -> Format:
    group = weights.get("group_size") or weights.get("block_structure", (None,))[-1]
    floats = Rounding("float8", group, float8_words, compiled=True)
    rounding = floats if weights["type"] == "float" else Rounding(group=group)
    return Format(
        {**scheme(**weights), "format": kind}, compressed(kind, **weights), level, rounding
    )


def _hqq(bits: int, level: str) -> Format:
    quant = {"weight_quant_params": {"nbits": bits, "group_size": 32, "axis": 1}}
    rounding = Rounding(weights=half_points if bits == 8 else half_minima, compiled=bits == 8)
    return Format(
        {"quant_method": "hqq", "quant_config": quant}, writers.hqq(bits), level, rounding
    )


def _nvfp4_scales(stored: Mapping[str, Tensor]) -> Tensor:
    return stored["weight_scale"].float() * stored["weight_scale_2"]


def _torchao(group: int | None) -> Format:
    write, header = packages.torchao8(group)
    rounding = Rounding(group=group, weights=half_scales(lambda stored: stored["_weight_scale"]))
    return Format({"quant_method": "torchao"}, write, "kept", rounding, header)


_GROUPED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_INT8 = {"num_bits": 8, "type": "int"}
_ROWS8 = {**_INT8, "strategy": "channel"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_FLOATS = Rounding("floats")
_BLOCKS = Rounding(group=64, weights=table_words, compiled=True)
_BY_TENSOR = Rounding("float8", None, float8_words, compiled=True)
FORMATS: dict[str, Format] = {
    "gptq-2": _gptq("read", bits=2),
    "gptq-3": _gptq("read", bits=3),
    "gptq-4": _gptq("kept"),
    "gptq-4-zeros": _gptq("kept", symmetric=False),
    "gptq-4-v2": _gptq("kept", symmetric=False, version=2),
    "gptq-4-rows": _gptq("kept", group=-1),
    "gptq-4-sorted": _gptq("kept", sorted_=True, symmetric=False),
    "gptq-8": _gptq("kept", bits=8),
    "gptq-8-zeros": _gptq("kept", bits=8, symmetric=False),
    "gptq-8-sorted": _gptq("kept", bits=8, sorted_=True, symmetric=False),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
                  writers.awq(), "kept"),
    "awq-8": Format({"quant_method": "awq", "bits": 8, "group_size": 32, "version": "gemm"},
                    writers.awq(bits=8), "kept"),
    "fp8-tensor": Format({"quant_method": "fp8", "activation_scheme": "static"},
                         writers.fp8("tensor"), "kept", _BY_TENSOR),
    "fp8-row": Format({"quant_method": "fbgemm_fp8"}, writers.fp8("row"), "kept",
                      _BY_TENSOR),
    "fp8-block": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        writers.fp8("block", "weight_scale_inv"), "kept",
        Rounding("float8", weights=float8_words, compiled=True),
    ),
    "fp8-e5m2": Format({"quant_method": "fp8"}, writers.fp8("row", dtype=torch.float8_e5m2),
                       "read", _FLOATS),
    "fp8-e5m2-block": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        writers.fp8("block", "weight_scale_inv", dtype=torch.float8_e5m2), "read", _FLOATS,
    ),
    "modelopt": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, writers.fp8("tensor"),
                       "kept", _BY_TENSOR),
    "nvfp4": Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, writers.nvfp4,
                    "kept", Rounding(group=16, weights=half_scales(_nvfp4_scales))),
    "hqq-2": _hqq(2, "read"),
    "hqq-3": _hqq(3, "read"),
    "hqq-4": _hqq(4, "kept"),
    "hqq-8": _hqq(8, "kept"),
    "squeezellm": Format({"quant_method": "squeezellm", "wbits": 4}, writers.squeezellm, "read",
                         _FLOATS),
    "aqlm": Format({"quant_method": "aqlm"}, writers.aqlm, "read", _FLOATS),
    "bnb-nf4": Format(_BNB, packages.bitsandbytes4("nf4", False), "kept", _BLOCKS),
    "bnb-fp4": Format(_BNB, packages.bitsandbytes4("fp4", False), "kept", _BLOCKS),
    "bnb-nested": Format(_BNB, packages.bitsandbytes4("nf4", True), "kept", _BLOCKS),
    "bnb-bf16": Format(_BNB, packages.bitsandbytes4("nf4", False, torch.bfloat16), "kept", _BLOCKS),
    "bnb-int8": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, writers.bitsandbytes_int8, "kept",
        Rounding(group=None, weights=half_scales(lambda stored: stored["SCB"][:, None] / 127)),
    ),
    "ct-w4a16": _compressed("pack-quantized", "kept", **_GROUPED),
    "ct-w4a16-zeros": _compressed("pack-quantized", "kept", symmetric=False, **_GROUPED),
    "ct-w3a16": _compressed("pack-quantized", "read", **{**_GROUPED, "num_bits": 3}),
    "ct-w8a16": _compressed("pack-quantized", "kept", **_ROWS8),
    "ct-w8a8": _compressed("int-quantized", "kept", **_ROWS8),
    "ct-w8-zeros": _compressed("int-quantized", "kept", symmetric=False, **_ROWS8),
    "ct-w8-block": _compressed("int-quantized", "kept", strategy="block",
                               block_structure=[32, 32], **_INT8),
    "ct-fp8-tensor": _compressed("float-quantized", "kept", strategy="tensor", **_FLOAT8),
    "ct-fp8-row": _compressed("float-quantized", "kept", strategy="channel", **_FLOAT8),
    "ct-fp8-group": _compressed("float-quantized", "kept", strategy="group", group_size=32,
                                **_FLOAT8),
    "ct-mxfp8": _compressed("mxfp8-quantized", "kept", strategy="group", group_size=32,
                            scale_dtype="torch.uint8", **_FLOAT8),
    "ct-mxfp4": Format({**scheme(**_MXFP4), "format": "mxfp4-pack-quantized"}, writers.dense_mxfp4,
                       "kept"),
    "ct-nvfp4": Format(
        {**scheme(**_NVFP4), "format": "nvfp4-pack-quantized"}, writers.packed_nvfp4, "kept",
        Rounding(group=16, weights=half_scales(lambda stored: stored["weight_scale"].float()
                                               / stored["weight_global_scale"])),
    ),
    "torchao-int8": _torchao(None),
    "torchao-int4": _torchao(32),
}  # fmt: skip
Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pair(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    pairs: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in pairs:
            chosen, target = FORMATS[name], tmp_path_factory.mktemp(name)
            pairs[name] = make_pair(
                model_folder("llama"), target, chosen.config, chosen.write, header=chosen.header
            )
        return pairs[name]

    return get


def far(logits: Tensor, expected: Tensor) -> float:
    """In parts of the largest that is wanted."""
    return float((logits - expected).abs().max() / expected.abs().max())


def opened(folder: Path, config: dict[str, Any]) -> QuantizedWeights:
    form = find_format(config)
    assert form is not None
    return QuantizedWeights(WeightReader(folder), form)


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_means_what_its_plain_weights_are(name: str, pair: Pairs) -> None:
    """All rows, some of them, and some by their numbers."""
    converted = pair(name)
    weights = opened(converted.packed, FORMATS[name].config)
    for module, baseline_weight in converted.weights.items():
        matrix = weights.matrix(
            f"{module}.weight", (baseline_weight.shape[0], baseline_weight.shape[1])
        )
        for rows in (slice(None), slice(9, 40), torch.tensor([30, 2, 17])):
            torch.testing.assert_close(
                matrix.floats(rows), baseline_weight[rows], rtol=1e-5, atol=1e-6
            )
    assert weights.matrix("lm_head.weight", (384, 64)).source == "float32"
    used = {name for module in converted.weights for name in weights.form.tensors_of(module)}
    assert used.isdisjoint(weights.unused_names())


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_says_what_transformers_says_to_the_plain_weights(name: str, pair: Pairs) -> None:
    """Without compiled kernels activations stay as they are, and integers keep their grids."""
    converted = pair(name)
    llm = LLM(str(converted.packed), cpu_kernels=False, **SMALL)
    tokens, logits = logits_of(llm, PROMPT, 6)
    assert [tokens] == greedy_all(Oracle(converted.dense).model, [PROMPT], 6, [tokens])
    output, expected = RoundedModel(converted, FORMATS[name].rounding, inputs=False).greedy(
        PROMPT, 6
    )
    assert tokens == output
    assert far(logits, expected) < NEAR


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernels_round_what_the_format_says_and_nothing_else(
    name: str, pair: Pairs, compiler: None
) -> None:
    """And the report tells what became of each layer; a batch says what its requests say alone."""
    converted = pair(name)
    llm = LLM(str(converted.packed), **SMALL)
    model = RoundedModel(converted, FORMATS[name].rounding, inputs=True)
    prompt = model.clear_prompt(5, 3)
    tokens, logits = logits_of(llm, prompt, 3)
    output, expected = model.greedy(prompt, 3)
    assert tokens == output
    assert far(logits, expected) < NEAR
    reports = llm.load_report()
    layers = [report for report in reports if "_proj" in report.layer]
    assert len(layers) == 3 * 4
    assert {report.level for report in layers} == {FORMATS[name].level}
    assert all(report.error < 1e-3 for report in reports)
    batch = [PROMPT, PROMPT[:3], [9] * 40]
    together = [r.outputs[0].token_ids for r in llm.generate(batch, GREEDY, use_tqdm=False)]
    llm.core.reset_prefix_cache()
    isolated_token_ids = [
        llm.generate([p], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in batch
    ]
    assert together == isolated_token_ids


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.level == "read"])
def test_what_is_read_is_off_by_no_more_than_its_new_form_loses(
    name: str, pair: Pairs, compiler: None
) -> None:
    """Half a step of bfloat16, or what float16 loses of scales and minima."""
    llm = LLM(str(pair(name).packed), **{**SMALL, "dtype": "bfloat16"})
    errors = [report.error for report in llm.load_report() if "_proj" in report.layer]
    assert max(errors) <= (2**-8 if FORMATS[name].rounding.inputs == "floats" else 2**-10)
