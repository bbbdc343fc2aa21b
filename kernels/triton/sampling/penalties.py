"""Repetition, frequency and presence penalties on the tokens that occur.

Those are kept on the device from step to step, a slot a sequence; a step brings only what is new.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_logits, check_vector, describe
from kernels.logits import PenalisedRows, TokenTable
from kernels.triton.launch import launch

BLOCK = 512


@triton.jit(
    do_not_specialize=(
        "capacity",
        "total",
    )
)
def record_kernel(ids, counts, changes, capacity, total, BLOCK: tl.constexpr):
    """Grid (blocks of changes,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    slot = tl.load(changes + at, mask=inside, other=0).to(tl.int64)
    place = slot * capacity + tl.load(changes + total + at, mask=inside, other=0)
    tl.store(ids + place, tl.load(changes + 2 * total + at, mask=inside, other=0), mask=inside)
    tl.store(counts + place, tl.load(changes + 3 * total + at, mask=inside, other=0), mask=inside)


@triton.jit
def penalise_kernel(
    logits, rows, slots, lengths, repetition, frequency, presence, ids, counts, capacity,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (penalised rows, blocks of a slot)."""
    index = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(lengths + index)
    slot = tl.load(slots + index).to(tl.int64) * capacity
    token = tl.load(ids + slot + at, mask=inside, other=0)
    times = tl.load(counts + slot + at, mask=inside, other=0).to(tl.float32)
    factor = tl.load(repetition + index)
    place = logits + tl.load(rows + index).to(tl.int64) * VOCAB + token
    x = tl.load(place, mask=inside, other=0.0)
    x = tl.where(x > 0, x / factor, x * factor)
    x -= tl.load(frequency + index) * times
    x -= tl.where(times > 0, tl.load(presence + index), 0.0)
    tl.store(place, x, mask=inside)


def _check_table(table: TokenTable) -> int:
    shape = table.ids.shape
    for part in (table.ids, table.counts):
        if part.dim() != 2 or part.shape != shape or part.dtype != torch.int32:
            raise ValueError(f"a table's {describe(part)} must be int32 [slots, capacity]")
        if not part.is_contiguous():
            raise ValueError("a table must be contiguous")
    return shape[1]


def record(table: TokenTable, changes: Tensor) -> None:
    """See `LogitEdits.record`."""
    capacity = _check_table(table)
    if changes.dim() != 2 or len(changes) != 4 or changes.dtype != torch.int32:
        raise ValueError(f"changes {describe(changes)} must be int32 [4, m]")
    total = changes.shape[1]
    launch(
        record_kernel, (triton.cdiv(total, BLOCK),), table.ids, table.counts, changes.contiguous(),
        capacity, total, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def penalise(logits: Tensor, penalised: PenalisedRows, table: TokenTable, lengths: Tensor) -> None:
    """See `LogitEdits.penalise`."""
    _, vocab = check_logits(logits)
    capacity, count = _check_table(table), len(penalised.rows)
    for name, ints in (
        ("rows", penalised.rows), ("slots", penalised.slots), ("lengths", lengths),
    ):  # fmt: skip
        check_vector(name, ints, count, torch.int32)
    for name in ("repetition", "frequency", "presence"):
        check_vector(name, getattr(penalised, name), count, torch.float32)
    launch(
        penalise_kernel, (count, triton.cdiv(capacity, BLOCK)), logits, penalised.rows,
        penalised.slots, lengths, penalised.repetition, penalised.frequency, penalised.presence,
        table.ids, table.counts, capacity, VOCAB=vocab, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
