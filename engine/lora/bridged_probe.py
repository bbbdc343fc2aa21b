"""The parity probe of a bridged model: rows with an adapter say what its merged weights say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.lora.adapter import Adapter, ModuleDelta
from engine.lora.bridged import slot_of
from engine.lora.merge import added_bias, merged_embedding, merged_head, merged_weight
from engine.lora.modules import Modules
from engine.lora.pack import pack_adapter
from engine.lora.probe import BLOCK, LENGTH, Probe, compared, prompts, step_of
from engine.models.adapters import AdapterWeights
from kernels import LinearLayer

if TYPE_CHECKING:  # with it comes `transformers`, which takes seconds
    from engine.models.bridge.model import BridgeModel


def probe_bridged(adapter: Adapter, model: BridgeModel, modules: Modules) -> Probe:
    """Compare logits of random prompts, in float32. The model's weights are the merged ones then.

    Raises `InvalidRequest` for what can't be merged.
    """
    model.allocate_kv(-(-LENGTH // BLOCK), BLOCK, torch.float32)
    apart = _logits(model, pack_adapter(adapter, model, None, None, modules))
    _merge(model, adapter, modules)
    return compared(apart, _logits(model, None))


@torch.inference_mode()
def _logits(model: BridgeModel, adapter: AdapterWeights | None) -> list[Tensor]:
    """Float32 [tokens, vocabulary] of each prompt."""
    found = []
    for prompt in prompts(model.spec.vocab_size):
        found.append(model.forward(prompt, step_of(len(prompt), adapter)).clone())
        model.keep(set())
    return found


@torch.no_grad()
def _merge(model: BridgeModel, adapter: Adapter, modules: Modules) -> None:
    """Put merged weights in the places of the model's own."""
    for name, delta in adapter.modules.items():
        module, layer = _module(model, name), model.adapted.linears[slot_of(name)]
        _put(model, module, merged_weight(_whole(layer), delta), _bias(module, delta))
    head = modules.head
    if head and (adapter.head is not None or "head" in adapter.tables or "head" in adapter.tokens):
        module = _module(model, head)
        weight = merged_head(_whole(model.lm_head), adapter)
        _put(model, module, weight, _bias(module, adapter.head))
    if model.adapted.embedding is not None and (
        adapter.embedding is not None or "embedding" in adapter.tables
    ):
        table: Any = model.adapted.embedding[1]
        table._weight, table._layer = merged_embedding(table.weight.float() + 0, adapter), None


def _module(model: BridgeModel, name: str) -> Any:
    return model.model.get_submodule(name)


def _whole(layer: LinearLayer) -> Tensor:
    """All of a weight, float32 [outputs, inputs]."""
    return layer.rows(torch.arange(layer.out_features)).float()


def _bias(module: Any, delta: ModuleDelta | None) -> Tensor | None:
    """A module's, with what an adapter does to it."""
    own: Tensor | None = None if module.bias is None else module.bias.float()
    if delta is None or (delta.bias is None and delta.b_bias is None):
        return own
    return added_bias(torch.zeros(module.out_features) if own is None else own, delta)


def _put(model: BridgeModel, module: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Have a module compute with another weight."""
    if hasattr(module, "layer"):
        module.layer = model.ops.PackedLinear(weight.contiguous(), bias)
    else:  # a Conv1D, whose weight is the other way around
        module.weight.data = weight.T.contiguous()
        if bias is not None:
            module.bias.data = bias
