"""Top-k, top-p and min-p.

Tokens are ordered by (logit descending, id ascending), so that ties are resolved uniquely, and each
filter keeps a prefix of that order. min-p keeps tokens at least `min_p` times as likely as the most
likely one; top-k the first k; top-p the shortest prefix with a fraction `top_p` of the probability
that remains after min-p and top-k.

Rows are first tried with their largest few logits, which suffices for nearly all rows of a trained
model, then with more; the rest use a radix selection over complete rows. All three give the same
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.request_state import RequestSamplingState
from kernels import KernelSet
from kernels.compiled_decoder import StepSamplingParams
from kernels.tensors import to_device


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The settings of all rows, including greedy ones, as arguments of `KernelSet.sample`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def from_states(
        cls, states: Sequence[RequestSamplingState], vocab_size: int, device: torch.device
    ) -> RowSettings:
        """Return settings with one row per state."""
        params = [state.params for state in states]
        top_k = [vocab_size if p.top_k < 1 else p.top_k for p in params]
        temperature = [0.0 if p.greedy else p.temperature for p in params]
        return cls(
            to_device(torch.tensor(temperature, dtype=torch.float32), device),
            to_device(torch.tensor(top_k, dtype=torch.int64), device),
            to_device(torch.tensor([p.top_p for p in params], dtype=torch.float64), device),
            to_device(torch.tensor([p.min_p for p in params], dtype=torch.float64), device),
        )

    def with_seeds(self, seeds: NDArray[np.uint64]) -> StepSamplingParams:
        """Return settings for kernels that generate the random numbers themselves."""
        return StepSamplingParams(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            torch.from_numpy(seeds.view(np.int64)),
        )


class KernelSampler:
    """Samples with the kernels: one call for all rows, without sorting.

    The semantics are those of `sample_filtered` and `sample_inverse_cdf` with the same random
    numbers. Sums are rounded in another order, so a random number within rounding error of the
    boundary of two tokens may select the other one; nothing else differs.
    """

    def __init__(self, ops: KernelSet) -> None:
        self._ops = ops
        self._states: list[RequestSamplingState] = []
        self._settings: RowSettings | None = None

    def supports(self, logits: Tensor) -> bool:
        """Whether the kernels support these logits."""
        return logits.dtype == torch.float32 and logits.device.type == self._ops.device.type

    def greedy(self, logits: Tensor) -> Tensor:
        """Return the [n] argmax tokens of float32 [n, vocab]; -1 if the maximum isn't finite."""
        return self._ops.argmax(logits.contiguous())

    def sample(self, logits: Tensor, states: list[RequestSamplingState], uniform: Tensor) -> Tensor:
        """Return [n] tokens of float32 [n, vocab], by each state's settings and random number."""
        if self._settings is None or self._states is not states:
            settings = RowSettings.from_states(states, logits.shape[-1], logits.device)
            self._states, self._settings = states, settings
        settings = self._settings
        return self._ops.sample(
            logits.contiguous(),
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            uniform,
        )


BLOCK = 256
#: Token of a row that can't be sampled from.
INVALID_TOKEN = -1


def _below(total: Tensor, uniform: Tensor) -> Tensor:
    """Return `uniform * total`, kept below `total` despite rounding."""
    return torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))


