"""Merges an adapter into a checkpoint's weights: the reference for serving it unmerged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.lora.adapter import LoRAAdapter, LoRALayer
from engine.lora.target_modules import ExpertStack, TargetModules
from engine.models.decoder_spec import DecoderSpec
from engine.models.encoders.encoder_spec import EncoderSpec
from engine.models.layers.moe import Weights
from engine.quantization.packing import DenseSource, WeightSource

_BOTH = "An adapter with both lora_bias and DoRA can't be merged."
#: Last components of the names of tensors that contain all experts of a layer.
_PROJECTIONS = {
    "gate_up_proj": "up", "input_linear": "up", "down_proj": "down", "output_linear": "down",
}  # fmt: skip


def merged_spec(spec: DecoderSpec, adapter: LoRAAdapter) -> DecoderSpec:
    """Return a merged model's spec: its tables may differ, and linear layers may have biases."""
    return replace(
        spec,
        vocab_size=adapter.vocab_size or spec.vocab_size,
        tie_embeddings=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        cross=None if spec.cross is None else replace(spec.cross, bias=True, key_bias=True),
    )


class FloatWeights:
    """A checkpoint in float32, quantized or not, with an adapter merged into it."""

    def __init__(
        self, inner: Weights, spec: DecoderSpec, adapter: LoRAAdapter | None = None
    ) -> None:
        self._inner, self._spec, self._modules = inner, spec, TargetModules(spec)
        self._adapter = adapter or LoRAAdapter(digest="")
        names = spec.names
        self._tables = {f"{names.embedding}.weight": "embedding", f"{names.lm_head}.weight": "head"}

    def __contains__(self, name: str) -> bool:
        # After merging, an output layer that was tied to the embedding may differ from it.
        return name in self._inner or bool(self._adapter.digest and self._table(name))

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `Weights.get`. Raises `InvalidRequest` for changes that can't be merged."""
        delta = self._delta(name.rpartition(".")[0])
        if name.endswith(".bias"):
            return self._bias(name, shape, delta)
        weight = self._inner.get(name, shape)
        if (stack := self._stack(name)) is not None:
            return self._merged_stack(weight, *stack)
        if delta is None:
            return weight
        flipped = self._spec.transposed
        merged = merged_weight((weight.T if flipped else weight).float(), delta)
        return merged.T.contiguous() if flipped else merged

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        """See `Weights.matrix`."""
        if which := self._table(name):
            return DenseSource(self._merged_table(which, shape))
        weight = self._inner.matrix(name, shape).floats(slice(None)).float()
        delta = self._delta(name.removesuffix(".weight"))
        return DenseSource(weight if delta is None else merged_weight(weight, delta))

    def release(self) -> None:
        """See `Weights.release`."""
        self._inner.release()

    def _delta(self, module: str) -> LoRALayer | None:
        target = self._modules.resolve(module)
        return None if target is None else self._adapter.modules.get(target)

    def _stack(self, name: str) -> tuple[ExpertStack, str] | None:
        """Return the experts that this tensor contains, and their projection."""
        module, _, last = name.removesuffix(".weight").rpartition(".")
        projection = _PROJECTIONS.get(last)
        target = self._modules.resolve(f"{module}.{last}") or self._modules.resolve(module)
        stack = None if target is None else self._modules.stack(target)
        return None if stack is None or projection is None else (stack, projection)

    def _merged_stack(self, weight: Tensor, stack: ExpertStack, projection: str) -> Tensor:
        """Return [experts, outputs, inputs], with the last two swapped in an interleaved stack."""
        flipped = stack.moe.layout == "interleaved"
        merged = (weight.mT if flipped else weight).float().clone()
        for expert in range(stack.moe.num_experts):
            for word, rows in stack.rows(projection):
                delta = self._adapter.modules.get(f"{stack.prefix}{expert}.{word}")
                if delta is not None:
                    merged[expert, rows] = merged_weight(merged[expert, rows], delta)
        return merged.mT.contiguous() if flipped else merged

    def _table(self, name: str) -> str:
        """Return which table this is, "" for another tensor; names may lack a prefix."""
        prefix = self._spec.names.optional_prefix
        return self._tables.get(name) or self._tables.get(prefix + name, "")

    def _merged_table(self, which: str, shape: tuple[int, int]) -> Tensor:
        names, prefix = self._spec.names, self._spec.names.optional_prefix
        tied = which == "embedding" or self._spec.tie_embeddings
        name = f"{names.embedding if tied else names.lm_head}.weight"
        name = name if name in self._inner else name.removeprefix(prefix)
        stored_shape = self._spec.vocab_size, shape[1]
        table = self._inner.matrix(name, stored_shape).floats(slice(None)).float()
        if which == "embedding":
            return merged_embedding(table, self._adapter)
        merged = merged_head(table, self._adapter)
        return torch.nn.functional.pad(merged, (0, 0, 0, shape[0] - len(merged)))

    def _bias(self, name: str, shape: tuple[int, ...], delta: LoRALayer | None) -> Tensor:
        bias = self._inner.get(name, shape).float() if name in self._inner else torch.zeros(shape)
        if delta is None:
            return bias
        return added_bias(bias, delta)


