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
        given = (sampling_params.extra_args or {}).get("example_only", [0])
        if not isinstance(given, list) or not given or not all(type(each) is int for each in given):
            raise ValueError("example_only must be a list of token ids.")

    def is_argmax_invariant(self) -> bool:
        """It may forbid the likeliest token."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """A function for those who ask for it."""
        wanted = (params.extra_args or {}).get("example_only")
        return None if wanted is None else partial(leave, wanted)


def leave(wanted: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
    """Forbid all other tokens."""
    left = logits.new_full(logits.shape, float("-inf"))
    left[wanted] = logits[wanted]
    return left
