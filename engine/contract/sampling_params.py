"""`SamplingParams`: how to choose tokens. Torch-free; the same struct offline and on the wire.

Names and defaults are vLLM's. Invalid values are refused with the field's name before anything is
allocated: by `check_values` when the struct is created, and by `check_against_model` with the
vocabulary and the context.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.contract.errors import ContextLengthExceeded, InvalidRequest
from engine.contract.reasoning import ReasoningParams
from engine.contract.sampling_fields import (
    GREEDY_EPS,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingFields,
)
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.contract.validation import check_int, check_number, check_token_ids, is_valid_utf8

MAX_N = 128
MAX_STOP = 64
MAX_STOP_CHARS = 4096
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 4 * MAX_STOP_CHARS
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 65536
MAX_EXTRA_VALUES = 4096
MAX_SEED = 2**63 - 1
MAX_LENGTH_PENALTY = 10.0
_FLAGS = (
    "use_beam_search",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "flat_logprobs",
    "include_stop_str_in_output",
)
_OBJECTS = {
    "structured_outputs": StructuredOutputsParams,
    "thinking": ReasoningParams,
    "repetition_detection": RepetitionDetectionParams,
}


def check_values(params: SamplingFields) -> None:
    """Raise `InvalidRequest` for values, or combinations of values, that no model supports."""
    _check_counts(params)
    _check_numbers(params)
    _check_strings(params, "stop", MAX_STOP)
    _check_strings(params, "bad_words", MAX_BAD_WORDS)
    if params.stop and not params.detokenize:
        raise InvalidRequest("stop strings need detokenize=True.", param="stop")
    _check_output_kind(params)
    _check_token_lists(params)
    functions = params.logits_processors
    if functions is not None and not (
        isinstance(functions, list) and all(map(callable, functions))
    ):
        raise InvalidRequest(
            "logits_processors must be a list of functions.", param="logits_processors"
        )
    _check_extra_args(params.extra_args)
    for name, kind in _OBJECTS.items():
        value = getattr(params, name)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{name} must be a {kind.__name__}.", param=name)
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise InvalidRequest(f"{name} must be true or false.", param=name)
    _check_beams(params)


def check_context(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> None:
    """Raise `ContextLengthExceeded` for a prompt that fills the context, or a `max_tokens` larger
    than the whole context, naming both numbers. If only the sum is too large, `max_tokens` is a
    ceiling.
    """
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthExceeded(
            # No verb form that depends on "prompt": the gateway may replace it by "messages".
            f"There are {num_prompt_tokens} tokens in the prompt, but the model's context is "
            f"{max_model_len} tokens and at least one must be left for the output.",
            param="prompt",
        ).with_counts(num_prompt_tokens, max_model_len)
    if max_tokens is not None and max_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"max_tokens is {max_tokens}, but the model's context is {max_model_len} tokens.",
            param="max_tokens",
        )


def _check_counts(params: SamplingFields) -> None:
    check_int("n", params.n, 1, MAX_N)
    if params.best_of is not None:
        check_int("best_of", params.best_of, 1, MAX_N)
        if params.best_of < params.n:
            raise InvalidRequest(
                f"best_of ({params.best_of}) must be at least n ({params.n}).", param="best_of"
            )
    if params.max_tokens is not None:
        check_int("max_tokens", params.max_tokens, 1)
    check_int("min_tokens", params.min_tokens, 0)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens ({params.min_tokens}) must not be over max_tokens ({params.max_tokens}).",
            param="min_tokens",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(params, name)) is not None:
            check_int(name, value, 0)
    if params.truncate_prompt_tokens is not None:
        check_int("truncate_prompt_tokens", params.truncate_prompt_tokens, -1)
        if params.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 or at least 1.",
                param="truncate_prompt_tokens",
            )
    if params.seed is not None:
        check_int("seed", params.seed, -MAX_SEED - 1, MAX_SEED)
    check_int("top_k", params.top_k, -1)


def _check_numbers(params: SamplingFields) -> None:
    check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    check_number("repetition_penalty", params.repetition_penalty, 0.0, 2.0, low_open=True)
    check_number("temperature", params.temperature, 0.0, 100.0)
    check_number("top_p", params.top_p, 0.0, 1.0, low_open=True)
    check_number("min_p", params.min_p, 0.0, 1.0)


def _check_output_kind(params: SamplingFields) -> None:
    kind = params.output_kind
    if not isinstance(kind, RequestOutputKind):
        raise InvalidRequest(
            f"output_kind must be a RequestOutputKind, got {kind!r}.", param="output_kind"
        )
    chosen_at_the_end = params.use_beam_search or params.num_sequences > params.n
    if kind is RequestOutputKind.DELTA and chosen_at_the_end:
        raise InvalidRequest(
            "output_kind=DELTA doesn't go with best_of or beams, which choose at the end.",
            param="output_kind",
        )


def _check_strings(params: SamplingFields, name: str, limit: int) -> None:
    strings = getattr(params, name)
    if strings is None:
        return
    if not isinstance(strings, list) or len(strings) > limit:
        raise InvalidRequest(f"{name} must be a list of at most {limit} strings.", param=name)
    for text in strings:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"{name} must hold strings of 1 to {MAX_STOP_CHARS} characters.", param=name
            )
        if not is_valid_utf8(text):
            raise InvalidRequest(f"{name} holds a lone surrogate.", param=name)


def _check_token_lists(params: SamplingFields) -> None:
    if params.stop_token_ids is not None:
        check_token_ids("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    if params.allowed_token_ids is not None:
        check_token_ids("allowed_token_ids", params.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if not params.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty.", param="allowed_token_ids")
    _check_logprob_token_ids(params)
    if params.bad_words_token_ids is not None:
        _check_bad_word_ids(params.bad_words_token_ids)
    if params.logit_bias is not None:
        _check_logit_bias(params.logit_bias)


def _check_logprob_token_ids(params: SamplingFields) -> None:
    name, token_ids = "logprob_token_ids", params.logprob_token_ids
    if token_ids is None:
        return
    check_token_ids(name, token_ids, MAX_LOGPROB_TOKEN_IDS)
    if not token_ids or len(set(token_ids)) != len(token_ids):
        raise InvalidRequest(f"{name} must hold at least one token, and none twice.", param=name)
    if params.logprobs not in (None, len(token_ids)):
        raise InvalidRequest(
            f"logprobs ({params.logprobs}) must be the number of {name} ({len(token_ids)}).",
            param=name,
        )
    if params.use_beam_search:
        raise InvalidRequest(f"{name} can't be combined with use_beam_search.", param=name)


def _check_bad_word_ids(words: Any) -> None:
    name = "bad_words_token_ids"
    # A word given as text may have three token sequences (see engine.text.stop_strings).
    if not isinstance(words, list) or len(words) > 3 * MAX_BAD_WORDS:
        raise InvalidRequest(
            f"{name} must be a list of at most {3 * MAX_BAD_WORDS} lists.", param=name
        )
    for word in words:
        check_token_ids(name, word, MAX_BAD_WORD_TOKENS)
        if not word:
            raise InvalidRequest(f"{name} must not hold an empty list.", param=name)


def _check_logit_bias(biases: Any) -> None:
    if not isinstance(biases, dict) or len(biases) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias must be an object of at most {MAX_LOGIT_BIAS} entries.",
            param="logit_bias",
        )
    for token, bias in biases.items():
        check_int("logit_bias", token, 0)
        check_number("logit_bias", bias, -100.0, 100.0)


def _check_extra_args(extra_args: Any) -> None:
    """Check that it is plain data of bounded size, so that it can be sent to a replica."""
    name = "extra_args"
    if extra_args is None:
        return
    if not isinstance(extra_args, dict):
        raise InvalidRequest(f"{name} must be an object.", param=name)
    pending, count = [extra_args], 0
    while pending:
        value = pending.pop()
        count += 1
        if count > MAX_EXTRA_VALUES:
            raise InvalidRequest(f"{name} may hold {MAX_EXTRA_VALUES} values at most.", param=name)
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise InvalidRequest(f"{name} may hold integers in [-2**63, 2**64).", param=name)
        elif value is not None and not isinstance(value, bool | int | float | str):
            raise InvalidRequest(
                f"{name} may hold texts, numbers, lists and objects with texts as keys, got "
                f"{type(value).__name__}.",
                param=name,
            )


def _check_beams(params: SamplingFields) -> None:
    check_number("length_penalty", params.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise InvalidRequest(
            'early_stopping must be true, false or "never".', param="early_stopping"
        )
    for name in ("structured_outputs", "thinking"):
        if params.use_beam_search and getattr(params, name) is not None:
            raise InvalidRequest(f"{name} can't be combined with use_beam_search.", param=name)


class SamplingParams(SamplingFields, omit_defaults=True, forbid_unknown_fields=True):
    """How to choose the tokens of a request: see `SamplingFields`. Values are validated here.

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
        """Raise `InvalidRequest` for values that don't fit a model's vocabulary and context.

        `vocab_size`: None if an adapter may add tokens; ids are then checked once it is loaded.
        """
        check_context(num_prompt_tokens, self.max_tokens, max_model_len)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if name == "logprobs" and self.logprob_token_ids is not None:
                continue
            if value is not None and value > max_logprobs:
                raise InvalidRequest(
                    f"{name} must be at most {max_logprobs}, got {value}.", param=name
                )
        if vocab_size is not None:
            self.check_tokens(vocab_size)

    def check_tokens(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` for token ids outside of a vocabulary."""
        tokens: list[tuple[str, Any]] = [
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", self.logit_bias),
            ("logprob_token_ids", self.logprob_token_ids),
        ]
        if self.thinking is not None:
            tokens.append(("thinking", self.thinking.all_token_ids))
        tokens += [("bad_words", word) for word in self.bad_words_token_ids or ()]
        for name, ids in tokens:
            if ids and max(ids) >= vocab_size:
                raise InvalidRequest(
                    f"{name} holds token {max(ids)}, but the vocabulary has {vocab_size} entries.",
                    param=name,
                )

    def update_from_generation_config(
        self, generation_config: dict[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Add the further EOS ids of a `generation_config.json` to the stop token ids (not with
        `ignore_eos`). The model's main EOS ends an output anyway and isn't listed.
        """
        eos = generation_config.get("eos_token_id")
        if eos is None or self.ignore_eos:
            return
        further = [eos] if isinstance(eos, int) else list(eos)
        listed = dict.fromkeys([*(self.stop_token_ids or ()), *further])
        listed.pop(model_eos_token_id, None)
        check_token_ids("stop_token_ids", list(listed), MAX_STOP_TOKEN_IDS)
        self.stop_token_ids = list(listed) or None

    @classmethod
    def from_optional(cls, *, skip_clone: bool = False, **fields: Any) -> SamplingParams:
        """Build from fields of which None means the default.

        Args:
            skip_clone: no effect; engines don't change parameters.
        """
        return cls(**{name: value for name, value in fields.items() if value is not None})

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


__all__ = [
    "GREEDY_EPS",
    "MAX_LOGIT_BIAS",
    "MAX_N",
    "MAX_STOP",
    "MAX_STOP_CHARS",
    "ReasoningParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "check_context",
]
