"""ModelOpt (NVIDIA): FP8 with a scale, for blocks or (MXFP8) 32 neighbours, and NVFP4: e2m1 with
e4m3 scales and one for all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.contract.errors import ModelLoadError
from engine.quantization.checkpoint.fields import Fields
from engine.quantization.checkpoint.format import CheckpointFormat
from engine.quantization.checkpoint.fp4 import e2m1_matrix
from engine.quantization.checkpoint.fp8 import float8_matrix, float8_modules
from engine.quantization.checkpoint.mxfp4 import MXFP4_GROUP as MX_GROUP
from engine.quantization.checkpoint.tensors import Parts, Tensors, modules_with
from engine.quantization.matrix import Matrix

NVFP4_GROUP = 16
_ALGORITHMS = (
    "fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "fp8_block_scales", "nvfp4", "w4a16_nvfp4",
    "mxfp8", "mixed_precision",
)  # fmt: skip


class ModelOpt(CheckpointFormat):
    """See `CheckpointFormat`. Its config may stand in `hf_quant_config.json`."""

    name = "modelopt"

    def __init__(self, fields: Fields) -> None:
        inner = fields.object("quantization") or fields
        algorithm = inner.word("quant_algo", "fp8")
        if algorithm not in _ALGORITHMS:
            known = ", ".join(_ALGORITHMS)
            raise inner.wrong("quant_algo", f"is {algorithm!r}; known are {known}")
        inner.integer("group_size", NVFP4_GROUP)

    def modules(self, tensors: Tensors) -> Iterable[str]:
        """See `CheckpointFormat`."""
        four = [
            name
            for name in modules_with(tensors, "weight_scale_2")
            if f"{name}.weight" in tensors and tensors.stored_dtype(f"{name}.weight") == torch.uint8
        ]
        return [*four, *float8_modules(tensors)]

    def suffixes(self) -> Iterable[str]:
        """See `CheckpointFormat`."""
        return "weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"

    def matrix(self, parts: Parts) -> Matrix:
        """See `CheckpointFormat`."""
        if "pre_quant_scale" in parts:
            raise parts.wrong("pre_quant_scale", "scales the layer's inputs, which isn't done here")
        if parts.tensors.stored_dtype(parts.name("weight")) != torch.uint8:
            block = (1, MX_GROUP) if _has_exponents(parts) else (128, 128)
            return float8_matrix(parts, "weight_scale", block, "modelopt")
        return nvfp4_matrix(parts, "weight", parts.scalar("weight_scale_2"), "modelopt nvfp4")


def _has_exponents(parts: Parts) -> bool:
    """Whether scales are powers of two, as MXFP8's are."""
    if "weight_scale" not in parts:
        return False
    return parts.tensors.stored_dtype(parts.name("weight_scale")) == torch.uint8


def nvfp4_matrix(parts: Parts, suffix: str, factor: float, source: str) -> Matrix:
    """e2m1 [N, K / 2] with e4m3 scales of 16 neighbours, and `factor` for all of them."""
    rows, half = parts.shape(suffix, 2)
    if 2 * half % NVFP4_GROUP:
        raise parts.wrong(suffix, f"has {2 * half} columns, not whole groups of {NVFP4_GROUP}")
    packed = parts.take(suffix, (torch.uint8,))
    shape = (rows, 2 * half // NVFP4_GROUP)
    scales = parts.scales("weight_scale", shape, dtypes=(torch.float8_e4m3fn,))
    return e2m1_matrix(source, packed, scales, NVFP4_GROUP, factor)


def quantization_of(config: object, where: str) -> dict[str, object]:
    """`hf_quant_config.json` as a `quantization_config`. Raises `ModelLoadError`."""
    if not isinstance(config, dict) or not isinstance(config.get("quantization"), dict):
        raise ModelLoadError(f"{where} has no object named quantization.", param="quantization")
    return {"quant_method": "modelopt", **config}
