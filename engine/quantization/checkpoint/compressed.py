"""compressed-tensors, as LLM Compressor writes it: each group of layers has a scheme of its own.

- integers of up to 8 bits, packed (`weight_packed` int32, `weight_shape`) or not (`weight` int8),
  with `weight_scale` [N, groups], maybe `weight_zero_point` (packed along N) and `weight_g_idx`;
- FP8 and MXFP8 (`weight`, `weight_scale`), NVFP4 and MXFP4 (`weight_packed` uint8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from engine.quantization.checkpoint.fields import Fields
from engine.quantization.checkpoint.format import CheckpointFormat
from engine.quantization.checkpoint.fp4 import e2m1_matrix
from engine.quantization.checkpoint.fp8 import EXPONENTS, float8_matrix
from engine.quantization.checkpoint.integers import packed_matrix, plain_matrix
from engine.quantization.checkpoint.modelopt import nvfp4_matrix
from engine.quantization.checkpoint.mxfp4 import MXFP4_GROUP
from engine.quantization.checkpoint.schemes import WeightScheme, scheme_for, weight_schemes
from engine.quantization.checkpoint.tensors import (
    FLOAT8,
    FLOATS,
    NAN_EXPONENT,
    POWERS,
    Parts,
    Tensors,
    modules_with,
)
from engine.quantization.matrix import Matrix

_SPARSE = "sparse layouts aren't read: take the dense checkpoint, or llm-compressor's W4A16 of it"
_REFUSED = {
    "sparse-bitmask": _SPARSE,
    "sparse-24-bitmask": _SPARSE,
    "marlin-24": _SPARSE,
    "mxfp6-pack-quantized": "take the FP8 or the MXFP4 checkpoint instead",
}


class CompressedTensors(CheckpointFormat):
    """See `CheckpointFormat`."""

    name = "compressed-tensors"

    def __init__(self, fields: Fields) -> None:
        _refuse_format(fields)
        fields.words("ignore")
        sparse = fields.object("sparsity_config")
        if sparse is not None and sparse.word("format", "dense") != "dense":
            raise sparse.wrong("format", f"is {sparse.get('format')!r}: {_SPARSE}")
        if fields.get("transform_config"):
            raise fields.wrong("transform_config", "rotates activations, which isn't done here")
        self._format = fields.word("format")
        self._schemes = weight_schemes(fields)
        for scheme in self._schemes:
            _refuse_format(scheme.fields)

    def modules(self, tensors: Tensors) -> Iterator[str]:
        """See `CheckpointFormat`: what is packed, whatever the ignore list says."""
        yield from modules_with(tensors, "weight_packed")
        for name in modules_with(tensors, "weight"):
            if tensors.stored_dtype(f"{name}.weight") in (torch.int8, *FLOAT8):
                yield name

    def suffixes(self) -> Iterable[str]:
        """See `CheckpointFormat`."""
        weight = (f"weight_{part}" for part in _PARTS)
        inputs = ("input_scale", "input_zero_point", "input_global_scale")
        return ("weight", *weight, *inputs)

    def matrix(self, parts: Parts) -> Matrix:
        """See `CheckpointFormat`."""
        scheme = self._scheme_of(parts)
        if "weight_packed" not in parts:
            kind = parts.tensors.stored_dtype(parts.name("weight"))
            if kind in FLOAT8:
                return self._float8(parts, scheme)
            return plain_matrix(parts, scheme)
        if "weight" in parts:
            raise parts.wrong("weight", "is there beside weight_packed")
        if scheme.floats:
            return _float4(parts, scheme)
        return packed_matrix(parts, scheme)

    def _float8(self, parts: Parts, scheme: WeightScheme) -> Matrix:
        block = scheme.block or ((1, scheme.group) if scheme.group else None)
        kind = scheme.fields.word("format") or self._format
        dtypes = EXPONENTS if kind == "mxfp8-quantized" else (*FLOATS, *POWERS)
        return float8_matrix(parts, "weight_scale", block, "compressed-tensors", dtypes)

    def _scheme_of(self, parts: Parts) -> WeightScheme:
        found = scheme_for(parts.module, self._schemes)
        if found is None:
            suffix = "weight_packed" if "weight_packed" in parts else "weight"
            raise parts.wrong(suffix, "is quantised, but no config_groups entry is for its layer")
        return found


_PARTS = ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")


def _refuse_format(fields: Fields) -> None:
    kind = fields.word("format")
    if kind in _REFUSED:
        raise fields.wrong("format", f"is {kind!r}: {_REFUSED[kind]}")


def _float4(parts: Parts, scheme: WeightScheme) -> Matrix:
    if scheme.group != MXFP4_GROUP:
        factor = 1.0 / parts.scalar("weight_global_scale")
        if abs(factor) > torch.finfo(torch.float32).max:
            raise parts.wrong("weight_global_scale", "is too small: what it divides isn't finite")
        return nvfp4_matrix(parts, "weight_packed", factor, "compressed-tensors nvfp4")
    rows, half = parts.shape("weight_packed", 2)
    packed = parts.take("weight_packed", (torch.uint8,))
    shape = (rows, 2 * half // MXFP4_GROUP)
    stored = parts.take("weight_scale", (torch.uint8,), shape)
    if bool((stored == NAN_EXPONENT).any()):
        raise parts.wrong("weight_scale", "has values that aren't finite")
    powers = stored.view(torch.float8_e8m0fnu)
    return e2m1_matrix("compressed-tensors mxfp4", packed, powers, MXFP4_GROUP)
