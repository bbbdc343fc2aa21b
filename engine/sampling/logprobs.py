"""Raw log probabilities: before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.contract.messages import TokenLogprobs
from kernels import KernelSet
from kernels.logit_edits import TopLogprobs

#: Number of a prompt's positions processed at once, which bounds the float32 copies of logits.
CHUNK = 256


class LogprobsTensors(NamedTuple):
    """Log probabilities of chosen tokens as tensors, so that copies from a device can overlap with
    its work.

    Attributes:
        ids, values: [n, 1 + k] of the chosen token, then of the k largest logits.
        ranks: int64 [n] of the chosen tokens. top_ranks: int64 [n, k] of the others.
        finite: bool [n], whether the row's logits are valid.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor
    top_ranks: Tensor
    finite: Tensor

    def to_lists(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Return the entry of row i with its `counts[i]` top tokens."""
        return [
            TokenLogprobs(row_ids[: k + 1], row_values[: k + 1], [rank, *row_top_ranks[:k]])
            for row_ids, row_values, rank, row_top_ranks, k in zip(
                self.ids.tolist(),
                self.values.tolist(),
                self.ranks.tolist(),
                self.top_ranks.tolist(),
                counts,
                strict=True,
            )
        ]


@dataclass(slots=True)
class LogprobsComputer:
    """Computes log probabilities of some rows, whose chosen tokens are still unknown.

    Attributes:
        logits: [n, vocab] float32, must not be modified.
        k: number of top tokens per row.
        ops: kernels for the logits' device; None: torch.
        asked: rows -> tokens to score instead of their top ones.
    """

    logits: Tensor
    k: int
    ops: KernelSet | None = None
    asked: dict[int, list[int]] = field(default_factory=dict)

    def table(self, token_ids: Tensor) -> LogprobsTensors:
        """Return the table for the chosen tokens ([n])."""
        k, top_ids = min(self.k, self.logits.shape[-1]), None
        if self.ops is not None:
            top_ids = self.ops.top_logprobs(self.logits.contiguous(), token_ids.contiguous(), k)
        if top_ids is None:
            top_ids = self._compute_torch(token_ids, k)
        for row, requested in self.asked.items():
            requested_logits, columns = self.logits[row, requested], slice(1, 1 + len(requested))
            top_ids.values[row, columns] = requested_logits - top_ids.normalizers[row]
            top_ids.ids[row, columns] = torch.tensor(requested, device=requested_logits.device)
            top_ids.ranks[row, columns] = (self.logits[row] > requested_logits[:, None]).sum(
                dim=-1
            ) + 1
        finite = torch.isfinite(top_ids.normalizers)
        return LogprobsTensors(
            top_ids.ids, top_ids.values, top_ids.ranks[:, 0], top_ids.ranks[:, 1:], finite
        )

    def _compute_torch(self, token_ids: Tensor, k: int) -> TopLogprobs:
        logits = self.logits
        values, ids = logits.topk(k, dim=-1) if k else (logits[:, :0], logits[:, :0].long())
        row_values, normalizers, ranks = self._score(token_ids)
        return TopLogprobs(
            ids=torch.cat((token_ids[:, None], ids), dim=-1),
            values=torch.cat((row_values[:, None], values - normalizers[:, None]), dim=-1),
            ranks=torch.cat((ranks[:, None], _ranks(values)), dim=-1),
            normalizers=normalizers,
        )

    def _score(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return [n] each: log probabilities, the rows' logsumexps, ranks."""
        logits = self.logits
        if self.ops is not None and self.ops.edits is not None:
            return self.ops.edits.token_logprobs(logits.contiguous(), token_ids.contiguous())
        # torch's log_softmax is one fused pass, its logsumexp several: derive it from the former.
        best = logits.argmax(dim=-1, keepdim=True)
        log_best = torch.log_softmax(logits, dim=-1).gather(1, best)
        normalizer = (logits.gather(1, best) - log_best).squeeze(-1)
        chosen = logits.gather(1, token_ids[:, None])
        ranks = (logits > chosen).sum(dim=-1) + 1
        return chosen.squeeze(-1) - normalizer, normalizer, ranks

    def compute(self, token_ids: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Return entries for the chosen tokens ([n]), row i with its `counts[i]` top tokens."""
        return self.table(token_ids).to_lists(counts)


def _ranks(values: Tensor) -> Tensor:
    """Return 1-based ranks of values in descending order ([n, k]); equal values share a rank."""
    order = torch.arange(1, values.shape[-1] + 1, device=values.device).expand(values.shape)
    if values.shape[-1] < 2:
        return order
    first = torch.ones_like(values, dtype=torch.bool)
    first[:, 1:] = values[:, 1:] != values[:, :-1]
    return torch.where(first, order, 0).cummax(dim=-1).values


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, next_token_ids: Tensor, k: int, ops: KernelSet | None = None
) -> list[TokenLogprobs]:
    """Return log probabilities of a prompt's tokens.

    Args:
        logits: [n, vocab], any float type; row i is the model's output at some position.
        next_token_ids: [n] int64, the prompt's token after each position.
        k: number of top tokens.
        ops: kernels that score the tokens; None: torch.

    Returns:
        n entries; the caller adds None for the first token, which has no log probability.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, logits.shape[0], CHUNK):
        part = logits[start : start + CHUNK].float()
        chosen = next_token_ids[start : start + CHUNK].to(part.device)
        entries += LogprobsComputer(part, k, ops).compute(chosen, [k] * len(part))
    return entries


def best_candidates(logits: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the `counts[i]` most likely tokens of each row of `logits` ([n, vocab], float32).

    Best first, without impossible tokens (minus infinity); a row with NaN has none.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    values, ids = log_probs.topk(min(max(counts), logits.shape[-1]), dim=-1)
    possible = torch.isfinite(values).sum(dim=-1).tolist()
    return [
        TokenLogprobs(row_ids[:size], row_values[:size], list(range(1, size + 1)))
        for row_ids, row_values, size in zip(
            ids.tolist(), values.tolist(), map(min, counts, possible), strict=True
        )
    ]
