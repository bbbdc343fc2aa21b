"""GPU benchmark cases of what is done to logits: edits, penalties, log probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.gpu_case import GpuCase, compare
from kernels.interface import KernelSet
from kernels.logit_edits import LogitEdits, PenaltyRows, TokenTable


def _masked(edits: LogitEdits, logits: Tensor) -> GpuCase:
    rows, vocab = logits.shape
    device = logits.device
    allowed = torch.rand(rows, -(-vocab // 32) * 32, device=device) < 0.5
    positions = torch.arange(32, device=device)
    bits = torch.cat([(part.view(-1, 32).long() << positions).sum(-1) for part in allowed])
    words = bits.int().view(rows, -1).contiguous()
    every = torch.arange(rows, device=device)

    def check() -> None:
        got = logits.clone()
        edits.apply_bitmask(got, every, words, None)
        if not torch.equal(got, logits.masked_fill(~allowed[:, :vocab], float("-inf"))):
            raise ValueError("a mask keeps other tokens than its bits say")

    work = logits.clone()
    return GpuCase(
        "grammar mask", f"{rows} x {vocab}",
        lambda: edits.apply_bitmask(work, every, words, None), check,
        # Half of the values are written, and sectors whole.
        bytes=logits.nbytes + words.nbytes,
    )  # fmt: skip


def _penalized(edits: LogitEdits, logits: Tensor, tokens: int) -> GpuCase:
    rows, vocab = logits.shape
    device = logits.device
    tokens = min(tokens, vocab)
    ids = torch.rand(rows, vocab, device=device).argsort(1)[:, :tokens]
    counts = torch.randint(0, 4, ids.shape, device=device)
    table = TokenTable(ids.int().contiguous(), counts.int())
    every = torch.arange(rows, dtype=torch.int32, device=device)
    factor = torch.full((rows,), 1.2, device=device)
    penalized = PenaltyRows(every, every, factor, factor, factor)
    lengths = torch.full_like(every, tokens)

    def check() -> None:
        got, expected = logits.clone(), logits.double()
        edits.apply_penalties(got, penalized, table, lengths)
        x = expected.gather(1, ids)
        x = torch.where(x > 0, x / factor[0].double(), x * factor[0].double())
        x = x - factor[0].double() * (counts + (counts > 0))
        compare(got, expected.scatter(1, ids, x), 1e-6)

    work = logits.clone()
    return GpuCase(
        f"penalties, {tokens} tokens", f"{rows} x {vocab}",
        lambda: edits.apply_penalties(work, penalized, table, lengths), check,
        # A sector of 32 bytes is read and written for each token.
        bytes=ids.numel() * (8 + 64),
    )  # fmt: skip


def _scored(edits: LogitEdits, logits: Tensor) -> GpuCase:
    rows, vocab = logits.shape
    tokens = torch.randint(0, vocab, (rows,), device=logits.device)

    def check() -> None:
        scores, _, ranks = edits.token_logprobs(logits, tokens)
        expected = torch.log_softmax(logits.double(), -1)
        chosen = expected.gather(1, tokens[:, None])
        compare(scores, chosen.squeeze(-1), 1e-4)
        if not torch.equal(ranks, (expected > chosen).sum(-1) + 1):
            raise ValueError("ranks differ from the reference's")

    return GpuCase(
        "log probabilities", f"{rows} x {vocab}", lambda: edits.token_logprobs(logits, tokens),
        check, bytes=logits.nbytes,
    )  # fmt: skip


def edit_cases(kernels: KernelSet, rows: int, vocab: int) -> Iterator[GpuCase]:
    """Of random logits; none where the kernels leave it to torch."""
    if kernels.edits is None:
        return
    logits = torch.randn(rows, vocab, device=kernels.device) * 2
    yield _masked(kernels.edits, logits)
    yield _penalized(kernels.edits, logits, 1000)
    yield _scored(kernels.edits, logits)
