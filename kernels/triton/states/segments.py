"""Segments of a sequence's tokens in a step, each ending where the state is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ssm import StateRows
from kernels.tensors import check_vector, describe


@triton.jit
def has_tokens(starts, sequence):
    """Whether a sequence has tokens. Those that pad a recorded step have none, and their row may be
    another sequence's, so that nothing may be written there.
    """
    return tl.load(starts + sequence + 1) > tl.load(starts + sequence)


@triton.jit
def num_saves(first_saves, sequence, SAVES: tl.constexpr):
    """Return the range (first, end) of the sequence's rows of `saves`."""
    if SAVES:
        return tl.load(first_saves + sequence), tl.load(first_saves + sequence + 1)
    else:
        return 0, 0


@triton.jit
def segment(starts, rows, saves, sequence, index, last, SAVES: tl.constexpr):
    """Return a segment's (end, row): that of save `index`, or the sequence's own after the last
    save.
    """
    end = tl.load(starts + sequence + 1).to(tl.int64)
    row = tl.load(rows + sequence)
    if SAVES:
        is_save = index < last
        end = tl.where(is_save, tl.load(saves + 2 * index, mask=is_save, other=0), end)
        row = tl.where(is_save, tl.load(saves + 2 * index + 1, mask=is_save, other=0), row)
    return end, row


def first_saves(of: StateRows) -> Tensor | None:
    """Return each sequence's first row of `saves`, int64 [num_seqs + 1]; None without saves.

    Raises ValueError for tensors whose shapes or dtypes differ from `StateRows`; doesn't check
    their contents.
    """
    check_vector("rows", of.rows, len(of.rows), torch.int64)
    check_vector("starts", of.starts, len(of.rows) + 1, torch.int32)
    if of.saves is None:
        return None
    if of.saves.dim() != 2 or of.saves.dtype != torch.int64 or not of.saves.is_contiguous():
        raise ValueError(f"saves {describe(of.saves)} must be contiguous int64 [n, 2]")
    return torch.searchsorted(of.saves[:, 0].contiguous(), of.starts.long(), right=True)
