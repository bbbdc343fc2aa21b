"""`SamplingParams`: how to choose tokens. Torch-free; the same struct offline and on the wire.

Names and defaults are vLLM's. Every bad value is refused with the field's name before anything is
allocated; the checks are in `engine.contract.sampling_checks`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.contract.checks import token_ids
from engine.contract.output_kind import RequestOutputKind
from engine.contract.repetition import RepetitionDetectionParams
from engine.contract.sampling_checks import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_SEED,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    check_against_model,
    check_context,
    check_tokens,
    check_values,
)
from engine.contract.sampling_fields import GREEDY_EPS, SamplingFields
from engine.contract.thinking import ThinkingParams

__all__ = [
    "GREEDY_EPS",
    "MAX_LOGIT_BIAS",
    "MAX_N",
    "MAX_STOP",
    "MAX_STOP_CHARS",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "ThinkingParams",
    "check_context",
]


class SamplingParams(SamplingFields, omit_defaults=True, forbid_unknown_fields=True):
    """How to choose the tokens of a request: see `SamplingFields`, whose values are checked here.

    Raises:
        InvalidRequest: with `param` the field's name.
    """

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        check_values(self)
        if self.logprob_token_ids is not None:
            self.logprobs = len(self.logprob_token_ids)
        if self.top_k == 0:
            self.top_k = -1
        if self.seed is not None and self.seed < 0:
            self.seed = None if self.seed == -1 else self.seed & MAX_SEED

    def check_against_model(
        self,
        *,
        vocab_size: int | None,
        num_prompt_tokens: int,
        max_model_len: int,
        max_logprobs: int,
    ) -> None:
        """Raise `InvalidRequest` for what only shows beside a model's vocabulary and context.

        `vocab_size`: None where an adapter may bring tokens: see `check_tokens`.
        """
        check_against_model(
            self,
            vocab_size=vocab_size,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=max_model_len,
            max_logprobs=max_logprobs,
        )

    def check_tokens(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` for token ids that a vocabulary hasn't."""
        check_tokens(self, vocab_size)

    def update_from_generation_config(
        self, generation_config: dict[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Make the further EOS ids of a `generation_config.json` stop token ids (not with
        `ignore_eos`). The model's own EOS ends an output anyway and isn't listed.
        """
        eos = generation_config.get("eos_token_id")
        if eos is None or self.ignore_eos:
            return
        further = [eos] if isinstance(eos, int) else list(eos)
        listed = dict.fromkeys([*(self.stop_token_ids or ()), *further])
        listed.pop(model_eos_token_id, None)
        token_ids("stop_token_ids", list(listed), MAX_STOP_TOKEN_IDS)
        self.stop_token_ids = list(listed) or None

    def clone(self) -> SamplingParams:
        """A deep copy, except that logits processors are shared."""
        processors = self.logits_processors
        copy = msgspec.convert(
            msgspec.to_builtins(msgspec.structs.replace(self, logits_processors=None)),
            SamplingParams,
            str_keys=True,
        )
        copy.logits_processors = processors
        return copy
