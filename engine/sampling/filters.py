"""Top-k, top-p and min-p.

Tokens are ordered by (logit downwards, id upwards), so that ties have one answer: each filter keeps
a prefix of that order. min-p keeps tokens at least `min_p` times as likely as the likeliest; top-k
the first k; top-p the shortest prefix that holds `top_p` of what min-p and top-k left.

Rows are first tried on their largest few logits, which settles nearly all rows of a trained model,
then on more of them, and the rest goes through `radix`. All three give the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.sampling import radix
from engine.sampling.draw import BROKEN, draw, draw_small

#: Largest logits that rows without a small top_k are tried on, first and second.
CANDIDATES = 64
MORE_CANDIDATES = 2048


@dataclass(slots=True)
class Filters:
    """Settings of n rows, on the logits' device.

    Attributes:
        temperature: [n, 1] float32, positive.
        top_k: [n] int64 in [1, vocab].
        top_p: [n] float64 in (0, 1].
        min_p: [n] float64 in [0, 1].
        width: how many of the largest logits to look at first; more than any top_k, or CANDIDATES.
        needs_mass: whether a row's whole probability mass is needed: top_p, and no small top_k.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    width: int
    needs_mass: bool

    def select(self, rows: Tensor) -> Filters:
        """The settings of some of the rows ([m] int64)."""
        return Filters(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.width,
            self.needs_mass,
        )


def sample_filtered(logits: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """Tokens drawn under filters.

    Args:
        logits: [n, vocab] float32, before temperature.
        uniform: [n] float64 in [0, 1).

    Returns:
        [n] int64; `BROKEN` for rows whose largest logit isn't finite.
    """
    width = min(filters.width, logits.shape[-1])
    values, ids = logits.topk(width, dim=-1)
    healthy = torch.isfinite(values[:, 0])
    if not bool(healthy.all()):
        rows = healthy.nonzero().squeeze(-1)
        tokens = torch.full_like(ids[:, 0], BROKEN)
        if len(rows):
            tokens[rows] = sample_filtered(logits[rows], filters.select(rows), uniform[rows])
        return tokens
    tokens, settled = _from_candidates(logits, values, ids, filters, uniform)
    if not bool(settled.all()):
        rows = (~settled).nonzero().squeeze(-1)
        tokens[rows] = _sample_unsettled(logits[rows], filters.select(rows), uniform[rows])
    return tokens


def _sample_unsettled(logits: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """Tokens for rows whose first candidates weren't enough."""
    vocab = logits.shape[-1]
    if filters.width < MORE_CANDIDATES < vocab // 2:
        wider = replace(filters, width=MORE_CANDIDATES)
        return sample_filtered(logits, wider, uniform)
    rows = torch.arange(len(logits), device=logits.device).split(radix.rows_at_once(vocab))
    return torch.cat(
        [_from_whole_rows(logits[part], filters.select(part), uniform[part]) for part in rows]
    )


def _mass(logits: Tensor, filters: Filters, best: Tensor) -> Tensor:
    """[n] float64: the sum of exp((logit - largest) / temperature) over whole rows."""
    probabilities = torch.softmax(logits / filters.temperature, dim=-1)
    return probabilities.gather(1, best[:, None]).squeeze(-1).double().reciprocal()


def _from_candidates(
    logits: Tensor, values: Tensor, ids: Tensor, filters: Filters, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens ([n]) from the largest logits, and which rows those settle ([n] bool)."""
    width, vocab = values.shape[-1], logits.shape[-1]
    weights = ((values - values[:, :1]).double() / filters.temperature.double()).exp()
    order = torch.arange(width, device=logits.device)
    alive = (order < filters.top_k[:, None]) & (weights >= filters.min_p[:, None])
    weights = weights * alive
    all_there = (alive.sum(dim=-1) < width) | (width == vocab)
    mass = weights.sum(dim=-1)
    if filters.needs_mass:
        mass = torch.where(all_there, mass, _mass(logits, filters, ids[:, 0]))
    before = weights.cumsum(dim=-1) - weights
    inside = alive & ((before < (filters.top_p * mass)[:, None]) | (filters.top_p >= 1.0)[:, None])
    inside[:, 0] = True
    count = inside.sum(dim=-1)
    last = values.gather(1, (count - 1)[:, None]).squeeze(-1)
    after = values.gather(1, count.clamp(max=width - 1)[:, None]).squeeze(-1)
    cut = (count < width) & (last == after)  # the border runs through equal logits
    leaks = cut & (last == values[:, -1]) & (width < vocab)
    # What min-p and a large top-k leave beyond the candidates, and its mass, isn't known here.
    unknown = ~all_there & ((filters.min_p > 0) | (filters.top_k < vocab))
    settled = ((count < width) | (width == vocab)) & ~leaks & ~unknown
    if bool((cut & settled).any()):
        ids = _ties_by_id(values, ids)
    kept, places = torch.where(inside, ids, vocab).sort(dim=-1)
    choice = draw_small((weights * inside).gather(1, places), uniform)
    return kept.gather(1, choice[:, None]).squeeze(-1), settled


def _ties_by_id(values: Tensor, ids: Tensor) -> Tensor:
    """`ids` with those of equal values in ascending order; `values` are sorted downwards."""
    by_id, places = ids.sort(dim=-1)
    ranked = values.gather(1, places).sort(dim=-1, descending=True, stable=True).indices
    return by_id.gather(1, ranked)


def _from_whole_rows(logits: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """Tokens from all of the logits, for rows that the candidates don't settle."""
    vocab = logits.shape[-1]
    keys = radix.ordered_keys(logits)
    weights = torch.softmax(logits / filters.temperature, dim=-1).double()
    likeliest = weights.amax(dim=-1, keepdim=True)
    kept = weights >= filters.min_p[:, None] * likeliest
    if bool((filters.top_k < vocab).any()):
        wanted = torch.minimum(filters.top_k, kept.sum(dim=-1)).double()
        border = radix.find_border(keys, kept.double(), wanted)
        kept &= radix.keep_prefix(keys, border, wanted - border.above)
    weights *= kept
    if bool((filters.top_p < 1.0).any()):
        target = weights.sum(dim=-1) * filters.top_p
        border = radix.find_border(keys, weights, target)
        on_it = kept & (keys == border.key[:, None])
        each = torch.where(on_it, weights, 0.0).amax(dim=-1)
        ties = torch.ceil((target - border.above) / each).clamp_(min=1.0)
        ties = torch.where(filters.top_p < 1.0, ties, float(vocab))
        below = (filters.top_p >= 1.0)[:, None] & kept
        weights *= radix.keep_prefix(keys, border, ties) | below
    return draw(weights.float(), uniform)
