"""Every format says what the plain weights that it stands for say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.models.quantized_weights import QuantizedWeights
from engine.models.weights import WeightReader
from engine.quantization.checkpoint.registry import find_format
from tests.engine.checkpoints import packages, writers
from tests.engine.checkpoints.folders import Pair, make_pair
from tests.engine.checkpoints.packages import compressed, scheme
from tests.engine.checkpoints.writers import Writer
from tests.engine.models import Oracle

_ROUGH = 0.05
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
PROMPT = [5, 6, 7, 8, 200, 31, 77, 300, 12, 13, 9, 45]
_INT8, _HEADER8 = packages.torchao8(None)
_INT4, _HEADER4 = packages.torchao8(32)


@dataclass(frozen=True, slots=True)
class Format:
    config: dict[str, Any]
    write: Writer
    level: str
    #: Of log probabilities; more where float16 doesn't hold the scales or minima exactly.
    near: float = 1e-3
    header: dict[str, str] = field(default_factory=dict)


def _gptq(level: str, **how: Any) -> Format:
    bits, group = how.get("bits", 4), how.get("group", 32)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": True}
    if how.get("version") == 2:
        config["checkpoint_format"] = "gptq_v2"
    return Format(config, writers.gptq(**how), level)


def _compressed(kind: str, level: str, **weights: Any) -> Format:
    return Format({**scheme(**weights), "format": kind}, compressed(kind, **weights), level)


def _hqq(bits: int, level: str) -> Format:
    quant = {"weight_quant_params": {"nbits": bits, "group_size": 32, "axis": 1}}
    return Format({"quant_method": "hqq", "quant_config": quant}, writers.hqq(bits), level, _ROUGH)


_GROUPED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_ROWS8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
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
                         writers.fp8("tensor"), "kept"),
    "fp8-row": Format({"quant_method": "fbgemm_fp8"}, writers.fp8("row"), "kept"),
    "fp8-block": Format({"quant_method": "fp8", "weight_block_size": [32, 32]},
                        writers.fp8("block", "weight_scale_inv"), "kept"),
    "fp8-e5m2": Format({"quant_method": "fp8"}, writers.fp8("row", dtype=torch.float8_e5m2),
                       "read"),
    "fp8-e5m2-block": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        writers.fp8("block", "weight_scale_inv", dtype=torch.float8_e5m2), "read",
    ),
    "nvfp4": Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, writers.nvfp4,
                    "kept", _ROUGH),
    "hqq-2": _hqq(2, "read"),
    "hqq-3": _hqq(3, "read"),
    "hqq-4": _hqq(4, "kept"),
    "hqq-8": _hqq(8, "kept"),
    "squeezellm": Format({"quant_method": "squeezellm", "wbits": 4}, writers.squeezellm, "read"),
    "aqlm": Format({"quant_method": "aqlm"}, writers.aqlm, "read"),
    "bnb-nf4": Format(_BNB, packages.bitsandbytes4("nf4", False), "kept"),
    "bnb-fp4": Format(_BNB, packages.bitsandbytes4("fp4", False), "kept"),
    "bnb-nested": Format(_BNB, packages.bitsandbytes4("nf4", True), "kept"),
    "bnb-int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True},
                       writers.bitsandbytes_int8, "kept", _ROUGH),
    "ct-w4a16": _compressed("pack-quantized", "kept", **_GROUPED),
    "ct-w4a16-zeros": _compressed("pack-quantized", "kept", symmetric=False, **_GROUPED),
    "ct-w3a16": _compressed("pack-quantized", "read", **{**_GROUPED, "num_bits": 3}),
    "ct-w8a16": _compressed("pack-quantized", "kept", **_ROWS8),
    "ct-w8a8": _compressed("int-quantized", "kept", **_ROWS8),
    "ct-w8-zeros": _compressed("int-quantized", "kept", symmetric=False, **_ROWS8),
    "ct-fp8-tensor": _compressed("float-quantized", "kept", strategy="tensor", **_FLOAT8),
    "ct-fp8-row": _compressed("float-quantized", "kept", strategy="channel", **_FLOAT8),
    "torchao-int8": Format({"quant_method": "torchao"}, _INT8, "kept", _ROUGH, _HEADER8),
    "torchao-int4": Format({"quant_method": "torchao"}, _INT4, "kept", _ROUGH, _HEADER4),
}  # fmt: skip
Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pair(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            chosen, target = FORMATS[name], tmp_path_factory.mktemp(name)
            made[name] = make_pair(
                model_folder("llama"), target, chosen.config, chosen.write, header=chosen.header
            )
        return made[name]

    return get


def opened(folder: Path, config: dict[str, Any]) -> QuantizedWeights:
    form = find_format(config)
    assert form is not None
    return QuantizedWeights(WeightReader(folder), form)


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_means_what_its_plain_weights_are(name: str, pair: Pairs) -> None:
    """All rows, some of them, and some by their numbers."""
    made = pair(name)
    weights = opened(made.packed, FORMATS[name].config)
    for module, plain in made.weights.items():
        matrix = weights.matrix(f"{module}.weight", (plain.shape[0], plain.shape[1]))
        for rows in (slice(None), slice(9, 40), torch.tensor([30, 2, 17])):
            torch.testing.assert_close(matrix.floats(rows), plain[rows], rtol=1e-5, atol=1e-6)
    assert weights.matrix("lm_head.weight", (384, 64)).source == "float32"
    used = {name for module in made.weights for name in weights.form.tensors_of(module)}
    assert used.isdisjoint(weights.unread())


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_says_what_transformers_says_to_the_plain_weights(name: str, pair: Pairs) -> None:
    made = pair(name)
    llm = LLM(
        str(made.packed), dtype="float32", cpu_kernels=False, num_gpu_blocks_override=50,
        max_model_len=128,
    )  # fmt: skip
    oracle = Oracle(made.plain)
    found = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert list(found) == oracle.greedy(PROMPT, 6)
    wanted = oracle.logprobs(PROMPT)
    scores = llm.generate([PROMPT], SCORED, use_tqdm=False)[0].prompt_logprobs
    assert scores is not None
    for position in range(1, len(PROMPT)):
        entry = scores[position]
        assert entry is not None
        token = PROMPT[position]
        assert entry[token].logprob == pytest.approx(
            float(wanted[position - 1, token]), abs=FORMATS[name].near
        )


@pytest.mark.parametrize("name", FORMATS)
def test_the_report_says_what_became_of_each_layer(name: str, pair: Pairs, compiler: None) -> None:
    llm = LLM(
        str(pair(name).packed), dtype="float32", num_gpu_blocks_override=50, max_model_len=128
    )
    reports = llm.load_report()
    layers = [report for report in reports if "_proj" in report.layer]
    assert len(layers) == 3 * 4
    assert {report.level for report in layers} == {FORMATS[name].level}
    assert all(report.error < 1e-3 for report in reports)
    batch = [PROMPT, PROMPT[:3], [9] * 40]
    together = [r.outputs[0].token_ids for r in llm.generate(batch, GREEDY, use_tqdm=False)]
    llm.core.reset_prefix_cache()
    alone = [llm.generate([p], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in batch]
    assert together == alone
