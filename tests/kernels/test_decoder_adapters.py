"""Adapters inside of the compiled decoder's products: what is added behind them, to the bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.lora import LoraSlice, LoraWeights
from tests.kernels.decoder_layers import compile_layers

from .test_decoder import SHAPE, make_batch, make_layer, norm, one_by_one

Q, KV, INNER = SHAPE.num_heads * SHAPE.head_dim, SHAPE.num_kv_heads * SHAPE.head_dim, 160
#: Slots with their field of a layer, and the columns of their parts.
SLOTS = {
    "qkv": ("qkv", (Q, KV, KV)),
    "o": ("o", (96,)),
    "up": ("gate_up", (INNER, INNER)),
    "down": ("down", (96,)),
}


def weights(layer, slot, rank, dtype, *, gain, rounds, widths=None):
    """An adapter of one linear layer, a part of which may have no rank."""
    linear = getattr(layer, SLOTS[slot][0])
    parts, first, start = [], 0, 0
    for number, width in enumerate(widths or SLOTS[slot][1]):
        local_rank = 0 if number == 1 else rank
        b = (0.1 * torch.randn(width, local_rank)).to(dtype)
        parts.append(LoraSlice(first, b, start, 0.5))
        first, start = first + width, start + local_rank
    n = linear.out_features
    return LoraWeights(
        a=(0.1 * torch.randn(start, linear.in_features)).to(dtype),
        parts=parts,
        out_features=n,
        gain=torch.rand(n) + 0.5 if gain else None,
        shift=torch.randn(n) if gain else None,
        round_inputs=rounds,
    )


class Adapted:
    """A linear layer, and behind it what adapters add to its rows."""

    def __init__(self, kernels, linear, uses, selected):
        """`selected`: of x's rows, where it has only some: those wanted, in their order."""
        self._kernels, self._linear, self._uses, self._selected = kernels, linear, uses, selected

    def __call__(self, x):
        y = self._linear(x)
        uses = self._uses
        if self._selected is not None and len(x) == len(self._selected):
            positions = [torch.isin(self._selected, rows).nonzero().flatten() for _, rows in uses]
            uses = [(lora, rows) for (lora, _), rows in zip(uses, positions)]
        self._kernels.add_lora(y, x, uses)
        return y


def check(kernels, layers, adapters, rows=None, owner=None):
    """`adapters`: by layer and slot, of each."""
    batch, tokens = make_batch()
    hidden, final_norm = torch.randn(tokens, 96), norm(96)
    owner = torch.randint(-1, len(adapters), (tokens,)) if owner is None else owner
    rows_by_adapter = [(owner == index).nonzero().flatten() for index in range(len(adapters))]
    packed = [[{slot: kernels.pack_lora(weights) for slot, weights in layer.items()}
               for layer in adapter] for adapter in adapters]  # fmt: skip
    baseline = []
    for index, layer in enumerate(layers):
        adapted_fields = {}
        for slot, (field, _) in SLOTS.items():
            uses = [(adapter[index][slot], of) for adapter, of in zip(packed, rows_by_adapter)
                    if slot in adapter[index]]  # fmt: skip
            adapted_fields[field] = Adapted(kernels, getattr(layer, field), uses, rows)
        baseline.append(dataclasses.replace(layer, **adapted_fields))
    initial = [(layer.key_cache.clone(), layer.value_cache.clone()) for layer in layers]
    expected = one_by_one(kernels, SHAPE, baseline, final_norm, hidden, batch, rows)
    for layer, (keys, values) in zip(layers, initial):
        layer.key_cache.copy_(keys)
        layer.value_cache.copy_(values)
    decoder = compile_layers(kernels, SHAPE, layers, final_norm)
    tables = [(decoder.lora_table(adapter), of) for adapter, of in zip(packed, rows_by_adapter)]
    got = decoder(hidden, *batch, rows, adapters=tables)
    assert torch.equal(got, expected)
    assert not torch.equal(got, decoder(hidden, *batch, rows))


def adapter(layers, rank, dtype, *, gain=False, rounds=False, remaining_out=()):
    return [
        {slot: weights(layer, slot, rank, dtype, gain=gain, rounds=rounds)
         for slot in SLOTS if slot not in remaining_out}
        for layer in layers
    ]  # fmt: skip


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_several_adapters(compiled, threads, dtype, rounds, quantization):
    torch.manual_seed(1)
    layers = [make_layer(compiled, quantization=quantization, dtype=dtype) for _ in range(2)]
    some = [
        adapter(layers, 3, dtype, rounds=rounds),
        adapter(layers, 8, dtype, rounds=rounds, gain=True, remaining_out=("o", "up")),
        adapter(layers, 61, dtype, rounds=rounds, remaining_out=("down",)),
    ]
    check(compiled, layers, some)


@pytest.mark.parametrize("sequences", [[(1, 5)], [(1, 9)] * 16, [(1, 3)] * 5, [(60, 60), (50, 64)]])
def test_batches_of_one_adapter(compiled, threads, monkeypatch, sequences):
    monkeypatch.setattr("tests.kernels.test_decoder.SEQUENCES", sequences)
    torch.manual_seed(2)
    layers = [make_layer(compiled, dtype=torch.bfloat16) for _ in range(2)]
    tokens = sum(queries for queries, _ in sequences)
    one = adapter(layers, 16, torch.bfloat16, rounds=True)
    check(compiled, layers, [one], owner=torch.zeros(tokens).long())


@pytest.mark.parametrize("rows", [[30, 0, 9], list(range(31))])
def test_wanted_rows_keep_their_adapters(compiled, threads, rows):
    torch.manual_seed(3)
    layers = [make_layer(compiled) for _ in range(2)]
    some = [adapter(layers, rank, torch.float32) for rank in (4, 16)]
    check(compiled, layers, some, rows=torch.tensor(rows))


def test_parts_that_begin_elsewhere_than_panels(compiled, threads):
    torch.manual_seed(4)
    layers = [make_layer(compiled)]
    uneven = adapter(layers, 8, torch.float32)
    widths = (Q - 5, KV + 5, KV)
    uneven[0]["qkv"] = weights(
        layers[0], "qkv", 8, torch.float32, gain=True, rounds=False, widths=widths
    )
    check(compiled, layers, [uneven, adapter(layers, 4, torch.float32)])
