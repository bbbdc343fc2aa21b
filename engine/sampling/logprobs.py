"""Log probabilities of the model itself: before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.protocol import TokenLogprobs
from kernels.logits import LogitEdits

#: Positions of a prompt that are worked on at once; float32 copies of the logits stay this small.
CHUNK = 256


class LogprobTable(NamedTuple):
    """Log probabilities of chosen tokens, not yet looked at: so they can be on their way from a
    device while it goes on.

    Attributes:
        ids, values: [n, 1 + k] the chosen token's, then those of the k largest logits.
        ranks: int64 [n] of the chosen tokens. places: int64 [n, k] of the others.
        finite: bool [n], whether the row's logits make sense.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor
    places: Tensor
    finite: Tensor

    def entries(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Row i with its `counts[i]` top tokens."""
        return [
            TokenLogprobs(row_ids[: k + 1], row_values[: k + 1], [rank, *row_places[:k]])
            for row_ids, row_values, rank, row_places, k in zip(
                self.ids.tolist(),
                self.values.tolist(),
                self.ranks.tolist(),
                self.places.tolist(),
                counts,
                strict=True,
            )
        ]


@dataclass(slots=True)
class RawLogprobs:
    """Log probabilities of some rows, before it's known which tokens are chosen.

    Attributes:
        logits: [n, vocab] float32, unchanged.
        normalizer: [n] float32, their logsumexp; None where `edits` will find it.
        edits: kernels that score the chosen tokens; None: torch does.
        top_values, top_ids: [n, k], the k largest logits, best first.
    """

    logits: Tensor
    normalizer: Tensor | None
    top_values: Tensor
    top_ids: Tensor
    edits: LogitEdits | None = None

    @classmethod
    def of(cls, logits: Tensor, k: int, edits: LogitEdits | None = None) -> RawLogprobs:
        """For `logits` ([n, vocab], float32), with up to `k` top tokens a row."""
        k = min(k, logits.shape[-1])
        values, ids = logits.topk(k, dim=-1) if k else (logits[:, :0], logits[:, :0].long())
        if edits is not None:
            return cls(logits.contiguous(), None, values, ids, edits)
        # torch's log_softmax is one fused pass, its logsumexp several: read it off the former.
        best = logits.argmax(dim=-1, keepdim=True)
        log_best = torch.log_softmax(logits, dim=-1).gather(1, best)
        normalizer = (logits.gather(1, best) - log_best).squeeze(-1)
        return cls(logits, normalizer, values, ids)

    def table(self, token_ids: Tensor) -> LogprobTable:
        """For the chosen tokens ([n])."""
        own, normalizer, ranks = self._score(token_ids)
        others = self.top_values - normalizer[:, None]
        return LogprobTable(
            ids=torch.cat((token_ids[:, None], self.top_ids), dim=-1),
            values=torch.cat((own[:, None], others), dim=-1),
            ranks=ranks,
            places=_ranks(self.top_values),
            finite=torch.isfinite(normalizer),
        )

    def _score(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n] each: log probabilities, the rows' logsumexps, ranks."""
        if self.edits is not None:
            return self.edits.token_logprobs(self.logits, token_ids.contiguous())
        if self.normalizer is None:
            raise RuntimeError("There is neither a normalizer nor what finds it.")
        chosen = self.logits.gather(1, token_ids[:, None])
        ranks = (self.logits > chosen).sum(dim=-1) + 1
        return chosen.squeeze(-1) - self.normalizer, self.normalizer, ranks

    def at(self, token_ids: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Entries for the chosen tokens ([n]), row i with its `counts[i]` top tokens."""
        return self.table(token_ids).entries(counts)


def _ranks(values: Tensor) -> Tensor:
    """1-based ranks of values that are sorted downwards ([n, k]); equal values share the best."""
    order = torch.arange(1, values.shape[-1] + 1, device=values.device).expand(values.shape)
    if values.shape[-1] < 2:
        return order
    first = torch.ones_like(values, dtype=torch.bool)
    first[:, 1:] = values[:, 1:] != values[:, :-1]
    return torch.where(first, order, 0).cummax(dim=-1).values


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, next_token_ids: Tensor, k: int, edits: LogitEdits | None = None
) -> list[TokenLogprobs]:
    """Log probabilities of a prompt's tokens.

    Args:
        logits: [n, vocab], any float type; row i is the model's output at some position.
        next_token_ids: [n] int64, the prompt's token that follows each position.
        k: how many top tokens beside it.
        edits: kernels that score the tokens; None: torch does.

    Returns:
        n entries; the first of a prompt (which nothing precedes) is the caller's to add as None.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, logits.shape[0], CHUNK):
        part = logits[start : start + CHUNK].float()
        chosen = next_token_ids[start : start + CHUNK].to(part.device)
        entries += RawLogprobs.of(part, k, edits).at(chosen, [k] * len(part))
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
