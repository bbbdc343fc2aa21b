"""What a sequence wishes of its logits, as the kernels of a decode step take it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.sampling.constraints import held_ends
from engine.sampling.penalties import is_penalised
from engine.sampling.state import SequenceSampling
from engine.sampling.token_mask import pack
from kernels.steps import RowEdits

#: Of a sequence that wishes nothing.
UNTOUCHED = RowEdits()


def edits_of(state: SequenceSampling, eos_token_ids: Sequence[int], vocab_size: int) -> RowEdits:
    """As `Constraints`, `Penalties` and `RawLogprobs` have them; they give the same bits."""
    params = state.params
    if _is_untouched(state):
        return UNTOUCHED

    def known(tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if 0 <= token < vocab_size]

    bias, words = params.logit_bias or {}, params.bad_words_token_ids or []
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = torch.from_numpy(pack([params.allowed_token_ids], vocab_size)[0])
    return RowEdits(
        allowed=allowed,
        forbidden=known(word[0] for word in words if len(word) == 1),
        words=[word for word in words if len(word) > 1 and len(known(word)) == len(word)],
        ends=known(held_ends(state, eos_token_ids)),
        min_tokens=params.min_tokens,
        bias={token: float(bias[token]) for token in known(bias)},
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        counts_prompt=bool(state.prompt_token_ids),
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
    )


def _is_untouched(state: SequenceSampling) -> bool:
    params = state.params
    return not (
        params.logprobs is not None
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.logit_bias
        or params.min_tokens
        or is_penalised(state)
    )
