"""`TypicalAcceptanceSampler`: accepts drafts that are likely enough, even if another token would
have been sampled.

Eta sampling (Hewitt et al. 2022) as acceptance rule for drafts, after Cai et al. 2024 ("Medusa"): a
draft is accepted if p(draft) > min(threshold, alpha * exp(-H(p))). More drafts are accepted, but
the text no longer follows the model's distribution. Greedy sequences are not affected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.sampling_params import SamplingParams
from engine.contract.speculative_config import TYPICAL, SpeculativeConfig
from engine.sampling.request_state import RequestSamplingState


@dataclass(frozen=True, slots=True)
class TypicalAcceptanceSampler:
    """`threshold` and `alpha`: vLLM's `posterior_threshold` and `posterior_alpha`."""

    threshold: float
    alpha: float

    def accepted(
        self,
        logits: Tensor,
        states: Sequence[RequestSamplingState],
        drafts: Mapping[int, int] | None,
    ) -> dict[int, int]:
        """Return the rows whose draft is accepted, and the draft.

        Args:
            logits: float32 [rows, vocab], after all changes except temperature and filters.
            states: [rows].
            drafts: row -> draft at its position; None: there are none.
        """
        rows = [row for row in drafts or () if not states[row].params.greedy]
        if not drafts or not rows:
            return {}
        probabilities = filtered_probabilities(logits[rows], [states[row].params for row in rows])
        entropy = -torch.special.xlogy(probabilities, probabilities).sum(dim=-1)
        min_probability = (self.alpha * torch.exp(-entropy)).clamp(max=self.threshold)
        draft_ids = torch.tensor([[drafts[row]] for row in rows])
        holds = probabilities.gather(1, draft_ids).squeeze(-1) > min_probability
        return {
            row: drafts[row]
            for row, is_accepted in zip(rows, holds.tolist(), strict=True)
            if is_accepted
        }


def make_rejection_sampler(config: EngineConfig) -> TypicalAcceptanceSampler | None:
    """Return the sampler that accepts further drafts by the settings; None: no sampler."""
    if not config.speculative_config:
        return None
    speculative_config = SpeculativeConfig.from_mapping(config.speculative_config)
    if speculative_config.acceptance_method != TYPICAL:
        return None
    return TypicalAcceptanceSampler(
        speculative_config.posterior_threshold, speculative_config.posterior_alpha
    )


def filtered_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return float64 [n, vocab]: sampling probabilities after temperature and filters.

    Rows that can't be sampled are NaN.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None]

    vocab = logits.shape[-1]
    ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    weights = torch.softmax(
        ordered / column([row_params.temperature for row_params in params]), dim=-1
    )
    rank = torch.arange(vocab)
    top_k = column([vocab if row_params.top_k < 1 else row_params.top_k for row_params in params])
    min_weight = column([row_params.min_p for row_params in params]) * weights[:, :1]
    weights = weights * ((rank < top_k) & (weights >= min_weight))
    top_p = column([row_params.top_p for row_params in params])
    previous_sum = weights.cumsum(dim=-1) - weights
    inside = (
        (previous_sum < top_p * weights.sum(dim=-1, keepdim=True)) | (top_p >= 1.0) | (rank == 0)
    )
    weights = weights * inside
    return torch.zeros_like(weights).scatter_(1, ids, weights / weights.sum(dim=-1, keepdim=True))
