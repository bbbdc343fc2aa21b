"""Merges an adapter into a classifier's linear layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.lora.adapter import LoRALayer


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


def merged_weight(weight: Tensor, delta: LoRALayer) -> Tensor:
    """Return W + scale * B A; with DoRA its rows have the adapter's norms."""
    if delta.a is None or delta.b is None:
        return weight
    merged = weight + delta.scale * (delta.b.float() @ delta.a.float())
    if delta.magnitude is None:
        return merged
    return merged * (delta.magnitude.float() / merged.norm(dim=1)).unsqueeze(1)


def added_bias(base_bias: Tensor, delta: LoRALayer) -> Tensor:
    """Return the merged bias: the model's or the adapter's, plus the scaled bias of B."""
    bias = base_bias.float() if delta.bias is None else delta.bias.float()
    if delta.b_bias is None:
        return bias
    if delta.magnitude is not None:
        raise InvalidRequest(
            "An adapter with both lora_bias and DoRA can't be merged.", param="lora_bias"
        )
    return bias + delta.scale * delta.b_bias.float()
