"""A checkpoint says in one of several places how it was quantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.contract.errors import InvalidRequest, ModelLoadError
from tests.engine.checkpoints import writers
from tests.engine.checkpoints.folders import Pair, make_pair
from tests.engine.checkpoints.packages import compressed, scheme

_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
KINDS = {
    "ct": (scheme(**_W4), compressed("pack-quantized", **_W4)),
    "gptq": (GPTQ, writers.gptq()),
    "awq": (AWQ, writers.awq()),
}
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 8, "max_model_len": 64, "cpu_kernels": False}
Config = dict[str, Any]


@pytest.fixture(scope="module")
def pairs(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pair]:
    @cache
    def get(kind: str) -> Pair:
        return make_pair(model_folder("llama"), tmp_path_factory.mktemp(kind), *KINDS[kind])

    return get


def moved(folder: Path, target: Path, index: Callable[[Config], Config]) -> Path:
    """The same checkpoint, whose config.json has what `index` makes of its quantization_config."""
    shutil.copytree(folder, target)
    raw = json.loads((target / "config.json").read_text())
    quantization = raw.pop("quantization_config")
    (target / "config.json").write_text(json.dumps({**raw, **index(quantization)}))
    return target


def _nameless(quantization: Config) -> Config:
    return {name: value for name, value in quantization.items() if name != "quant_method"}


@pytest.mark.parametrize(
    "index",
    [
        lambda quantization: {"compression_config": quantization},
        lambda quantization: {
            "compression_config": {"quantization_config": _nameless(quantization)}
        },
        lambda quantization: {"compression_config": {**quantization, "quant_method": "sparseml"}},
        lambda quantization: {"text_config": {"quantization_config": quantization}},
    ],
)
def test_other_places_say_the_same(
    index: Callable[[Config], Config], pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    folder = pairs("ct").packed
    llm = LLM(str(moved(folder, tmp_path / "moved", index)), quantization="int8", **SMALL)
    with pytest.raises(InvalidRequest, match="quantized already"):
        llm.save_quantized(tmp_path / "again")
    again = LLM(str(tmp_path / "moved"), **SMALL)
    assert again.load_report() == LLM(str(folder), **SMALL).load_report()


@pytest.mark.parametrize(
    ("kind", "file", "quantization"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
        ("awq", "quantize_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
    ],
)
def test_files_without_a_methods_name_are_read_where_it_is_asked_for(
    kind: str, file: str, quantization: Config, pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    folder = moved(pairs(kind).packed, tmp_path / "moved", lambda quantization: {})
    (folder / file).write_text(json.dumps(quantization))
    with pytest.raises(ModelLoadError, match="if that is quantized"):
        LLM(str(folder), **SMALL)
    report = LLM(str(folder), quantization=kind, **SMALL).load_report()
    assert report == LLM(str(pairs(kind).packed), **SMALL).load_report()
    (folder / file).write_text(json.dumps({**quantization, "w_bit": 7, "bits": 7}))
    with pytest.raises(ModelLoadError, match=r"quantization_config\.bits is 7"):
        LLM(str(folder), quantization=kind, **SMALL)
