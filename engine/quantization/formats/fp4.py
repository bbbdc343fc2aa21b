"""e2m1: 4-bit floats, two in a byte, with a scale for 16 or 32 neighbors in a row.

Twice such a float is an integer from -12 to 12, so 8-bit integers hold it exactly for kernels
without these floats.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.quantization.formats.base import (
    NAN_EXPONENT,
    CheckpointFormat,
    ConfigFields,
    LayerTensors,
    TensorSource,
    modules_with,
)
from engine.quantization.formats.fp8 import float8_matrix, float8_modules
from engine.quantization.formats.matrices import GroupedMatrix, nibbles
from engine.quantization.packing import Rows, WeightSource

_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def e2m1_matrix(
    source: str, packed: Tensor, scales: Tensor, group: int, factor: float = 1.0
) -> WeightSource:
    """weight = e2m1 * scale * factor, of packed uint8 [N, K / 2] and scales [N, K / group]."""

    def values(selected: Rows) -> Tensor:
        return _DOUBLED[nibbles(packed[selected]).long()]

    rows, half = packed.shape
    return GroupedMatrix(
        source, (rows, 2 * half), group, 8, values, scales, factor=factor / 2.0, stored_bits=4,
        codes=lambda selected: nibbles(packed[selected]),
    )  # fmt: skip


# MXFP4 as in gpt-oss's experts: `gate_up_proj_blocks` and `gate_up_proj_scales`.
#
# Blocks uint8 [experts, rows, groups, 16] contain e2m1, scales uint8 [experts, rows, groups] powers
# of two for 32 neighbors. (OCP Microscaling Formats 1.0.)


MXFP4_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


class MXFP4(CheckpointFormat):
    """See `CheckpointFormat`. A packed weight is that of one expert: `experts.gate_up_proj#3`."""

    name = "mxfp4"

    def __init__(self, fields: ConfigFields) -> None:
        pass

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        for name in sorted(tensors.names()):
            if name.endswith(_BLOCKS):
                module, shape = name.removesuffix(_BLOCKS), tensors.stored_shape(name)
                yield from (f"{module}#{expert}" for expert in range(shape[0] if shape else 0))

    def suffixes(self) -> Iterable[str]:
        return ()

    def tensors_of(self, module: str) -> Iterable[str]:
        module_name = module.rpartition("#")[0]
        return module_name + _BLOCKS, module_name + _SCALES

    def matrix(self, parts: LayerTensors) -> WeightSource:
        module_name, _, number = parts.module.rpartition("#")
        tensors = LayerTensors(parts.tensors, module_name, joint="")
        experts, rows, groups, half = tensors.shape(_BLOCKS, 4)
        if half != MXFP4_GROUP // 2:
            raise tensors.error(_BLOCKS, f"has blocks of {half} bytes, not {MXFP4_GROUP // 2}")
        blocks = tensors.read(_BLOCKS, (torch.uint8,))[int(number)]
        scales = tensors.read(_SCALES, (torch.uint8,), (experts, rows, groups))[int(number)]
        if bool((scales == NAN_EXPONENT).any()):
            raise tensors.error(_SCALES, "has values that aren't finite")
        powers = scales.view(torch.float8_e8m0fnu)
        return e2m1_matrix("mxfp4", blocks.view(rows, groups * half), powers, MXFP4_GROUP)


# ModelOpt (NVIDIA): FP8 with one scale, scales of blocks or (MXFP8) of 32 neighbors; and NVFP4:
# e2m1 with e4m3 scales and a global one.


NVFP4_GROUP = 16
_ALGORITHMS = (
    "fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "fp8_block_scales", "nvfp4", "w4a16_nvfp4",
    "mxfp8", "mixed_precision",
)  # fmt: skip


class ModelOpt(CheckpointFormat):
    """See `CheckpointFormat`. Its config may be in `hf_quant_config.json`."""

    name = "modelopt"

    def __init__(self, fields: ConfigFields) -> None:
        inner = fields.object("quantization") or fields
        algorithm = inner.string("quant_algo", "fp8")
        if algorithm not in _ALGORITHMS:
            supported = ", ".join(_ALGORITHMS)
            raise inner.error("quant_algo", f"is {algorithm!r}; known are {supported}")
        inner.integer("group_size", NVFP4_GROUP)

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        four = [
            name
            for name in modules_with(tensors, "weight_scale_2")
            if f"{name}.weight" in tensors and tensors.stored_dtype(f"{name}.weight") == torch.uint8
        ]
        return [*four, *float8_modules(tensors)]

    def suffixes(self) -> Iterable[str]:
        return "weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"

    def matrix(self, parts: LayerTensors) -> WeightSource:
        if "pre_quant_scale" in parts:
            raise parts.error("pre_quant_scale", "scales the layer's inputs, which isn't done here")
        if parts.tensors.stored_dtype(parts.name("weight")) != torch.uint8:
            block = (1, MXFP4_GROUP) if _has_exponents(parts) else (128, 128)
            return float8_matrix(parts, "weight_scale", block, "modelopt")
        return nvfp4_matrix(parts, "weight", parts.scalar("weight_scale_2"), "modelopt nvfp4")


def _has_exponents(parts: LayerTensors) -> bool:
    """Whether scales are powers of two, as MXFP8's are."""
    if "weight_scale" not in parts:
        return False
    return parts.tensors.stored_dtype(parts.name("weight_scale")) == torch.uint8


def nvfp4_matrix(parts: LayerTensors, suffix: str, factor: float, source: str) -> WeightSource:
    """e2m1 [N, K / 2] with e4m3 scales of 16 neighbors, and the global scale `factor`."""
    rows, half = parts.shape(suffix, 2)
    if 2 * half % NVFP4_GROUP:
        raise parts.error(suffix, f"has {2 * half} columns, not whole groups of {NVFP4_GROUP}")
    packed = parts.read(suffix, (torch.uint8,))
    shape = (rows, 2 * half // NVFP4_GROUP)
    scales = parts.scales("weight_scale", shape, dtypes=(torch.float8_e4m3fn,))
    return e2m1_matrix(source, packed, scales, NVFP4_GROUP, factor)


def quantization_of(config: object, where: str) -> dict[str, object]:
    """Return `hf_quant_config.json` as a `quantization_config`. Raises `ModelLoadError`."""
    if not isinstance(config, dict) or not isinstance(config.get("quantization"), dict):
        raise ModelLoadError(f"{where} has no object named quantization.", param="quantization")
    return {"quant_method": "modelopt", **config}
