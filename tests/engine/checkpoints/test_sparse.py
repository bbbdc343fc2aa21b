"""Sparse checkpoints and Marlin's: what they stand for is read, and tokens are the plain ones'."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import LLM
from engine.contract.errors import ModelLoadError
from tests.engine.checkpoints.folders import FILE, Pair, make_pair
from tests.engine.checkpoints.packages import scheme
from tests.engine.checkpoints.sparse import bitmask, marlin, marlin_24
from tests.engine.checkpoints.test_formats import GREEDY, PROMPT, SMALL, opened
from tests.engine.checkpoints.writers import Writer
from tests.engine.models import make_model

#: Whole tiles, and several groups of 128 inputs.
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": 2}
_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_ROWS = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_CT = ("weight_packed", "scale_packed", "meta")
_GPTQ_24 = ("B_24", "s", "B_meta")


def sparse(layout: str, **config: Any) -> dict[str, Any]:
    """With what LLM Compressor writes of sparsity."""
    config.setdefault("quant_method", "compressed-tensors")
    return {**config, "sparsity_config": {"format": layout, "sparsity_structure": "2:4"}}


LAYOUTS: dict[str, tuple[dict[str, Any], Writer]] = {
    "marlin": ({"quant_method": "marlin", "group_size": 128}, marlin(128)),
    "marlin rows": ({"quant_method": "marlin", "group_size": -1}, marlin(None)),
    "gptq marlin": ({**_GPTQ, "is_marlin_format": True}, marlin(128)),
    "gptq marlin by name": ({**_GPTQ, "checkpoint_format": "marlin"}, marlin(128)),
    "gptq marlin 24": ({**_GPTQ, "checkpoint_format": "marlin_24"}, marlin_24(4, 128, _GPTQ_24)),
    "gptq marlin 24 bytes": (
        {"quant_method": "gptq_marlin_24", "bits": 8, "group_size": -1},
        marlin_24(8, None, _GPTQ_24),
    ),
    "marlin-24": ({**scheme(**_GROUPS), "format": "marlin-24"}, marlin_24(4, 128, _CT)),
    "marlin-24 bytes": ({**scheme(**_ROWS), "format": "marlin-24"}, marlin_24(8, None, _CT)),
    "bit mask": (sparse("sparse-bitmask"), bitmask(torch.bfloat16, fours=False)),
    "bit mask of four": (sparse("sparse-24-bitmask"), bitmask(torch.float16, fours=True)),
    "bit mask, fp8": (
        sparse("sparse-24-bitmask", **{**scheme(**_FLOAT8), "format": "float-quantized"}),
        bitmask(torch.float8_e4m3fn, fours=True, scaled=True),
    ),
    "bit mask, int8": (
        sparse("sparse-bitmask", **{**scheme(**_ROWS), "format": "int-quantized"}),
        bitmask(torch.int8, fours=False, scaled=True),
    ),
}


#: sha256 of what compressed-tensors 0.9.4, the last one with that compressor, made of the same.
BY_COMPRESSED_TENSORS = {
    4: "1ea6c7bbea8ed54e2adca9c14e1ca5b482ee924033aac9668d6df2f54ca94110",
    8: "7c70e2bfc69062d9dd3e64cf4737e01b2d9f09afe4cd6c4a7c0bc8cb7d31589b",
}


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (8, None)])
def test_the_tests_write_marlin_24_as_compressed_tensors_does(bits: int, group: int | None) -> None:
    integers = torch.arange(64 * 512) * 7919 % 13 - 6
    written, _ = marlin_24(bits, group, _CT)(((integers + (integers >= 0)) * 0.25).view(64, 512))
    content = b"".join(written[name].contiguous().numpy().tobytes() for name in _CT)
    assert hashlib.sha256(content).hexdigest() == BY_COMPRESSED_TENSORS[bits]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @cache
    def get(name: str) -> Pair:
        folder = tmp_path_factory.mktemp("sparse")
        return make_pair(make_model("llama", folder / "source", **SHAPE), folder, *LAYOUTS[name])

    return get


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layer_means_what_its_plain_weights_are(name: str, pair: Callable[[str], Pair]) -> None:
    """All rows, some of them, and some by their numbers."""
    weights = opened(pair(name).packed, LAYOUTS[name][0])
    for module, baseline_weight in pair(name).weights.items():
        matrix = weights.matrix(
            f"{module}.weight", (baseline_weight.shape[0], baseline_weight.shape[1])
        )
        for rows in (slice(None), slice(9, 40), slice(0, 0), torch.tensor([30, 2, 63])):
            torch.testing.assert_close(
                matrix.floats(rows).float(), baseline_weight[rows], rtol=1e-6, atol=0
            )
    used = {name for module in pair(name).weights for name in weights.form.tensors_of(module)}
    assert used.isdisjoint(weights.unused_names())


@pytest.mark.parametrize("name", ["marlin", "gptq marlin 24", "marlin-24 bytes", "bit mask, fp8"])
def test_tokens_are_those_of_the_plain_weights(name: str, pair: Callable[[str], Pair]) -> None:
    """On the torch kernels, which round no activations, so that nothing but the weights counts."""
    answers = [
        LLM(str(folder), cpu_kernels=False, **SMALL)
        .generate([PROMPT], GREEDY, use_tqdm=False)[0]
        .outputs[0]
        .token_ids
        for folder in (pair(name).packed, pair(name).dense)
    ]
    assert answers[0] == answers[1]


def test_marlins_integers_stay_packed(pair: Callable[[str], Pair], compiler: None) -> None:
    reports = LLM(str(pair("marlin-24").packed), **SMALL).load_report()
    assert {report.level for report in reports if "_proj" in report.layer} == {"kept"}


def _cut(tensors: dict[str, Tensor], suffix: str) -> str:
    name = next(name for name in tensors if name.endswith(suffix))
    tensors[name] = tensors[name][:-1].clone()
    return name


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("marlin", ".s"), ("gptq marlin 24", ".B_meta"), ("marlin-24", ".scale_packed"),
        ("bit mask", ".compressed"), ("bit mask of four", ".bitmask"), ("bit mask", ".shape"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    name: str, suffix: str, pair: Callable[[str], Pair], tmp_path: Path
) -> None:
    tensors = load_file(pair(name).packed / FILE)
    cut = _cut(tensors, suffix)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ModelLoadError, match=cut) as caught:
        opened(tmp_path, LAYOUTS[name][0])
    assert caught.value.param == suffix[1:]


def test_a_width_that_is_not_whole_tiles_is_refused(tmp_path: Path) -> None:
    parts, _ = marlin(None)(torch.randn(64, 64))
    parts["B"] = parts["B"][:, :-4].contiguous()
    save_file({f"a.q_proj.{key}": value for key, value in parts.items()}, tmp_path / FILE)
    with pytest.raises(ModelLoadError, match=r"isn't whole tiles"):
        opened(tmp_path, {"quant_method": "marlin"})


def test_another_sparse_layout_is_refused_with_those_that_are_read() -> None:
    with pytest.raises(ModelLoadError, match="known are dense, sparse-bitmask, sparse-24-bitmask"):
        opened(Path(), sparse("sparse-48"))


def test_a_dense_sparsity_config_is_of_no_weights(tmp_path: Path) -> None:
    """As checkpoints have it of which the KV cache alone is quantized."""
    from engine.quantization.formats.registry import find_format

    assert find_format(sparse("dense")) is None
