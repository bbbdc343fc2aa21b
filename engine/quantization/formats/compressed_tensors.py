"""compressed-tensors, as LLM Compressor writes it: each group of layers has a separate scheme.

- integers of up to 8 bits, packed (`weight_packed` int32, `weight_shape`) or not (`weight` int8),
  with `weight_scale` [N, groups], optional `weight_zero_point` (packed along N) and `weight_g_idx`;
- FP8 and MXFP8 (`weight`, `weight_scale`), NVFP4 and MXFP4 (`weight_packed` uint8);
- any `weight` as a bit mask and its nonzero values (`bitmask.py`), and Marlin's 2:4 sparse integers
  (`weight_packed`, `scale_packed`, `meta`; `marlin.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.contract.safe_pattern import SafePattern
from engine.quantization.formats.base import (
    FLOAT8,
    FLOATS,
    NAN_EXPONENT,
    POWERS,
    CheckpointFormat,
    ConfigFields,
    LayerTensors,
    TensorSource,
    modules_with,
    pattern,
)
from engine.quantization.formats.bitmask import SparseRows, SparseSource, stored_weight
from engine.quantization.formats.fp4 import MXFP4_GROUP, e2m1_matrix, nvfp4_matrix
from engine.quantization.formats.fp8 import EXPONENTS, float8_matrix
from engine.quantization.formats.gptq import group_order
from engine.quantization.formats.marlin import MarlinNames, marlin_matrix
from engine.quantization.formats.matrices import (
    WORD,
    GroupedMatrix,
    pack_factor,
    pick,
    pick_stream,
    unpack_columns,
    unpack_stream,
)
from engine.quantization.packing import Rows, WeightSource

_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
#: Class names that stand for all linear layers.
_CLASSES = ("Linear", "Embedding", "ParallelLMHead", "FusedMoE")

#: Maximum numbers of `config_groups`, and of patterns: each layer is matched with each pattern.
_MAX_GROUPS, _MAX_PATTERNS = 1024, 64
#: Maximum length of a target in a message.
_MAX_MESSAGE_CHARS = 64


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of some layers are stored.

    Attributes:
        bits: bits per value. floats: whether values are floats.
        group: neighbors in a row that share a scale; 0: the complete row, or weight.
        block: rows and columns that share a scale; None: no blocks.
        symmetric: whether there are no zero points.
        of_class: whether targets are classes of layers instead of layers.
        fields: the config that it was read from.
    """

    bits: int
    floats: bool
    group: int
    block: tuple[int, int] | None
    symmetric: bool
    of_class: bool
    fields: ConfigFields
    _exact: frozenset[str]
    _patterns: tuple[SafePattern, ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what schemes with the same meaning have in common."""
        return self.bits, self.floats, self.group, self.block, self.symmetric

    def names(self, module: str) -> bool:
        """Whether a layer is named as a target."""
        return module in self._exact

    def matches(self, module: str) -> bool:
        """Whether a layer matches a pattern.

        Raises `ModelLoadError` for a pattern that takes too long.
        """
        try:
            return any(one.matches(module) for one in self._patterns)
        except ValueError as error:
            raise self.fields.error("targets", f"has a pattern that {error}") from error


def weight_schemes(fields: ConfigFields) -> list[WeightScheme]:
    """Return all schemes.

    Raises `ModelLoadError` for unsupported schemes, and for layers that two schemes name.
    """
    groups = fields.object("config_groups")
    if groups is None:
        raise fields.error("config_groups", "isn't there")
    names = list(groups.names())
    if len(names) > _MAX_GROUPS:
        raise fields.error("config_groups", f"has {len(names)} entries, more than {_MAX_GROUPS}")
    schemes = []
    for name in names:
        entry = groups.object(name)
        weights = entry.object("weights") if entry is not None else None
        if entry is not None and weights is not None:
            schemes.append(_scheme(entry, weights))
    _check_targets(fields, schemes)
    return schemes


def _check_targets(fields: ConfigFields, schemes: Iterable[WeightScheme]) -> None:
    owners: dict[str, WeightScheme] = {}
    patterns = 0
    for scheme in schemes:
        for target in scheme.fields.words("targets"):
            patterns += target.startswith("re:")
            other = owners.setdefault(target, scheme)
            if other.kind != scheme.kind:
                why = f"has {target[:_MAX_MESSAGE_CHARS]!r}, as {other.fields.path} has"
                raise scheme.fields.error("targets", why)
    if patterns > _MAX_PATTERNS:
        raise fields.error("config_groups", f"has {patterns} patterns, more than {_MAX_PATTERNS}")


def scheme_for(module: str, schemes: Sequence[WeightScheme]) -> WeightScheme | None:
    """Return the scheme that names a layer, else the one that matches it, else that of its class.

    Raises `ModelLoadError` if patterns of several schemes match it.
    """
    for scheme in schemes:
        if scheme.names(module):
            return scheme
    matching = [scheme for scheme in schemes if scheme.matches(module)]
    if len({scheme.kind for scheme in matching}) > 1:
        first, second, *_ = matching
        raise second.fields.error("targets", f"matches {module!r}, as {first.fields.path} does")
    candidates = matching or [scheme for scheme in schemes if scheme.of_class]
    return candidates[0] if candidates else None


def _scheme(entry: ConfigFields, weights: ConfigFields) -> WeightScheme:
    kind = weights.string("type", "int")
    if kind not in ("int", "float"):
        raise weights.error("type", f"must be int or float, not {kind!r}")
    strategy = weights.string("strategy", "tensor")
    if strategy not in _STRATEGIES:
        raise weights.error("strategy", f"is {strategy!r}; known are {', '.join(_STRATEGIES)}")
    grouped = strategy in ("group", "tensor_group")
    size = weights.integer("group_size", None) if grouped else 0
    if grouped and size < 1:
        raise weights.error("group_size", f"is {size}, not a positive number")
    targets = entry.words("targets")
    patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
    return WeightScheme(
        bits=weights.integer("num_bits", 8, range(1, 9)),
        floats=kind == "float",
        group=size,
        block=weights.pair("block_structure"),
        symmetric=weights.boolean("symmetric", True),
        of_class=not targets or any(target in _CLASSES for target in targets),
        fields=entry,
        _exact=frozenset(targets),
        _patterns=tuple(pattern(entry, "targets", text) for text in patterns),
    )


def has_weights(values: object) -> bool:
    """Whether a `quantization_config` covers more than the KV cache."""
    groups = values.get("config_groups") if isinstance(values, dict) else None
    if groups is not None and not isinstance(groups, dict):
        path = "quantization_config.config_groups"
        raise ModelLoadError(f"config.json: {path} must be an object.", param=path)
    return bool(groups)


def packed_matrix(parts: LayerTensors, scheme: WeightScheme) -> WeightSource:
    """Read `weight_packed`, unsigned integers in which 2^(bits - 1) stands for 0."""
    bits = scheme.bits
    rows, columns = _packed_shape(parts, bits)
    words = parts.read("weight_packed", (torch.int32,))

    def values(selected: Rows) -> Tensor:
        picked = words[selected]
        if picked.shape[1] == -(-columns * bits // WORD) and WORD % bits:
            return unpack_stream(_padded(picked, bits), bits)[:, :columns]
        return unpack_columns(picked, bits, columns)

    group, groups, scales = _scales(parts, scheme, rows, columns)
    zeros: Callable[[Rows], Tensor] | int = 1 << (bits - 1)
    if not scheme.symmetric:
        zeros = _packed_zeros(parts, bits, rows, groups)
    elif "weight_zero_point" in parts:
        _refuse_zero_points(parts, _packed_zeros(parts, bits, rows, groups), 1 << (bits - 1))
    return GroupedMatrix(
        f"compressed-tensors int{bits} g{group}",
        (rows, columns),
        group,
        bits,
        values,
        scales,
        zeros,
        _order(parts, columns, groups, group),
    )


def unpacked_matrix(parts: LayerTensors, scheme: WeightScheme) -> WeightSource:
    """Read `weight` int8."""
    stored = stored_weight(parts, (torch.int8,))
    rows, columns = stored.shape
    group, groups, scales = _scales(parts, scheme, rows, columns)
    name = f"compressed-tensors int8 g{group}"
    if scheme.symmetric:
        if "weight_zero_point" in parts:
            points = parts.read("weight_zero_point", (torch.int8,))
            _refuse_zero_points(parts, _unpacked_zeros(parts, rows, groups, points, 0), 0)
        return GroupedMatrix(
            name, (rows, columns), group, 8, lambda selected: stored[selected], scales,
            group_of=_order(parts, columns, groups, group),
        )  # fmt: skip
    points = parts.read("weight_zero_point", (torch.int8,))
    return GroupedMatrix(
        name, (rows, columns), group, 8,
        lambda selected: stored[selected].to(torch.int32) + 128,
        scales,
        _unpacked_zeros(parts, rows, groups, points, 128),
        _order(parts, columns, groups, group),
    )  # fmt: skip


def _unpacked_zeros(
    parts: LayerTensors, rows: int, groups: int, points: Tensor, middle: int
) -> Callable[[Rows], Tensor]:
    """Read int8 zero points, one per byte, with an offset of -`middle`."""
    if points.numel() not in (1, rows * groups):
        raise parts.error("weight_zero_point", f"has shape {tuple(points.shape)}")
    shaped = points.reshape(-1, 1 if points.numel() == 1 else groups).expand(rows, groups)
    return lambda selected: shaped[selected].to(torch.int32) + middle


def _refuse_zero_points(parts: LayerTensors, zeros: Callable[[Rows], Tensor], middle: int) -> None:
    """Check a weight without zero points by config.json: those present must be neutral."""
    if bool((zeros(slice(None)) != middle).any()):
        raise parts.error("weight_zero_point", "is there, but config.json says symmetric")


def _padded(words: Tensor, bits: int) -> Tensor:
    """Round up to complete groups of `bits` words."""
    return torch.nn.functional.pad(words, (0, -words.shape[1] % bits))


def _packed_shape(parts: LayerTensors, bits: int) -> tuple[int, int]:
    """Return the shape in `weight_shape`, checked against the size of the words."""
    stored_shape = parts.read("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    rows, words = parts.shape("weight_packed", 2)
    columns = stored_shape[1]
    fitting = -(-columns * bits // WORD), -(-columns // pack_factor(bits))
    if stored_shape[0] != rows or columns < 1 or words not in fitting:
        raise parts.error(
            "weight_shape",
            f"says {tuple(stored_shape)}, but weight_packed is {(rows, words)} words",
        )
    return rows, columns


def _scales(
    parts: LayerTensors, scheme: WeightScheme, rows: int, columns: int
) -> tuple[int, int, Tensor]:
    """Return group size, number of groups and scales [N, groups]."""
    group = min(scheme.group or columns, columns)
    groups = -(-columns // group)
    if scheme.block is not None:
        high, wide = scheme.block
        scales = parts.scales("weight_scale", (-(-rows // high), -(-columns // wide)))
        return wide, scales.shape[1], scales.repeat_interleave(high, 0)[:rows]
    if scheme.group:
        return group, groups, parts.scales("weight_scale", (rows, groups))
    scales = parts.scales("weight_scale", (rows, 1), (rows,), (1,), (1, 1), ())
    return group, 1, scales.reshape(-1, 1).expand(rows, 1)


def _packed_zeros(
    parts: LayerTensors, bits: int, rows: int, groups: int
) -> Callable[[Rows], Tensor]:
    words = parts.read("weight_zero_point", (torch.int32, torch.int8))
    if words.dtype == torch.int8:  # a single one for the weight isn't packed
        return _unpacked_zeros(parts, rows, groups, words, 1 << (bits - 1))
    dense, loose = -(-rows * bits // WORD), -(-rows // pack_factor(bits))
    if words.dim() != 2 or words.shape[1] != groups or words.shape[0] not in (dense, loose):
        raise parts.error(
            "weight_zero_point",
            f"has shape {tuple(words.shape)}, not {(dense, groups)}",
        )
    if words.shape[0] == loose:
        return lambda selected: pick(words.T, selected, bits, rows).T
    stream = _padded(words.T, bits)
    return lambda selected: pick_stream(stream, selected, bits, rows).T


def _order(parts: LayerTensors, columns: int, groups: int, group: int) -> Tensor | None:
    if "weight_g_idx" not in parts:
        return None
    group_ids = parts.read("weight_g_idx", (torch.int32, torch.int64), (columns,))
    if bool((group_ids == -1).all()):  # initial value of unsorted weights
        return None
    return group_order(parts, "weight_g_idx", columns, groups, group)


_REFUSED = {"mxfp6-pack-quantized": "take the FP8 or the MXFP4 checkpoint instead"}
_SPARSE_LAYOUTS = ("dense", "sparse-bitmask", "sparse-24-bitmask")
_MARLIN = MarlinNames("weight_packed", "scale_packed", "meta")


class CompressedTensors(CheckpointFormat):
    """See `CheckpointFormat`."""

    name = "compressed-tensors"

    def __init__(self, fields: ConfigFields) -> None:
        _refuse_format(fields)
        fields.words("ignore")
        sparse = fields.object("sparsity_config")
        layout = "dense" if sparse is None else sparse.string("format", "dense")
        if sparse is not None and layout not in _SPARSE_LAYOUTS:
            supported = ", ".join(_SPARSE_LAYOUTS)
            raise sparse.error("format", f"is {sparse.get('format')!r}; known are {supported}")
        if fields.get("transform_config"):
            raise fields.error("transform_config", "rotates activations, which isn't done here")
        self._format = fields.string("format")
        only_sparse = layout != "dense" and not fields.get("config_groups")
        self._schemes = [] if only_sparse else weight_schemes(fields)
        for scheme in self._schemes:
            _refuse_format(scheme.fields)

    def modules(self, tensors: TensorSource) -> Iterator[str]:
        """See `CheckpointFormat`: layers with packed tensors, regardless of the ignore list."""
        yield from modules_with(tensors, "weight_packed")
        yield from modules_with(tensors, "compressed")
        for name in modules_with(tensors, "weight"):
            if tensors.stored_dtype(f"{name}.weight") in (torch.int8, *FLOAT8):
                yield name

    def suffixes(self) -> Iterable[str]:
        weight = (f"weight_{part}" for part in _PARTS)
        inputs = ("input_scale", "input_zero_point", "input_global_scale")
        return ("weight", *weight, *_SPARSE_PARTS, *inputs)

    def matrix(self, parts: LayerTensors) -> WeightSource:
        suffix = "compressed" if "compressed" in parts else "weight"
        kind = parts.tensors.stored_dtype(parts.name(suffix)) if suffix in parts else None
        if suffix == "compressed" and kind in FLOATS:
            return SparseSource(SparseRows(parts, FLOATS))
        scheme = self._scheme_of(parts)
        if "meta" in parts:
            return marlin_matrix(parts, _MARLIN, scheme.bits, scheme.group or None)
        if "weight_packed" not in parts:
            if kind in FLOAT8:
                return self._float8(parts, scheme)
            return unpacked_matrix(parts, scheme)
        if "weight" in parts:
            raise parts.error("weight", "is there beside weight_packed")
        if scheme.floats:
            return _float4(parts, scheme)
        return packed_matrix(parts, scheme)

    def _float8(self, parts: LayerTensors, scheme: WeightScheme) -> WeightSource:
        block = scheme.block or ((1, scheme.group) if scheme.group else None)
        kind = scheme.fields.string("format") or self._format
        dtypes = EXPONENTS if kind == "mxfp8-quantized" else (*FLOATS, *POWERS)
        return float8_matrix(parts, "weight_scale", block, "compressed-tensors", dtypes)

    def _scheme_of(self, parts: LayerTensors) -> WeightScheme:
        scheme = scheme_for(parts.module, self._schemes)
        if scheme is None:
            suffixes = ("weight_packed", "compressed", "weight")
            suffix = next(suffix for suffix in suffixes if suffix in parts)
            raise parts.error(suffix, "is quantized, but no config_groups entry is for its layer")
        return scheme


_SPARSE_PARTS = ("compressed", "bitmask", "shape", "row_offsets", "scale_packed", "meta")
_PARTS = ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")


def _refuse_format(fields: ConfigFields) -> None:
    kind = fields.string("format")
    if kind in _REFUSED:
        raise fields.error("format", f"is {kind!r}: {_REFUSED[kind]}")


def _float4(parts: LayerTensors, scheme: WeightScheme) -> WeightSource:
    if scheme.group != MXFP4_GROUP:
        factor = 1.0 / parts.scalar("weight_global_scale")
        if abs(factor) > torch.finfo(torch.float32).max:
            raise parts.error("weight_global_scale", "is too small: what it divides isn't finite")
        return nvfp4_matrix(parts, "weight_packed", factor, "compressed-tensors nvfp4")
    rows, half = parts.shape("weight_packed", 2)
    packed = parts.read("weight_packed", (torch.uint8,))
    shape = (rows, 2 * half // MXFP4_GROUP)
    stored = parts.read("weight_scale", (torch.uint8,), shape)
    if bool((stored == NAN_EXPONENT).any()):
        raise parts.error("weight_scale", "has values that aren't finite")
    powers = stored.view(torch.float8_e8m0fnu)
    return e2m1_matrix("compressed-tensors mxfp4", packed, powers, MXFP4_GROUP)