def sample_candidates(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample an index from a few weights per row.

    Args:
        weights: [n, k] float64, not negative.
        uniform: [n] float64 in [0, 1).

    Returns:
        [n] int64; an index whose weight is positive wherever a row has one.
    """
    cumulative = weights.cumsum(dim=-1)
    target = _below(cumulative[:, -1], uniform)
    return (cumulative <= target[:, None]).sum(dim=-1).clamp_(max=weights.shape[-1] - 1)


def sample_inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample tokens from complete rows in vocabulary order, in two levels: a block, then a token.

    In vocabulary order a small change of the logits moves boundaries slightly; ordering by
    probability would swap neighbours.

    Args:
        weights: [n, vocab] float32, not negative; they need not be normalized.
        uniform: [n] float64 in [0, 1).

    Returns:
        [n] int64; `INVALID_TOKEN` if a row's weights add up to 0, infinity or NaN.
    """
    vocab = weights.shape[-1]
    num_in_blocks = vocab // BLOCK * BLOCK
    sums = weights[:, num_in_blocks:].sum(dim=-1, keepdim=True)
    if num_in_blocks:
        blocks = weights[:, :num_in_blocks].unflatten(-1, (-1, BLOCK)).sum(dim=-1)
        sums = torch.cat((blocks, sums), dim=-1)
    sums = sums.double()
    cumulative = sums.cumsum(dim=-1)
    total = cumulative[:, -1]
    target = _below(total, uniform)
    block = (cumulative <= target[:, None]).sum(dim=-1).clamp_(max=sums.shape[-1] - 1)
    previous_sum = (cumulative - sums).gather(1, block[:, None]).squeeze(-1)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=vocab - 1)).double()
    inside = torch.where(ids < vocab, inside, 0.0).cumsum(dim=-1)
    end = inside[:, -1]
    rest = torch.minimum(target - previous_sum, torch.nextafter(end, torch.zeros_like(end)))
    offset = (inside <= rest[:, None]).sum(dim=-1).clamp_(max=BLOCK - 1)
    tokens = block * BLOCK + offset
    return torch.where((total > 0) & torch.isfinite(total), tokens, INVALID_TOKEN)


#: (bits below, number of buckets) of each pass over 32-bit keys. Each pass takes eleven bits from
#: the top, and its histogram narrows the boundary, the last one to a single value. Sorting 32,000
#: logits takes many times as long as the three passes.
_PASSES = ((21, 1 << 11), (10, 1 << 11), (0, 1 << 10))
#: Number of logits processed at once, so that intermediate tensors fit into a CPU's cache.
_CHUNK = 1 << 18


