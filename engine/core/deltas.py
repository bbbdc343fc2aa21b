"""What clients learn of a sequence in a step: its new tokens, its result, its end."""

from __future__ import annotations

from engine.contract.errors import QuireError
from engine.contract.protocol import ErrorInfo, TokenDelta, TokenLogprobs
from engine.scheduler.sequence import Sequence


def delta_of(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    *,
    first: bool,
) -> TokenDelta:
    """A sequence's new tokens (the last of its `token_ids`), and its end if it has come."""
    delta = TokenDelta(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=token_ids,
        start=len(sequence.token_ids) - sequence.num_prompt_tokens - len(token_ids),
    )
    if logprobs is not None:
        delta.logprobs = logprobs
    ended = sequence.finish_reason is not None
    if first or ended:
        delta.num_prompt_tokens = sequence.num_prompt_tokens
        delta.num_cached_tokens = sequence.num_cached_tokens
    if first:
        delta.prompt_logprobs = sequence.prompt_logprobs
    if ended:
        delta.finish_reason = sequence.finish_reason
        delta.stop_reason = sequence.stop_reason
        delta.flight = sequence.flight
    return delta


def pooled_delta(sequence: Sequence, pooled: bytes) -> TokenDelta:
    """The result and the end of a prompt that was pooled."""
    delta = delta_of(sequence, [], None, first=True)
    delta.pooled = pooled
    return delta


def error_delta(sequence: Sequence, reason: str) -> TokenDelta:
    """The end of a sequence whose step failed."""
    delta = delta_of(sequence, [], None, first=False)
    delta.error = ErrorInfo(
        message=f"The engine failed on this request: {reason}", code="engine_fault"
    )
    return delta


def refusal_delta(sequence: Sequence, error: QuireError) -> TokenDelta:
    """The end of a sequence whose request turned out to be one that can't be served."""
    delta = delta_of(sequence, [], None, first=False)
    delta.error = ErrorInfo.of(error)
    return delta
