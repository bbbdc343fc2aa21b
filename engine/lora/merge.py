"""A checkpoint's weights with an adapter merged into them: what running it apart must amount to."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.lora.adapter import Adapter, ModuleDelta
from engine.lora.modules import Modules
from engine.models.experts import Weights
from engine.models.spec import DecoderSpec
from engine.quantization.matrix import DenseMatrix, Matrix


def merged_spec(spec: DecoderSpec) -> DecoderSpec:
    """The spec of a merged model: its tables may differ, and each linear layer may have a bias."""
    return replace(spec, tie_embeddings=False, qkv_bias=True, o_bias=True, mlp_bias=True)


class FloatWeights:
    """A checkpoint in float32, rounded or not, with an adapter merged into it."""

    def __init__(self, inner: Weights, spec: DecoderSpec, adapter: Adapter | None = None) -> None:
        self._inner, self._spec, self._modules = inner, spec, Modules(spec)
        self._adapter = adapter or Adapter(digest="")
        names = spec.names
        self._tables = {f"{names.embedding}.weight": "embedding", f"{names.lm_head}.weight": "head"}

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `Weights.get`. Raises `InvalidRequest` for what can't be merged."""
        delta = self._delta(name.rpartition(".")[0])
        if name.endswith(".bias"):
            return self._bias(name, shape, delta)
        weight = self._inner.get(name, shape)
        if delta is None:
            return weight
        flipped = self._spec.transposed
        merged = _merge((weight.T if flipped else weight).float(), delta)
        return merged.T.contiguous() if flipped else merged

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `Weights.matrix`."""
        if which := self._table(name):
            return DenseMatrix(self._merged_table(which, shape))
        weight = self._inner.matrix(name, shape).floats(slice(None)).float()
        delta = self._delta(name.removesuffix(".weight"))
        return DenseMatrix(weight if delta is None else _merge(weight, delta))

    def release(self) -> None:
        """See `Weights.release`."""
        self._inner.release()

    def _delta(self, module: str) -> ModuleDelta | None:
        known = self._modules.find(module)
        return None if known is None else self._adapter.modules.get(known)

    def _table(self, name: str) -> str:
        """Which table this is, "" for another tensor; checkpoints may leave out a prefix."""
        prefix = self._spec.names.optional_prefix
        return self._tables.get(name) or self._tables.get(prefix + name, "")

    def _merged_table(self, which: str, shape: tuple[int, int]) -> Tensor:
        names, prefix = self._spec.names, self._spec.names.optional_prefix
        tied = which == "embedding" or self._spec.tie_embeddings
        name = f"{names.embedding if tied else names.lm_head}.weight"
        name = name if name in self._inner else name.removeprefix(prefix)
        table = self._inner.matrix(name, shape).floats(slice(None)).float()
        table = self._adapter.tables.get(which, table).float()
        delta = self._adapter.embedding if which == "embedding" else self._adapter.head
        if delta is None or delta.a is None or delta.b is None:
            return table
        if which == "head":
            return _merge(table, delta)
        return table + delta.scale * (delta.b.float() @ delta.a.float()).T

    def _bias(self, name: str, shape: tuple[int, ...], delta: ModuleDelta | None) -> Tensor:
        own = self._inner.get(name, shape).float() if name in self._inner else torch.zeros(shape)
        if delta is None:
            return own
        bias = own if delta.bias is None else delta.bias.float()
        if delta.b_bias is None:
            return bias
        if delta.magnitude is not None:
            raise InvalidRequest(
                "An adapter with both lora_bias and DoRA can't be probed.", param="lora_bias"
            )
        return bias + delta.scale * delta.b_bias.float()


def _merge(weight: Tensor, delta: ModuleDelta) -> Tensor:
    """W + scale * B A, and with DoRA rows of the lengths that it says."""
    if delta.a is None or delta.b is None:
        return weight
    merged = weight + delta.scale * (delta.b.float() @ delta.a.float())
    if delta.magnitude is None:
        return merged
    return merged * (delta.magnitude.float() / merged.norm(dim=1)).unsqueeze(1)