def rows_at_once(vocab_size: int) -> int:
    """Return the number of rows to process at once."""
    return max(1, _CHUNK // max(vocab_size, _PASSES[0][1]))


def ordered_keys(values: Tensor) -> Tensor:
    """Return int64 keys in [0, 2**32), ordered as `values` ([n, vocab], float32); -0 equals 0."""
    bits = (values + 0.0).contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + (1 << 31)


@dataclass(slots=True)
class Threshold:
    """End of a prefix of a row that is ordered by (key descending, id ascending).

    Attributes:
        key: [n], the last key in the prefix.
        above: [n] float64, total weight of all larger keys.
    """

    key: Tensor
    above: Tensor


def _narrow(
    digits: Tensor, weights: Tensor, target: Tensor, above: Tensor, buckets: int
) -> tuple[Tensor, Tensor]:
    """Return the digit at which the weight, summed from the top, reaches `target`, and the sum
    before it.
    """
    rows = digits.shape[0]
    offset = torch.arange(rows, device=digits.device)[:, None] * buckets
    flat = torch.bincount((digits + offset).flatten(), weights.flatten(), rows * buckets)
    histogram = flat.view(rows, buckets).flip(-1)
    reached = histogram.cumsum(dim=-1) + above[:, None]
    index = (reached < target[:, None]).sum(dim=-1, keepdim=True).clamp_(max=buckets - 1)
    previous = reached.gather(1, (index - 1).clamp(min=0)).squeeze(-1)
    index = index.squeeze(-1)
    return buckets - 1 - index, torch.where(index > 0, previous, above)


def find_threshold(keys: Tensor, weights: Tensor, target: Tensor) -> Threshold:
    """Return the shortest prefix whose weight reaches `target`.

    Args:
        keys: [n, vocab] from `ordered_keys`.
        weights: [n, vocab] float64, not negative.
        target: [n] float64, positive.
    """
    key = torch.zeros_like(target, dtype=torch.int64)
    above = torch.zeros_like(target)
    for shift, buckets in _PASSES:
        digits = (keys >> shift) & (buckets - 1)
        digit, above = _narrow(digits, weights, target, above, buckets)
        key |= digit << shift
        if shift:
            weights = torch.where((keys >> shift) == (key >> shift)[:, None], weights, 0.0)
    return Threshold(key, above)


def keep_prefix(keys: Tensor, border: Threshold, ties: Tensor) -> Tensor:
    """Return [n, vocab] bool: keys above the boundary, and by id the first `ties` ([n]) on it."""
    on_border = keys == border.key[:, None]
    return (keys > border.key[:, None]) | (on_border & (on_border.cumsum(dim=-1) <= ties[:, None]))


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> list[Words]:
    """Philox4x32-10 (Salmon et al. 2011), elementwise on arrays of 32-bit words in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for index in range(_ROUNDS):
        if index:
            k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
    return [c0, c1, c2, c3]


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 random bits, each a pure function of seed and position.

    So a token depends neither on the rest of the batch, nor on preemptions, nor on which process
    continues its sequence.

    Args:
        seeds: any shape; 64-bit seeds.
        positions: broadcasts with `seeds`; number of earlier output tokens.
    """
    counter = positions.astype(np.uint64)
    zero = np.zeros_like(counter)
    low, high, _, _ = philox4x32(
        (counter & _LOW, counter >> _HALF, zero, zero), (seeds & _LOW, seeds >> _HALF)
    )
    bits = ((low >> np.uint64(5)) << np.uint64(26)) | (high >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


#: Number of largest logits with which rows without a small top_k are tried, first and second.
CANDIDATES = 64
MORE_CANDIDATES = 2048


@dataclass(slots=True)
class FilterParams:
    """Settings of n rows, on the logits' device.

    Attributes:
        temperature: [n, 1] float32, positive.
        top_k: [n] int64 in [1, vocab].
        top_p: [n] float64 in (0, 1].
        min_p: [n] float64 in [0, 1].
        width: number of largest logits to try first; more than any top_k, or CANDIDATES.
        needs_mass: whether a row's total probability mass is needed: top_p without a small top_k.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    width: int
    needs_mass: bool

    def select(self, rows: Tensor) -> FilterParams:
        """Return the settings of some rows ([m] int64)."""
        return FilterParams(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.width,
            self.needs_mass,
        )


def sample_filtered(logits: Tensor, filters: FilterParams, uniform: Tensor) -> Tensor:
    """Sample tokens with filters.

    Args:
        logits: [n, vocab] float32, before temperature.
        uniform: [n] float64 in [0, 1).

    Returns:
        [n] int64; `INVALID_TOKEN` for rows whose largest logit isn't finite.
    """
    width = min(filters.width, logits.shape[-1])
    values, ids = logits.topk(width, dim=-1)
    healthy = torch.isfinite(values[:, 0])
    if not bool(healthy.all()):
        rows = healthy.nonzero().squeeze(-1)
        tokens = torch.full_like(ids[:, 0], INVALID_TOKEN)
        if len(rows):
            tokens[rows] = sample_filtered(logits[rows], filters.select(rows), uniform[rows])
        return tokens
    tokens, settled = _from_candidates(logits, values, ids, filters, uniform)
    if not bool(settled.all()):
        rows = (~settled).nonzero().squeeze(-1)
        tokens[rows] = _sample_full_rows(logits[rows], filters.select(rows), uniform[rows])
    return tokens


def _sample_full_rows(logits: Tensor, filters: FilterParams, uniform: Tensor) -> Tensor:
    """Sample tokens for rows for which the first candidates didn't suffice."""
    vocab = logits.shape[-1]
    if filters.width < MORE_CANDIDATES < vocab // 2:
        wider = replace(filters, width=MORE_CANDIDATES)
        return sample_filtered(logits, wider, uniform)
    rows = torch.arange(len(logits), device=logits.device).split(rows_at_once(vocab))
    return torch.cat(
        [_from_whole_rows(logits[chunk], filters.select(chunk), uniform[chunk]) for chunk in rows]
    )


def _total_weight(logits: Tensor, filters: FilterParams, best: Tensor) -> Tensor:
    """Return [n] float64: sum of exp((logit - largest) / temperature) over complete rows."""
    probabilities = torch.softmax(logits / filters.temperature, dim=-1)
    return probabilities.gather(1, best[:, None]).squeeze(-1).double().reciprocal()


def _from_candidates(
    logits: Tensor, values: Tensor, ids: Tensor, filters: FilterParams, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample tokens from the largest logits; return [n] ids, and [n] whether these suffice."""
    width, vocab = values.shape[-1], logits.shape[-1]
    weights = ((values - values[:, :1]).double() / filters.temperature.double()).exp()
    order = torch.arange(width, device=logits.device)
    alive = (order < filters.top_k[:, None]) & (weights >= filters.min_p[:, None])
    weights = weights * alive
    complete = (alive.sum(dim=-1) < width) | (width == vocab)
    mass = weights.sum(dim=-1)
    if filters.needs_mass:
        mass = torch.where(complete, mass, _total_weight(logits, filters, ids[:, 0]))
    previous_sum = weights.cumsum(dim=-1) - weights
    inside = alive & (
        (previous_sum < (filters.top_p * mass)[:, None]) | (filters.top_p >= 1.0)[:, None]
    )
    inside[:, 0] = True
    count = inside.sum(dim=-1)
    last = values.gather(1, (count - 1)[:, None]).squeeze(-1)
    after = values.gather(1, count.clamp(max=width - 1)[:, None]).squeeze(-1)
    cut = (count < width) & (last == after)  # equal logits on both sides of the boundary
    leaks = cut & (last == values[:, -1]) & (width < vocab)
    # The mass that min-p and a large top-k leave beyond the candidates is unknown here.
    unknown = ~complete & ((filters.min_p > 0) | (filters.top_k < vocab))
    settled = ((count < width) | (width == vocab)) & ~leaks & ~unknown
    if bool((cut & settled).any()):
        ids = _ties_by_id(values, ids)
    sorted_ids, order = torch.where(inside, ids, vocab).sort(dim=-1)
    choice = sample_candidates((weights * inside).gather(1, order), uniform)
    return sorted_ids.gather(1, choice[:, None]).squeeze(-1), settled


def _ties_by_id(values: Tensor, ids: Tensor) -> Tensor:
    """Return `ids` with those of equal values ascending; `values` are in descending order."""
    by_id, order = ids.sort(dim=-1)
    ranked = values.gather(1, order).sort(dim=-1, descending=True, stable=True).indices
    return by_id.gather(1, ranked)


def _from_whole_rows(logits: Tensor, filters: FilterParams, uniform: Tensor) -> Tensor:
    """Sample tokens from all logits, for rows for which no candidates suffice."""
    vocab = logits.shape[-1]
    keys = ordered_keys(logits)
    weights = torch.softmax(logits / filters.temperature, dim=-1).double()
    likeliest = weights.amax(dim=-1, keepdim=True)
    mask = weights >= filters.min_p[:, None] * likeliest
    if bool((filters.top_k < vocab).any()):
        count = torch.minimum(filters.top_k, mask.sum(dim=-1)).double()
        border = find_threshold(keys, mask.double(), count)
        mask &= keep_prefix(keys, border, count - border.above)
    weights *= mask
    if bool((filters.top_p < 1.0).any()):
        target = weights.sum(dim=-1) * filters.top_p
        border = find_threshold(keys, weights, target)
        on_border = mask & (keys == border.key[:, None])
        tied_weight = torch.where(on_border, weights, 0.0).amax(dim=-1)
        ties = torch.ceil((target - border.above) / tied_weight).clamp_(min=1.0)
        ties = torch.where(filters.top_p < 1.0, ties, float(vocab))
        unfiltered = (filters.top_p >= 1.0)[:, None] & mask
        weights *= keep_prefix(keys, border, ties) | unfiltered
    return sample_inverse_cdf(weights.float(), uniform)
