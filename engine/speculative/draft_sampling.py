"""How drafts are drawn: as the target draws, as far as a draft can."""

from __future__ import annotations

from engine.contract.sampling_params import SamplingParams


def draft_sampling(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """What of the target's choice a draft follows: all but grammars and the caller's functions, of
    which drafts are told apart afterwards.

    `vocab_size`: of the drafts; other tokens are left out.
    """
    bias = {
        token: value for token, value in (params.logit_bias or {}).items() if token < vocab_size
    }
    allowed = [token for token in params.allowed_token_ids or () if token < vocab_size]
    bad = [words for words in params.bad_words_token_ids or () if max(words) < vocab_size]
    ends = [token for token in params.stop_token_ids or () if token < vocab_size]
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=bias or None,
        allowed_token_ids=allowed or None,
        bad_words_token_ids=bad or None,
        min_tokens=params.min_tokens,
        stop_token_ids=ends or None,
        ignore_eos=params.ignore_eos,
        max_tokens=None,
    )
