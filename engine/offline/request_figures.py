"""Histograms of requests that this process answers; of served ones, gateways have them."""

from __future__ import annotations

from engine.contract.histograms import (
    INTER_TOKEN_LATENCY,
    REQUEST_LATENCY,
    REQUEST_TOKENS,
    TIME_TO_FIRST_TOKEN,
    Histogram,
    empty,
)

BUCKETS = {
    "time_to_first_token_seconds": TIME_TO_FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN_LATENCY,
    "request_time_per_output_token_seconds": INTER_TOKEN_LATENCY,
    "e2e_request_latency_seconds": REQUEST_LATENCY,
    "request_prompt_tokens": REQUEST_TOKENS,
    "request_generation_tokens": REQUEST_TOKENS,
}


class RequestFigures:
    """Counts what requests come to; times are seconds since the epoch."""

    def __init__(self) -> None:
        self.by_name: dict[str, Histogram] = {name: empty(each) for name, each in BUCKETS.items()}

    def token(self, arrival: float, last: float | None, now: float) -> None:
        """A request's first output got something. `last`: when it did before; None: never."""
        if last is None:
            self._observe("time_to_first_token_seconds", now - arrival)
        else:
            self._observe("inter_token_latency_seconds", now - last)

    def end(
        self, arrival: float, tokens_from: float, now: float, num_prompt: int, num_new: int
    ) -> None:
        """A request has ended. `tokens_from`: when its first token came."""
        self._observe("e2e_request_latency_seconds", now - arrival)
        self._observe("request_prompt_tokens", num_prompt)
        self._observe("request_generation_tokens", num_new)
        if num_new > 1:
            each = (now - tokens_from) / (num_new - 1)
            self._observe("request_time_per_output_token_seconds", each)

    def _observe(self, name: str, value: float) -> None:
        self.by_name[name].observe(BUCKETS[name], max(0.0, value))
