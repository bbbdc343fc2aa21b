"""Shrink and expand in Triton's interpreter, against float64."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from kernels.lora import LoraMapping, LoraSlice, LoraWeights
from kernels.triton.lora import TritonLoraSlots
from tests.kernels.tolerance import assert_close

CPU = torch.device("cpu")
TARGET = (0, "qkv")
#: Columns of the parts of one layer: borders within and between blocks of columns.
PARTS = [70, 26, 33]
COLUMNS = sum(PARTS)


def adapter(depth, ranks, dtype, *, bias=False, remaining_out=()):
    """Of PARTS, each with a rank of its own; `remaining_out` has none."""
    parts, rows, first = [], 0, 0
    for index, (columns, rank) in enumerate(zip(PARTS, ranks, strict=True)):
        if index not in remaining_out:
            b = torch.randn(columns, rank).to(dtype)
            parts.append(LoraSlice(first, b, rows, 0.7 + index))
            rows += rank
        first += columns
    a = (torch.randn(rows, depth) / depth**0.5).to(dtype)
    gain = torch.rand(COLUMNS) + 0.5 if bias else None
    shift = torch.randn(COLUMNS) if bias else None
    return LoraWeights(a=a, parts=parts, out_features=COLUMNS, gain=gain, shift=shift)


def expected_of(y, x, lora, rows):
    """In float64."""
    y = y.double()
    for part in lora.parts:
        columns, rank = part.b.shape
        out_columns = slice(part.first, part.first + columns)
        low = x[rows].double() @ lora.a[part.start : part.start + rank].double().T
        y[rows, out_columns] += part.scale * low @ part.b.double().T
    if lora.gain is not None:
        y[rows] = y[rows] * lora.gain.double() + lora.shift.double()
    return y


def rows_of(slots, groups, tokens, *, padded=True):
    mapping = slots.sort([(s, np.array(r)) for s, r in groups], tokens, padded=padded)
    return LoraMapping(*(torch.from_numpy(array) for array in mapping))


def check(slots, loras, tokens, depth, dtype, seed=0, *, padded=True):
    """Rows in turn of no adapter and of each of `loras`."""
    torch.manual_seed(seed)
    x, y = torch.randn(tokens, depth).to(dtype), torch.randn(tokens, COLUMNS).to(dtype)
    tables = [slots.put([{"qkv": slots.pack(lora)}]) for lora in loras]
    owner = torch.randint(-1, len(loras), (tokens,))
    owner[0] = len(loras) - 1
    groups = [(tables[i].slot, (owner == i).nonzero().flatten().tolist())
              for i in range(len(loras))]  # fmt: skip
    groups = [group for group in groups if group[1]]
    expected = y
    for i, lora in enumerate(loras):
        expected = expected_of(expected, x, lora, owner == i)
    initial_copy = y.clone()
    slots.add(TARGET, y, x, rows_of(slots, groups, tokens, padded=padded))
    assert_close(y, expected, dtype, 8.0)
    assert torch.equal(y[owner < 0], initial_copy[owner < 0])
    return x, initial_copy, y, owner, tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "depth"), [(1, 32), (37, 1100)])
def test_rows_of_adapters_of_odd_ranks_among_rows_of_none(dtype, tokens, depth):
    """The deeper product is split in two; a part that an adapter leaves out stays as it is."""
    slots = TritonLoraSlots({(1, "o"): 1, TARGET: 3}, 5, 40, dtype, CPU)
    loras = [
        adapter(depth, [4, 17, 33], dtype, bias=True),
        adapter(depth, [1, 8, 16], dtype, remaining_out=[1]),
        adapter(depth, [40, 40, 40], dtype),
    ]
    check(slots, loras, tokens, depth, dtype, padded=tokens > 1)


def test_tiles_of_64_rows_and_one_slot_for_all(monkeypatch):
    monkeypatch.setattr(TritonLoraSlots, "tile", lambda self, rows: 64)
    slots = TritonLoraSlots({TARGET: 3}, 1, 16, torch.float32, CPU)
    check(slots, [adapter(48, [16, 3, 16], torch.float32)], 70, 48, torch.float32)


def test_biases_alone_and_no_row_at_all():
    slots = TritonLoraSlots({TARGET: 3}, 2, 16, torch.float32, CPU)
    nothing = LoraWeights(
        a=torch.zeros(0, 24), parts=[LoraSlice(0, torch.zeros(COLUMNS, 0), 0)],
        out_features=COLUMNS, gain=torch.full((COLUMNS,), 2.0), shift=torch.ones(COLUMNS),
    )  # fmt: skip
    check(slots, [nothing], 5, 24, torch.float32)
    y = torch.randn(5, COLUMNS)
    initial_copy = y.clone()
    slots.add(TARGET, y, torch.randn(5, 24), rows_of(slots, [], 5))
    assert torch.equal(y, initial_copy)


def test_a_layer_that_an_adapter_leaves_alone():
    """Its entry is empty, as is that of a slot which had another adapter before."""
    slots = TritonLoraSlots({TARGET: 3, (0, "o"): 1}, 1, 16, torch.float32, CPU)
    tables = check(slots, [adapter(24, [16, 2, 1], torch.float32)], 4, 24, torch.float32)[4]
    with pytest.raises(ValueError, match="all 1 slots"):
        slots.put([{}])
    del tables
    gc.collect()
    empty = slots.put([{}])
    y = torch.randn(4, COLUMNS)
    initial_copy = y.clone()
    slots.add(TARGET, y, torch.randn(4, 24), rows_of(slots, [(empty.slot, [0, 3])], 4))
    assert torch.equal(y, initial_copy)


def test_a_row_has_the_same_bits_in_every_step_where_that_is_asked_for():
    slots = TritonLoraSlots({TARGET: 3}, 1, 16, torch.float32, CPU, alike=True)
    depth = 1100
    lora = adapter(depth, [16, 5, 16], torch.float32)
    x, initial, y, owner, (table,) = check(slots, [lora], 20, depth, torch.float32, seed=3)
    for row in (owner == 0).nonzero().flatten().tolist()[:3]:
        isolated_copy = initial[row : row + 1].clone()
        slots.add(TARGET, isolated_copy, x[row : row + 1], rows_of(slots, [(table.slot, [0])], 1))
        assert torch.equal(isolated_copy[0], y[row])


@pytest.mark.parametrize(("rows", "max_slots"), [(1, 1), (5, 3), (16, 1), (17, 2), (200, 9)])
def test_padded_tiles_hold_every_mixture(rows, max_slots):
    """However rows go to slots, no more tiles are needed than a graph has."""
    slots = TritonLoraSlots({TARGET: 3}, max_slots, 16, torch.float32, CPU)
    rng = np.random.default_rng(rows)
    for spread in range(1, max_slots + 1):
        owner = rng.integers(-1, spread, rows)
        groups = [(s, np.flatnonzero(owner == s)) for s in range(spread) if (owner == s).any()]
        order, owners, count = slots.sort(groups, rows, padded=True)
        assert len(owners) == slots.max_tiles(rows) >= count[0]
        seen = {}
        for tile, slot in zip(order.reshape(len(owners), -1), owners, strict=True):
            seen.setdefault(int(slot), []).extend(tile[tile >= 0].tolist())
        assert not seen.pop(-1, [])
        rows_by_slot = {slot: sorted(slot_rows) for slot, slot_rows in seen.items()}
        assert rows_by_slot == {slot: local_tensor.tolist() for slot, local_tensor in groups}


def test_what_does_not_fit_is_refused():
    slots = TritonLoraSlots({TARGET: 3}, 1, 16, torch.float32, CPU)
    with pytest.raises(ValueError, match="ranks above 16"):
        slots.pack(adapter(24, [17, 1, 1], torch.float32))
    packed = slots.pack(adapter(24, [1, 1, 1], torch.float32))
    with pytest.raises(ValueError, match="no adapters of up"):
        slots.put([{"up": packed}])
    y, x, rows = torch.zeros(2, COLUMNS), torch.zeros(2, 24).half(), rows_of(slots, [], 2)
    with pytest.raises(ValueError, match="don't go with"):
        slots.add(TARGET, y, x, rows)
