"""`LayerDeltaBuilder`: an adapter's change of one linear layer, from the modules fused in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.lora.adapter import LoRALayer
from engine.models.decoder import NativeDecoder
from engine.models.encoders.encoder import NativeEncoder
from engine.models.supports_lora import AdaptableLinear, LinearSizes
from kernels import LinearLayer
from kernels.lora import LoraSlice, LoraWeights

if TYPE_CHECKING:  # imports `transformers`, which takes seconds
    from engine.transformers_backend.model import TransformersModel

#: Number of rows of a weight processed at a time.
_ROWS = 1024

#: Models whose layers can have adapters.
AdaptableModel: TypeAlias = "NativeDecoder | NativeEncoder | TransformersModel"


class LayerDeltaBuilder:
    """Builds `LoraWeights` of one linear layer.

    Attributes:
        a: matrices [rank, K], to be concatenated by rows.
        parts: first column in the layer's output, b, first row of its a in the concatenated one,
            and scale.
    """

    def __init__(self, model: AdaptableModel, layer: AdaptableLinear, has_bias: bool) -> None:
        self._model, self._layer, self._has_bias = model, layer, has_bias
        self.a: list[Tensor] = []
        self.parts: list[tuple[int, Tensor, int, float]] = []
        #: Created only if a part needs them: most adapters have only matrices.
        self._gain: Tensor | None = None
        self._shift: Tensor | None = None
        self._rank = 0
        self._base_bias: Tensor | None = None
        self._starts: dict[int, int] = {}

    @property
    def has_only_matrices(self) -> bool:
        """Whether the change consists only of matrices."""
        return self._gain is None and bool(self.a)

    @property
    def sizes(self) -> tuple[int, int]:
        """Input and output size of the layer."""
        return self._layer.row_size, self._layer.out_features

    @property
    def round_inputs(self) -> bool:
        """Whether the layer's weights may be multiplied with activations rounded to bf16."""
        return isinstance(self._model, NativeDecoder) and self._model.round_inputs

    def add(self, first: int, rows: int, delta: LoRALayer, order: Tensor | None) -> None:
        """Add a part's change, for the layer's rows [first, first + rows)."""
        chosen = slice(None) if order is None else order
        a, b = delta.a, delta.b
        if a is None or b is None:
            a, b = torch.zeros(0, self._layer.row_size), torch.zeros(rows, 0)
        else:
            b = b[chosen]
        if not (delta.b_bias is None and delta.magnitude is None and delta.bias is None):
            self._change(slice(first, first + rows), delta, a, b, chosen)
        start = self._starts.get(id(a))
        if start is None:  # gate and up of an expert share one
            start = self._starts[id(a)] = self._rank
            self.a.append(a)
            self._rank += len(a)
        self.parts.append((first, b, start, delta.scale))

    def select_rows(self, rows: Sequence[range]) -> None:
        """Keep only these rows of the layer, concatenated.

        Only for changes that consist of matrices.
        """
        parts, self.parts, offset = self.parts, [], 0
        for local in rows:
            for first, b, start, scale in parts:
                low, high = max(local.start, first), min(local.stop, first + len(b))
                if low < high:
                    position = offset + low - local.start
                    self.parts.append((position, b[low - first : high - first], start, scale))
            offset += len(local)

    def _change(
        self, rows: slice, delta: LoRALayer, a: Tensor, b: Tensor, chosen: Tensor | slice
    ) -> None:
        """Add a part's bias and magnitude for these rows of the layer."""
        if self._gain is None or self._shift is None:
            self._gain = torch.ones(self._layer.out_features)
            self._shift = torch.zeros(self._layer.out_features)
        if delta.b_bias is not None:
            self._shift[rows] += delta.scale * delta.b_bias.float()[chosen]
        if delta.magnitude is not None:
            self._gain[rows] = delta.magnitude.float()[chosen] / self._lengths(
                rows.start, a, b, delta
            )
            bias = self._bias()[rows]
            self._shift[rows] = self._gain[rows] * (self._shift[rows] - bias) + bias
        if delta.bias is not None:
            self._shift[rows] += delta.bias.float()[chosen] - self._bias()[rows]

    @property
    def _base_layer(self) -> LinearLayer:
        """The layer, for changes that depend on its weights."""
        if isinstance(self._layer, LinearSizes):
            raise InvalidRequest(
                "DoRA and biases of experts and kv_b_proj aren't supported on this device.",
                param="use_dora",
            )
        return self._layer

    def _bias(self) -> Tensor:
        """Return the layer's bias: its output for a zero input, which needs no access to it."""
        if self._base_bias is None:
            self._base_bias = (
                self._base_layer(zero_input(self._model, self._layer))[0].float().cpu()
                if self._has_bias
                else torch.zeros(self._layer.out_features)
            )
        return self._base_bias

    def _lengths(self, first: int, a: Tensor, b: Tensor, delta: LoRALayer) -> Tensor:
        """Return the norms of the rows of W + scale * B A."""
        lengths = []
        for start in range(0, len(b), _ROWS):
            some = b[start : start + _ROWS].float()
            ids = torch.arange(first + start, first + start + len(some))
            ids = ids.to(self._model.ops.device)
            rows = self._base_layer.rows(ids).float().cpu() + delta.scale * (some @ a.float())
            lengths.append(rows.norm(dim=1))
        return torch.cat(lengths)

    def weights(self, dtype: torch.dtype | None) -> LoraWeights:
        """Return the complete change in `dtype`, or in the common dtype of its matrices."""
        kinds = {tensor.dtype for tensor in (*self.a, *(part[1] for part in self.parts))
                 if tensor.numel()}  # fmt: skip
        weights_dtype = dtype or (kinds.pop() if len(kinds) == 1 else torch.float32)
        gain, shift = self._gain, self._shift
        changes = gain is not None and bool((gain != 1).any())
        shifts = shift is not None and bool((shift != 0).any())
        return LoraWeights(
            a=torch.cat([a.to(weights_dtype) for a in self.a]),
            parts=[
                LoraSlice(first, b.to(weights_dtype), start, scale)
                for first, b, start, scale in self.parts
            ],
            out_features=self._layer.out_features,
            gain=gain if changes else None,
            shift=shift if shifts else None,
            round_inputs=self.round_inputs,
        )


def dora_column_scale(
    model: AdaptableModel, delta: LoRALayer, table: Tensor | None
) -> Tensor | None:
    """Return [hidden]: DoRA's factor for each column of a changed embedding; None without DoRA.

    `table`: the adapter's table, if it replaces the model's.
    """
    if delta.magnitude is None or delta.a is None or delta.b is None:
        return None
    squares = torch.zeros(len(delta.b), dtype=torch.float64)
    for ids in torch.arange(delta.a.shape[1]).split(_ROWS):
        rows = _embedded(model, ids) if table is None else table[ids]
        changed = rows.float().cpu() + delta.scale * (delta.b.float() @ delta.a[:, ids].float()).T
        squares += changed.square().sum(dim=0)
    return delta.magnitude.float() / squares.sqrt().float()


def _embedded(model: AdaptableModel, ids: Tensor) -> Tensor:
    """Return rows of the model's embedding."""
    ids = ids.to(model.ops.device)
    table = model.embedding
    return table[ids] if isinstance(table, Tensor) else table.rows(ids)


def zero_input(model: AdaptableModel, layer: AdaptableLinear) -> Tensor:
    """Return one row of zeros as input for a layer of the model."""
    ops = model.ops
    dtype = ops.activation_dtype(model.weight_dtype)
    return torch.zeros(1, layer.in_features, dtype=dtype, device=ops.device)
