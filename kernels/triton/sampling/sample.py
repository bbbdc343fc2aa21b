"""Sampling with several programs per row, mostly without a sort of the whole row."""

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
"""Logits of a row per program."""
GROUPS = 8 if INTERPRETED else 32
"""Groups per chunk whose maxima are computed."""
MIN_CANDIDATES = 8 if INTERPRETED else 512
"""Number of largest logits that are considered unless fewer are known to suffice."""
MAX_CANDIDATES = 16 if INTERPRETED else 1024
"""Maximum logits of a row that are collected and sorted together."""
RUN = 8 if INTERPRETED else 32
"""Consecutive logits of a sorted chunk that are summarized by their last key and their weight."""


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
    """Return tokens, the scan's float and int results for each row, and the kernels' sizes."""
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

    Weights are float32, and their sums float64 if a border depends on them. One pass finds the
    maxima of small groups of logits, which suffice for rows without filters. For other rows they
    give a threshold at or above which top-k's or top-p's border lies, so that only the few logits
    above it are collected and sorted. Rows too flat for that are sorted in chunks, and their
    borders are found by a binary search over keys in all chunks together.
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
    """Return the keys of rows without a token, sorted by chunk; see `sort_kernel`.

    There is room for all rows, since the host doesn't know which ones already have a token.
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
