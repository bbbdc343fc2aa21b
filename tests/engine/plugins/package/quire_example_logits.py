"""A plug-in that needs torch, which gateways don't load: a module of its own."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine import AdapterLogitsProcessor, RequestLogitsProcessor, SamplingParams


class Only(AdapterLogitsProcessor):
    """A logits processor: a request whose `vllm_xargs` are {"example_only": [...]} gets these
    tokens alone.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Token ids, or nothing at all."""
        token_ids = (sampling_params.extra_args or {}).get("example_only", [0])
        if (
            not isinstance(token_ids, list)
            or not token_ids
            or not all(type(token_id) is int for token_id in token_ids)
        ):
            raise ValueError("example_only must be a list of token ids.")

    def is_argmax_invariant(self) -> bool:
        """It may forbid the likeliest token."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """A function for those who ask for it."""
        allowed = (params.extra_args or {}).get("example_only")
        return None if allowed is None else partial(leave, allowed)


def leave(allowed: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
    """Forbid all other tokens."""
    masked = logits.new_full(logits.shape, float("-inf"))
    masked[allowed] = logits[allowed]
    return masked
