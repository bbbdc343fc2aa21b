"""The sampler's meaning, written plainly in float64 for one sequence."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from engine.contract.sampling_params import SamplingParams
from engine.sampling.uniforms import uniforms


def constrained(logits, params: SamplingParams, prompt, output, eos=()) -> np.ndarray:
    """Logits after all that greedy sequences see too."""
    x = np.asarray(logits, dtype=np.float64).copy()
    if params.allowed_token_ids is not None:
        mask = np.ones(len(x), bool)
        mask[params.allowed_token_ids] = False
        x[mask] = -math.inf
    for word in params.bad_words_token_ids or ():
        prefix = list(word[:-1])
        if not prefix or list(output[-len(prefix) :]) == prefix:
            x[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        ends = list(params.stop_token_ids or ()) + ([] if params.ignore_eos else list(eos))
        x[ends] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    times = Counter(output)
    for token in set(prompt) | set(output):
        repetition = params.repetition_penalty
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in times.items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def order(logits: np.ndarray) -> list[int]:
    """Tokens by logit downwards, ties by id."""
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def distribution(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, float]:
    """Probabilities after temperature and filters, and how near top-p's border came to a choice."""
    scaled = (logits - logits.max()) / params.temperature
    weights = np.exp(scaled)
    ranked = order(logits)
    ranked = [token for token in ranked if weights[token] >= params.min_p * weights.max()]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    margin = math.inf
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights[ranked]) / weights[ranked].sum()
        margin = np.abs(cumulative - params.top_p).min()
        ranked = ranked[: int(np.searchsorted(cumulative, params.top_p)) + 1]
    retained_tensor = np.zeros_like(weights)
    retained_tensor[ranked] = weights[ranked]
    min_p_margin = np.abs(weights / weights.max() - params.min_p).min() if params.min_p else 1.0
    return retained_tensor / retained_tensor.sum(), min(margin, min_p_margin)


def choose(logits, params, prompt, output, seed, eos=()) -> tuple[int, float]:
    """The token, and how near (in probability) the choice came to another."""
    x = constrained(logits, params, prompt, output, eos)
    if params.greedy:
        best = np.sort(x)[::-1]
        return int(np.argmax(x)), float(best[0] - best[1])
    probabilities, margin = distribution(x, params)
    cumulative = np.cumsum(probabilities)
    number = float(uniforms(np.array([seed], np.uint64), np.array([len(output)]))[0])
    positive = np.flatnonzero(probabilities)
    token = int(
        positive[min(np.searchsorted(cumulative[positive], number, "right"), len(positive) - 1)]
    )
    return token, min(margin, float(np.abs(cumulative[positive][:-1] - number).min(initial=1.0)))