def merged_weight(weight: Tensor, delta: LoRALayer) -> Tensor:
    """Return W + scale * B A; with DoRA its rows have the adapter's norms."""
    if delta.a is None or delta.b is None:
        return weight
    merged = weight + delta.scale * (delta.b.float() @ delta.a.float())
    if delta.magnitude is None:
        return merged
    return merged * (delta.magnitude.float() / merged.norm(dim=1)).unsqueeze(1)


def _adapter_table(table: Tensor, adapter: LoRAAdapter, which: str) -> Tensor:
    """Return the merged table: the model's or the adapter's, with replaced rows."""
    table = adapter.tables.get(which, table).float()
    if which not in adapter.tokens:
        return table
    ids, rows = adapter.tokens[which]
    missing = max(0, int(ids.max()) + 1 - len(table))
    return torch.nn.functional.pad(table, (0, 0, 0, missing)).index_copy(0, ids, rows.float())


def merged_head(table: Tensor, adapter: LoRAAdapter) -> Tensor:
    """Return an output layer's weight, float32 [tokens, hidden], with an adapter merged into it."""
    table, delta = _adapter_table(table, adapter, "head"), adapter.head
    return table if delta is None else merged_weight(table, delta)


def merged_embedding(table: Tensor, adapter: LoRAAdapter) -> Tensor:
    """Return an embedding's weight, float32 [tokens, hidden], with an adapter merged into it."""
    table, delta = _adapter_table(table, adapter, "embedding"), adapter.embedding
    if delta is None or delta.a is None or delta.b is None:
        return table
    merged = table + delta.scale * (delta.b.float() @ delta.a.float()).T
    if delta.magnitude is None:
        return merged
    return merged * (delta.magnitude.float() / merged.norm(dim=0))


def merged_dense(
    tensors: Mapping[str, Tensor], changes: Mapping[str, LoRALayer]
) -> dict[str, Tensor]:
    """Return the tensors of a classifier's linear layers with an adapter merged into them.

    Raises `InvalidRequest` for changes that can't be merged.
    """
    merged = {}
    for name, delta in changes.items():
        weight = tensors[f"{name}.weight"].float()
        merged[f"{name}.weight"] = merged_weight(weight, delta)
        bias = tensors.get(f"{name}.bias")
        if bias is not None or delta.bias is not None or delta.b_bias is not None:
            merged[f"{name}.bias"] = added_bias(
                bias if bias is not None else weight[:, 0] * 0, delta
            )
    return merged


def added_bias(base_bias: Tensor, delta: LoRALayer) -> Tensor:
    """Return the merged bias: the model's or the adapter's, plus the scaled bias of B."""
    bias = base_bias.float() if delta.bias is None else delta.bias.float()
    if delta.b_bias is None:
        return bias
    if delta.magnitude is not None:
        raise InvalidRequest(_BOTH, param="lora_bias")
    return bias + delta.scale * delta.b_bias.float()


class EncoderWeights:
    """An encoder's checkpoint in float32 with an adapter merged into it."""

    def __init__(
        self, inner: Weights, spec: EncoderSpec, adapter: LoRAAdapter | None = None
    ) -> None:
        self._inner, self._modules = inner, TargetModules(spec)
        self._adapter = adapter or LoRAAdapter(digest="")

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `Weights.get`."""
        tensor = self._inner.get(name, shape).float()
        module, _, part = name.rpartition(".")
        target = self._modules.resolve(module) or ""
        if target == self._modules.embedding:
            return merged_embedding(tensor, self._adapter)
        delta = self._adapter.modules.get(target)
        if delta is None:
            return tensor
        return merged_weight(tensor, delta) if part == "weight" else added_bias(tensor, delta)

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        """See `Weights.matrix`."""
        return DenseSource(self.get(name, shape))

    def release(self) -> None:
        """See `Weights.release`."""
        self._inner.release()
