"""Packs matrices of a checkpoint into linear layers, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol, cast

import torch
from torch import Tensor

from engine.quantization.online import code_format, round_to_codes
from kernels import LinearLayer
from kernels.interface import SLICE_ROWS, IntegerRows, KernelSet
from kernels.linear_factory import CodeFormat, CodeRows, FloatFormat, IntegerFormat

Rows = slice | Tensor
"""Rows: a slice, or their numbers int64 [n]."""


NativeFormat = IntegerFormat | CodeFormat
"""A format that only some kernel sets support: sorted inputs, bytes with zero points, codes."""


def keeps(ops: KernelSet, form: NativeFormat) -> bool:
    """Whether these kernels support weights of such a format."""
    if isinstance(form, CodeFormat):
        return ops.keeps_code_format(form)
    bytes_with_zeros = form.bits == 8 and form.with_zeros
    return (ops.supports_act_order or not form.order) and (
        ops.supports_int8_zero_points or not bytes_with_zeros
    )


class WeightSource(Protocol):
    """A weight [N, K] of a checkpoint.

    Attributes:
        shape: (N, K).
        row_bytes: memory per row while reading.
        source: name of the format, for the load report.
        bits: bits of a value in the checkpoint, without scales.
        quantized: whether it stays quantized, in 8 bits if no kernel supports its format.
        integers: the kernels' format that holds it exactly; None: no such format.
        native_format: a format that some kernels support, which they prefer to `integers`. None:
            no such format.
    """

    shape: tuple[int, int]
    row_bytes: int
    source: str
    bits: int
    quantized: bool
    integers: IntegerFormat | None
    native_format: NativeFormat | None

    def floats(self, rows: Rows) -> Tensor:
        """Return some rows, [n, K] in a float dtype; possibly backed by the mapped file."""

    def as_integers(self, rows: Rows) -> IntegerRows:
        """Return some rows in the format `integers`. Raises ValueError if that is None."""

    def as_native(self, rows: Rows) -> IntegerRows | CodeRows:
        """Return some rows in the format `native_format`. Raises ValueError if that is None."""


def stays_small(ops: KernelSet, matrix: WeightSource) -> bool:
    """Whether these kernels keep it quantized as it is, and multiply by x in its order."""
    native = (
        matrix.native_format
        if matrix.native_format is not None and keeps(ops, matrix.native_format)
        else None
    )
    kind = native or matrix.integers
    return kind is not None and not (isinstance(kind, IntegerFormat) and kind.order)


class DequantizedSource:
    """Base of a `WeightSource` that no kernel supports as it is."""

    integers: IntegerFormat | None = None
    native_format: NativeFormat | None = None

    def as_integers(self, rows: Rows) -> IntegerRows:
        """See `WeightSource`."""
        raise ValueError(f"{type(self).__name__} has no integers of the kernels")

    def as_native(self, rows: Rows) -> IntegerRows | CodeRows:
        """See `WeightSource`."""
        raise ValueError(f"{type(self).__name__} has no form of the kernels")


class DenseSource(DequantizedSource):
    """A tensor as a `WeightSource`."""

    quantized: bool = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.source = str(tensor.dtype).removeprefix("torch.")
        self.bits = 8 * tensor.element_size()
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.row_bytes = tensor.shape[1] * tensor.element_size()

    def floats(self, rows: Rows) -> Tensor:
        """See `WeightSource`."""
        return self.tensor[rows]


class RowSelection:
    """Some rows of a `WeightSource`, in a given order; only these are read."""

    def __init__(self, matrix: WeightSource, rows: Rows) -> None:
        """`rows`: a slice with both ends, or numbers."""
        self._matrix, self._rows = matrix, rows
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        self.shape = (count, matrix.shape[1])
        self.row_bytes, self.source, self.bits = matrix.row_bytes, matrix.source, matrix.bits
        self.quantized, self.integers = matrix.quantized, matrix.integers
        self.native_format = matrix.native_format

    def _numbers(self, rows: Rows) -> Rows:
        if not isinstance(self._rows, slice):
            return self._rows[rows]
        first = self._rows.start
        if isinstance(rows, slice):
            return slice(first + rows.start, first + rows.stop)
        return rows + first

    def floats(self, rows: Rows) -> Tensor:
        """See `WeightSource`."""
        return self._matrix.floats(self._numbers(rows))

    def as_integers(self, rows: Rows) -> IntegerRows:
        """See `WeightSource`."""
        return self._matrix.as_integers(self._numbers(rows))

    def as_native(self, rows: Rows) -> IntegerRows | CodeRows:
        """See `WeightSource`."""
        return self._matrix.as_native(self._numbers(rows))


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """How weights are stored (None: in the model's dtype) and multiplied.

    Attributes:
        layers: linear layers of attention, MLPs and experts.
        embeddings: the embedding and the output layer.
        bf16_inputs: whether bf16 weights may be multiplied by activations rounded to bf16.
    """

    layers: str | None = None
    embeddings: str | None = None
    bf16_inputs: bool = False


# With four bits the tables affect a model's perplexity more than all of its layers together, with
# eight hardly at all (docs/quantization.md). Routers of experts and norms stay unquantized.
_SCHEMES = {
    None: QuantScheme(),
    "int8": QuantScheme(layers="int8", embeddings="int8"),
    "int4": QuantScheme(layers="int4", embeddings="int8"),
    "fp8": QuantScheme(layers="fp8"),
    "nf4": QuantScheme(layers="nf4"),
}


def make_quant_scheme(quantization: str | None, round_inputs: bool = False) -> QuantScheme:
    """Return the scheme of `EngineConfig.quantization`."""
    return replace(_SCHEMES[quantization], bf16_inputs=round_inputs)


class LoadBuffer:
    """One buffer, reused for each chunk of each layer.

    Allocating some megabytes for every chunk would take them from the heap between small objects
    that stay, and leave unusable holes: a load of 32-bit weights took a quarter more memory.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def concatenate(self, slices: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
        """Return `slices` [n, K], concatenated; valid until the next call.

        In `dtype`, by default one that holds all of them, except 64 bits, which no kernel supports.

        A single slice that has that dtype, or isn't in the CPU's memory, isn't copied.
        """
        only = len(slices) == 1
        dtype = dtype or reduce(torch.promote_types, (row_slice.dtype for row_slice in slices))
        dtype = torch.float32 if dtype == torch.float64 else dtype
        if any(row_slice.device != self._bytes.device for row_slice in slices):
            return slices[0] if only else torch.cat(list(slices))
        if only and slices[0].dtype == dtype:
            return slices[0]
        rows = sum(len(row_slice) for row_slice in slices)
        joined = self._reserve((rows, slices[0].shape[1]), dtype)
        above = 0
        for row_slice in slices:
            joined[above : above + len(row_slice)].copy_(row_slice)
            above += len(row_slice)
        return joined

    def _reserve(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(shape)


#: Number of floats read at once: the memory that a load needs besides the packed weights.
_SLICE_BYTES = 4 << 20
#: Dtypes of 16 bits by their names in a checkpoint.
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: For matrices of several formats in one layer: 8 bits hold any format of fewer bits.
_MIXED_GROUP = 32


class LinearPacker:
    """Matrices with the same number of columns, concatenated to one linear layer's weight.

    Args:
        matrices: in order of their rows.
        order: int64 [N], numbers of the stack's rows in the order of the weight's; None:
            unchanged. Only for a single matrix.
        release: called after each packed chunk.
        scratch: buffer to join and convert chunks in; default: a new one.
    """

    def __init__(
        self,
        matrices: Sequence[WeightSource],
        order: Tensor | None = None,
        release: Callable[[], None] = lambda: None,
        scratch: LoadBuffer | None = None,
    ) -> None:
        self._matrices, self._order, self._release = list(matrices), order, release
        self._scratch = scratch or LoadBuffer()
        self.shape = (sum(m.shape[0] for m in matrices), matrices[0].shape[1])

    def pack(
        self,
        ops: KernelSet,
        bias: Tensor | None,
        dtype: torch.dtype,
        quantization: str | None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        """Return the layer.

        It is quantized if `quantization` ("int8", "int4", "fp8", "nf4") says so. Otherwise weights
        that are quantized in the checkpoint stay so, without further rounding if the kernels
        support their format; and floats are stored in `dtype`, or in 16 bits if a checkpoint has
        those and `dtype` is float32: the products are the same. `round_inputs`: see
        `KernelSet.PackedLinear`.
        """
        if quantization is not None and quantization not in ops.quantizations:
            codes = code_format(quantization, self.shape[1])
            if codes is not None:
                rounded = (round_to_codes(part, codes) for part in self._float_slices(None))
                return ops.make_linear(self.shape, rounded, codes, bias)
            quantization = "int8"  # rows with incomplete groups
        form = self._pack_native(ops, quantization) or self._integers(quantization)
        if isinstance(form, CodeFormat):
            return ops.make_linear(self.shape, self._code_slices(), form, bias)
        if form is not None:
            return ops.make_linear(self.shape, self._integer_slices(form), form, bias)
        stored = dtype if quantization else self._stored_dtype(ops, dtype)
        floats = FloatFormat(stored, quantization, round_inputs=round_inputs and stored == dtype)
        if quantization is None and any(matrix.quantized for matrix in self._matrices):
            floats = FloatFormat(dtype, "int8", _MIXED_GROUP)
        slices = self._float_slices(None if floats.quantization else stored)
        return ops.make_linear(self.shape, slices, floats, bias)

    def _pack_native(self, ops: KernelSet, quantization: str | None) -> NativeFormat | None:
        """The native format that all matrices have and these kernels support."""
        forms = {matrix.native_format for matrix in self._matrices}
        native = forms.pop() if quantization is None and len(forms) == 1 else None
        return native if native is not None and keeps(ops, native) else None

    def _integers(self, quantization: str | None) -> IntegerFormat | None:
        """The kernels' format that holds all matrices exactly; None: no such format."""
        formats = {matrix.integers for matrix in self._matrices}
        return formats.pop() if quantization is None and len(formats) == 1 else None

    def keeps_format(self, ops: KernelSet, dtype: torch.dtype, quantization: str | None) -> bool:
        """Whether the kernels multiply by the checkpoint's own values."""
        kind = self._pack_native(ops, quantization) or self._integers(quantization)
        if kind is not None:
            return all(matrix.bits == kind.bits for matrix in self._matrices)
        dtype_name = str(self._stored_dtype(ops, dtype)).removeprefix("torch.")
        return quantization is None and all(
            matrix.source == dtype_name for matrix in self._matrices
        )

    def _stored_dtype(self, ops: KernelSet, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a layer's weights in memory, where its model computes in `dtype`."""
        sources = {matrix.source for matrix in self._matrices}
        if dtype == torch.float32 and ops.widens_weights and len(sources) == 1:
            return _HALVES.get(sources.pop(), dtype)
        return dtype

    def _float_slices(self, dtype: torch.dtype | None) -> Iterator[Tensor]:
        """Yield the stack's rows, in `dtype` or unchanged; each chunk is valid until the next."""
        for parts in self._slices():
            slices = [matrix.floats(rows) for matrix, rows in parts]
            yield self._scratch.concatenate(slices, dtype)
            del slices
            self._release()

    def _code_slices(self) -> Iterator[CodeRows]:
        for parts in self._slices():
            slices = [cast(CodeRows, matrix.as_native(rows)) for matrix, rows in parts]
            codes, scales = zip(
                *((row_slice.codes, row_slice.scales) for row_slice in slices), strict=True
            )
            yield CodeRows(torch.cat(codes), torch.cat(scales)) if len(slices) > 1 else slices[0]
            del slices, codes, scales
            self._release()

    def _integer_slices(self, kind: IntegerFormat) -> Iterator[IntegerRows]:
        for parts in self._slices():
            slices = [
                cast(IntegerRows, matrix.as_native(rows))
                if kind == matrix.native_format
                else matrix.as_integers(rows)
                for matrix, rows in parts
            ]
            yield slices[0] if len(slices) == 1 else _joined(slices)
            del slices
            self._release()

    def _slices(self) -> Iterator[list[tuple[WeightSource, Rows]]]:
        """Yield the parts of each chunk: rows of one matrix, or of several where they meet."""
        total, widest = self.shape[0], max(matrix.row_bytes for matrix in self._matrices)
        step = max(1, _SLICE_BYTES // max(1, widest * SLICE_ROWS)) * SLICE_ROWS
        for start in range(0, total, step):
            stop = min(total, start + step)
            if self._order is not None:
                yield [(self._matrices[0], self._order[start:stop])]
            else:
                yield list(self._between(start, stop))

    def _between(self, start: int, stop: int) -> Iterator[tuple[WeightSource, Rows]]:
        above = 0
        for matrix in self._matrices:
            low, high = max(start, above), min(stop, above + matrix.shape[0])
            if low < high:
                yield matrix, slice(low - above, high - above)
            above += matrix.shape[0]


def _joined(slices: list[IntegerRows]) -> IntegerRows:
    minima = [row_slice.minima for row_slice in slices if row_slice.minima is not None]
    zeros = [row_slice.zeros for row_slice in slices if row_slice.zeros is not None]
    return IntegerRows(
        torch.cat([row_slice.values for row_slice in slices]),
        torch.cat([row_slice.scales for row_slice in slices]),
        torch.cat(minima) if minima else None,
        torch.cat(zeros) if zeros else None,
    )
