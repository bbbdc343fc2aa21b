"""MXFP4 as gpt-oss keeps its experts: `gate_up_proj_blocks` and `gate_up_proj_scales`.

Blocks uint8 [experts, rows, groups, 16] hold e2m1, scales uint8 [experts, rows, groups] powers of
two for 32 neighbours. (OCP Microscaling Formats 1.0.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.quantization.checkpoint.fields import Fields
from engine.quantization.checkpoint.format import CheckpointFormat
from engine.quantization.checkpoint.fp4 import e2m1_matrix
from engine.quantization.checkpoint.tensors import NAN_EXPONENT, Parts, Tensors
from engine.quantization.matrix import Matrix

MXFP4_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


class MXFP4(CheckpointFormat):
    """See `CheckpointFormat`. A packed weight is one expert's: `experts.gate_up_proj#3`."""

    name = "mxfp4"

    def __init__(self, fields: Fields) -> None:
        pass

    def modules(self, tensors: Tensors) -> Iterable[str]:
        """See `CheckpointFormat`."""
        for name in sorted(tensors.names()):
            if name.endswith(_BLOCKS):
                module, shape = name.removesuffix(_BLOCKS), tensors.stored_shape(name)
                yield from (f"{module}#{expert}" for expert in range(shape[0] if shape else 0))

    def suffixes(self) -> Iterable[str]:
        """See `CheckpointFormat`."""
        return ()

    def tensors_of(self, module: str) -> Iterable[str]:
        """See `CheckpointFormat`."""
        whole = module.rpartition("#")[0]
        return whole + _BLOCKS, whole + _SCALES

    def matrix(self, parts: Parts) -> Matrix:
        """See `CheckpointFormat`."""
        whole, _, number = parts.module.rpartition("#")
        own = Parts(parts.tensors, whole, joint="")
        experts, rows, groups, half = own.shape(_BLOCKS, 4)
        if half != MXFP4_GROUP // 2:
            raise own.wrong(_BLOCKS, f"has blocks of {half} bytes, not {MXFP4_GROUP // 2}")
        blocks = own.take(_BLOCKS, (torch.uint8,))[int(number)]
        scales = own.take(_SCALES, (torch.uint8,), (experts, rows, groups))[int(number)]
        if bool((scales == NAN_EXPONENT).any()):
            raise own.wrong(_SCALES, "has values that aren't finite")
        powers = scales.view(torch.float8_e8m0fnu)
        return e2m1_matrix("mxfp4", blocks.view(rows, groups * half), powers, MXFP4_GROUP)
