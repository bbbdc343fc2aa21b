"""A mixture of experts in two grouped products."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import describe
from kernels.lora_slots import MixtureRows
from kernels.triton.activation import gate_and_mul
from kernels.triton.grouped.align import Groups, align
from kernels.triton.grouped.gemm import grouped_gemm, tile_rows
from kernels.triton.launch import INTERPRETED


def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    tile: int | None = None,
    lora: MixtureRows | None = None,
) -> Tensor:
    """[T, H]: each token's experts, weighted and added up.

    x [T, H]; gate_up [E, 2 I, H]; down [E, H, I]; weights float32 and ids int32 [T, top_k] as
    `route` gives them, ids in [0, E); biases [E, 2 I] and [E, H]. `activation` is "silu", "gelu" or
    "gelu_tanh". The sum over a token's experts is done in float32. With `tile` products have so
    many rows a tile, and sums one order, whatever T is. `lora`: what rows' adapters add. Gale et
    al. 2022 ("MegaBlocks").
    """
    tokens, hidden = x.shape
    experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape != (experts, 2 * inner, hidden) or down.shape != (experts, hidden, inner):
        raise ValueError(
            f"experts {describe(gate_up)} and {describe(down)} don't go with x {describe(x)}"
        )
    top_k = ids.shape[1]
    if ids.shape != (tokens, top_k) or weights.shape != ids.shape or not weights.is_contiguous():
        raise ValueError(f"weights {describe(weights)} and ids {describe(ids)} must be [T, top_k]")
    rows = tile_rows(tokens * top_k, experts) if tile is None or INTERPRETED else tile
    groups = align(ids.flatten(), experts, rows)
    # `route` gives every row an expert, so that nothing needs to be filled with zeros first.
    both = grouped_gemm(x, gate_up, groups, shared=top_k, bias=gate_up_bias, fill=False)
    adding = None if lora is None else AddedToExperts(lora, groups, tokens, top_k)
    if adding is not None:
        adding.up(both, x)
    gated = gate_and_mul(both, activation)
    each = grouped_gemm(
        gated, down, groups, bias=down_bias, scales=None if adding else weights.view(-1),
        dtype=torch.float32, fill=False,
    )  # fmt: skip
    if adding is not None:
        adding.down(each, gated).mul_(weights.view(-1, 1))
    return add_up(each.view(tokens, top_k, hidden), x.dtype, in_order=tile is not None)


class AddedToExperts:
    """What adapters add to a mixture's two products, before they are weighted."""

    def __init__(self, lora: MixtureRows, groups: Groups, tokens: int, top_k: int) -> None:
        self._lora, self._groups, self._top_k = lora, groups, top_k
        self._owners = lora.owners(tokens)

    def up(self, y: Tensor, x: Tensor) -> Tensor:
        """y [T * top_k, 2 I] of x [T, H], changed."""
        place, slots = self._lora.place("up"), self._lora.slots
        slots.add_experts(place, y, x, self._owners, self._groups, self._top_k)
        return y

    def down(self, y: Tensor, x: Tensor) -> Tensor:
        """y [T * top_k, H] of x [T * top_k, I], changed."""
        owners = self._owners[:, None].expand(-1, self._top_k).reshape(-1)
        self._lora.slots.add_experts(self._lora.place("down"), y, x, owners, self._groups)
        return y


def add_up(parts: Tensor, dtype: torch.dtype, *, in_order: bool) -> Tensor:
    """float32 [T, top_k, H] -> [T, H]; `in_order`: one after the other, whatever T is."""
    if not in_order:
        return parts.sum(1).to(dtype)
    total = parts[:, 0].clone()
    for place in range(1, parts.shape[1]):
        total += parts[:, place]
    return total.to(dtype)
