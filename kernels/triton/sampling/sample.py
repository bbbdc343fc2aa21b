"""Sampling by several programs a row: mostly without a sort, else with one of each piece."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.tensors import check_logits, check_vector
from kernels.triton.launch import INTERPRETED, launch
from kernels.triton.sampling.candidates import (
    choose_kernel,
    first_kernel,
    gather_kernel,
    scan_kernel,
    select_kernel,
)
from kernels.triton.sampling.full_sort import search_kernel, sort_kernel

CHUNK = 64 if INTERPRETED else 2048
"""Logits of a row that a program reads."""
GROUPS = 8 if INTERPRETED else 32
"""Groups of a chunk, of which the largest logits are known."""
MIN_CANDIDATES = 8 if INTERPRETED else 512
"""So many of a row's largest logits are looked at, where fewer aren't known to do."""
MAX_CANDIDATES = 16 if INTERPRETED else 1024
"""Logits of a row that are collected and sorted at most, where few decide."""
RUN = 8 if INTERPRETED else 32
"""Neighbours in a sorted piece that are known by their last and their weight."""


def argmax(logits: Tensor) -> Tensor:
    """See `KernelSet.argmax`."""
    rows, vocab = check_logits(logits)
    out, floats, ints, cut = _scratch(rows, vocab, logits.device)
    chunks = cut["CHUNKS"]
    launch(scan_kernel, (chunks, rows), floats, ints, logits, None, **cut, num_warps=4)
    launch(
        first_kernel, (rows,), out, floats, ints, VOCAB=vocab, CHUNKS=chunks, GROUPS=GROUPS,
        PADDED=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return out


def _scratch(
    rows: int, vocab: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, dict[str, int]]:
    """Tokens, what a pass says of each row as floats and ints, and how rows are cut."""
    chunks = triton.cdiv(vocab, CHUNK)
    return (
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty((rows, chunks * (2 + GROUPS)), dtype=torch.float32, device=device),
        torch.empty((rows, chunks + 2), dtype=torch.int32, device=device),
        {"VOCAB": vocab, "CHUNK": CHUNK, "CHUNKS": chunks, "GROUPS": GROUPS},
    )


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """See `KernelSet.sample`.

    Weights are float32, their sums float64 where a border depends on them. One pass finds the
    largest logits of small groups; that is all for rows without filters. For the others it gives a
    threshold at or above which top-k's or top-p's border lies, so that only the few logits there
    are collected and sorted. Rows that are too flat for that are sorted piece by piece, and their
    borders searched in all pieces at once, bit by bit of a logit.
    """
    rows, vocab = check_logits(logits)
    check_vector("temperature", temperature, rows, torch.float32)
    check_vector("top_k", top_k, rows, torch.int64)
    check_vector("top_p", top_p, rows, torch.float64)
    check_vector("min_p", min_p, rows, torch.float64)
    check_vector("uniforms", uniforms, rows, torch.float64)
    out, floats, ints, cut = _scratch(rows, vocab, logits.device)
    chunks = cut["CHUNKS"]
    padded = triton.next_power_of_2(chunks)
    settings = (temperature, top_k, top_p, min_p, uniforms)
    candidates = torch.empty((rows, MAX_CANDIDATES), dtype=torch.int64, device=logits.device)
    launch(scan_kernel, (chunks, rows), floats, ints, logits, temperature, **cut, num_warps=4)
    launch(
        select_kernel, (rows,), out, floats, ints, logits, *settings, **cut, PADDED=padded,
        ENOUGH=MIN_CANDIDATES, num_warps=8,
    )  # fmt: skip
    launch(
        gather_kernel,
        (chunks, rows),
        candidates,
        floats,
        ints,
        logits,
        **cut,
        MAX_CANDIDATES=MAX_CANDIDATES,
        num_warps=4,
    )
    launch(
        choose_kernel, (rows,), out, candidates, floats, ints, *settings, VOCAB=vocab,
        CHUNKS=chunks, GROUPS=GROUPS, PADDED=padded, MAX_CANDIDATES=MAX_CANDIDATES, num_warps=8,
    )  # fmt: skip
    sorted_rows = _sort_the_rest(rows, floats, ints, logits, temperature, cut, padded)
    launch(
        search_kernel, (rows,), out, *sorted_rows, floats, ints, logits, *settings, **cut,
        PADDED=padded, RUN=RUN, num_warps=8,
    )  # fmt: skip
    return out


def _sort_the_rest(
    rows: int,
    floats: Tensor,
    ints: Tensor,
    logits: Tensor,
    temperature: Tensor,
    cut: dict[str, int],
    padded: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys of the rows that aren't settled, sorted by pieces; see `sort_kernel`.

    There is room for all rows, since the host knows of none whether it's settled.
    """
    chunks, device = cut["CHUNKS"], logits.device
    ordered = torch.empty((rows, chunks * CHUNK), dtype=torch.int32, device=device)
    lasts = torch.empty((rows, chunks * (CHUNK // RUN)), dtype=torch.int32, device=device)
    sums = torch.empty(lasts.shape, dtype=torch.float64, device=device)
    launch(
        sort_kernel, (chunks, rows), ordered, lasts, sums, floats, ints, logits, temperature,
        **cut, PADDED=padded, RUN=RUN, num_warps=4,
    )  # fmt: skip
    return ordered, lasts, sums
