"""Rates, which are reported only if the measured time is long enough to be meaningful."""

from __future__ import annotations

#: A short answer's tokens may arrive in one message: the time between them means nothing then.
MIN_MEASURED_S = 0.1


def decode_tokens_per_s(num_tokens: int, decode_s: float) -> float | None:
    """Output tokens per second after the first token.

    Args:
        num_tokens: of the whole output. decode_s: seconds from its first token to its last.

    Returns: None for fewer than two tokens, or if `decode_s` is below `MIN_MEASURED_S`.
    """
    if num_tokens < 2 or decode_s < MIN_MEASURED_S:
        return None
    return (num_tokens - 1) / decode_s
