"""A mixture of experts: each token goes through the few experts that its router chooses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.norms import Step
from kernels import LinearLayer


@dataclass(slots=True)
class Router:
    """Chooses experts.

    Attributes:
        linear: [T, hidden] -> [T, num_experts].
        top_k: experts a token.
        softmax_first, renormalize: see `MoeSpec`.
    """

    linear: LinearLayer
    top_k: int
    softmax_first: bool
    renormalize: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, top_k] and expert ids int64 [T, top_k]."""
        scores = self.linear(x).float()
        if self.softmax_first:
            weights, experts = torch.softmax(scores, dim=-1).topk(self.top_k, dim=-1)
            if self.renormalize:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return weights, experts
        scores, experts = scores.topk(self.top_k, dim=-1)
        return torch.softmax(scores, dim=-1), experts


class MixtureOfExperts:
    """Sum of the chosen experts' outputs, by the router's weights.

    Tokens are sorted by expert, so that each expert that is hit runs once on its own rows.
    """

    def __init__(self, router: Router, experts: list[Step], shared: Step | None) -> None:
        self._router, self._experts, self._shared = router, experts, shared
        read = sum(int(getattr(expert, "nbytes", 0)) for expert in experts)
        # Of the experts a token reads only those that it's sent to.
        self.nbytes = read * router.top_k // len(experts) + router.linear.nbytes
        self.nbytes += int(getattr(shared, "nbytes", 0))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        weights, chosen = self._router(x)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        tokens = order // chosen.shape[-1]
        rows, scales = x[tokens], weights.flatten()[order].unsqueeze(-1)
        out = self._shared(x) if self._shared is not None else torch.zeros_like(x)
        start = 0
        for expert, count in enumerate(torch.bincount(flat).tolist()):
            if count:
                part = slice(start, start + count)
                weighted = self._experts[expert](rows[part]) * scales[part]
                out.index_add_(0, tokens[part], weighted.to(out.dtype))
                start += count
        return out


class GatedExpert:
    """An expert that every token goes through, weighted by a sigmoid of its own."""

    def __init__(self, expert: Step, gate: LinearLayer) -> None:
        self.expert, self.gate = expert, gate
        self.nbytes = int(getattr(expert, "nbytes", 0)) + gate.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return torch.sigmoid(self.gate(x)) * self.expert(x)
