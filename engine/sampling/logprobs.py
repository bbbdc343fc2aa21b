"""Log probabilities of the model itself: before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol import TokenLogprobs

#: Positions of a prompt that are worked on at once; float32 copies of the logits stay this small.
CHUNK = 256


@dataclass(slots=True)
class RawLogprobs:
    """Log probabilities of some rows, before it's known which tokens are chosen.

    Attributes:
        logits: [n, vocab] float32, unchanged.
        normalizer: [n] float32, their logsumexp.
        top_values, top_ids: [n, k], the k largest logits, best first.
    """

    logits: Tensor
    normalizer: Tensor
    top_values: Tensor
    top_ids: Tensor

    @classmethod
    def of(cls, logits: Tensor, k: int) -> RawLogprobs:
        """For `logits` ([n, vocab], float32), with up to `k` top tokens a row."""
        k = min(k, logits.shape[-1])
        values, ids = logits.topk(k, dim=-1) if k else (logits[:, :0], logits[:, :0].long())
        # torch's log_softmax is one fused pass, its logsumexp several: read it off the former.
        best = logits.argmax(dim=-1, keepdim=True)
        log_best = torch.log_softmax(logits, dim=-1).gather(1, best)
        normalizer = (logits.gather(1, best) - log_best).squeeze(-1)
        return cls(logits, normalizer, values, ids)

    def at(self, token_ids: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Entries for the chosen tokens ([n]), row i with its `counts[i]` top tokens."""
        chosen = self.logits.gather(1, token_ids[:, None])
        ranks = ((self.logits > chosen).sum(dim=-1) + 1).tolist()
        values = torch.cat((chosen, self.top_values), dim=-1) - self.normalizer[:, None]
        ids = torch.cat((token_ids[:, None], self.top_ids), dim=-1).tolist()
        places = _ranks(self.top_values).tolist()
        return [
            TokenLogprobs(row_ids[: k + 1], row_values[: k + 1], [rank, *row_places[:k]])
            for row_ids, row_values, rank, row_places, k in zip(
                ids, values.tolist(), ranks, places, counts, strict=True
            )
        ]


def _ranks(values: Tensor) -> Tensor:
    """1-based ranks of values that are sorted downwards ([n, k]); equal values share the best."""
    order = torch.arange(1, values.shape[-1] + 1, device=values.device).expand(values.shape)
    if values.shape[-1] < 2:
        return order
    first = torch.ones_like(values, dtype=torch.bool)
    first[:, 1:] = values[:, 1:] != values[:, :-1]
    return torch.where(first, order, 0).cummax(dim=-1).values


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """Log probabilities of a prompt's tokens.

    Args:
        logits: [n, vocab], any float type; row i is the model's output at some position.
        next_token_ids: [n] int64, the prompt's token that follows each position.
        k: how many top tokens beside it.

    Returns:
        n entries; the first of a prompt (which nothing precedes) is the caller's to add as None.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, logits.shape[0], CHUNK):
        part = logits[start : start + CHUNK].float()
        chosen = next_token_ids[start : start + CHUNK].to(part.device)
        entries += RawLogprobs.of(part, k).at(chosen, [k] * len(part))
    return entries


def best_candidates(logits: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """The `counts[i]` likeliest tokens of each row of `logits` ([n, vocab], float32), best first.

    Tokens that are impossible (minus infinity) are left out; a row with NaN has none.
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
