"""`WhisperTimestamps`: Whisper's rules for timestamp tokens, as in OpenAI's decoder.

Requests enable them with `extra_args={"whisper_timestamps": {...}}`, see `TimestampRules`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.contract.sampling_params import SamplingParams
from engine.sampling.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

ARGUMENT = "whisper_timestamps"


class TimestampRules(msgspec.Struct, forbid_unknown_fields=True):
    """Token ids of timestamps, and the latest first timestamp.

    Attributes:
        first: token of 0 s; those of later times follow, 20 ms apart.
        end: end of text. no_timestamps: never allowed.
        max_initial: maximum offset of the first timestamp's token from `first`.
    """

    first: int
    end: int
    no_timestamps: int
    max_initial: int = 50

    def apply(self, output: list[int], logits: Tensor) -> Tensor:
        """Return the logits [vocab] of a row's next token, after the tokens `output`."""
        never = -torch.inf
        logits[self.no_timestamps] = never
        first = self.first
        ends_in_time = bool(output) and output[-1] >= first
        closes_pair = ends_in_time and (len(output) < 2 or output[-2] >= first)
        if closes_pair:
            logits[first:] = never
        elif ends_in_time:
            logits[: self.end] = never
        if times := [token for token in output if token >= first]:
            # Timestamps never decrease, and segments aren't empty; a new one may begin at the end
            # of the previous one.
            may_repeat = ends_in_time and not closes_pair
            logits[first : times[-1] + (0 if may_repeat else 1)] = never
        if not output:
            logits[:first] = never
            logits[first + self.max_initial + 1 :] = never
        scores = torch.log_softmax(logits.float(), dim=-1)
        if torch.logsumexp(scores[first:], dim=-1) > scores[:first].max():
            logits[:first] = never
        return logits


def _rules_of(params: SamplingParams) -> TimestampRules | None:
    """Return a request's rules. Raises `ValueError` for invalid ones."""
    argument = (params.extra_args or {}).get(ARGUMENT)
    if argument is None:
        return None
    try:
        rules = msgspec.convert(argument, TimestampRules)
    except msgspec.ValidationError as error:
        raise ValueError(f"{ARGUMENT}: {error}") from error
    if min(rules.first, rules.end, rules.no_timestamps, rules.max_initial) < 0:
        raise ValueError(f"{ARGUMENT} must hold numbers of at least 0.")
    return rules


class WhisperTimestamps(AdapterLogitsProcessor):
    """Applies `TimestampRules` to requests that enable them."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _rules_of(sampling_params)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._vocab_size = vllm_config.model_config.get_vocab_size()

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        rules = _rules_of(params)
        if rules is None or max(rules.first, rules.end, rules.no_timestamps) >= self._vocab_size:
            return None
        return rules.apply
