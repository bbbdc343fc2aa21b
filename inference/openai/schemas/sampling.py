"""Sampling fields of both endpoints, OpenAI's and vLLM's, and how they become `SamplingParams`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from engine.contract.errors import InvalidRequest
from engine.contract.sampling_params import (
    MAX_LOGIT_BIAS,
    RepetitionDetectionParams,
    SamplingParams,
)
from engine.contract.structured_outputs import StructuredOutputsParams
from inference.errors import UnsupportedField
from inference.generation.field_names import renamed
from inference.openai.schemas.base import GenerateRequest
from inference.openai.schemas.structured import StructuredFields

#: Defaults that a model's generation_config.json may bring.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _few_biases(given: Any) -> Any:
    """Before each entry is looked at."""
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIAS:
        raise ValueError(f"may hold at most {MAX_LOGIT_BIAS} entries, got {len(given)}.")
    return given


class SamplingFields(StructuredFields, GenerateRequest):
    """Ranges are `SamplingParams`' business; here are types alone. None: not given."""

    n: int | None = 1
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = False
    max_tokens: int | None = None
    min_tokens: int | None = 0
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    repetition_detection: dict[str, Any] | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few_biases)] = None
    allowed_token_ids: list[int] | None = None
    vllm_xargs: dict[str, Any] | None = None

    def sampling_params(
        self,
        defaults: dict[str, Any],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        structured_outputs: StructuredOutputsParams | None,
    ) -> SamplingParams:
        """With the model's own defaults for what the client left out.

        Raises:
            InvalidRequest: with the field's name.
        """
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs are not available when stream is true.", param="prompt_logprobs"
            )
        values: dict[str, Any] = {
            name: defaults[name]
            for name in MODEL_DEFAULTS
            if defaults.get(name) is not None and getattr(self, name) is None
        }
        for name in _PASSED_ON:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        if self.repetition_detection is not None:
            values["repetition_detection"] = _repetition_detection(self.repetition_detection)
        if self.vllm_xargs:
            values["extra_args"] = self.vllm_xargs
        if self.logit_bias:
            values["logit_bias"] = _logit_bias(self.logit_bias)
        if self.logprob_token_ids is not None:
            if logprobs is None:
                raise InvalidRequest("logprob_token_ids needs logprobs.", param="logprob_token_ids")
            # They come in place of the likeliest tokens, however many of those were asked for.
            values["logprob_token_ids"] = list(dict.fromkeys(self.logprob_token_ids))
            logprobs = None
        try:
            return SamplingParams(
                **values,
                max_tokens=max_tokens,
                logprobs=logprobs,
                structured_outputs=structured_outputs,
            )
        except InvalidRequest as error:
            raise renamed(error, {"extra_args": "vllm_xargs"}) from None


#: Fields that become others, or that only say how a prompt is cut.
_CONVERTED = (
    "max_tokens",
    "logit_bias",
    "repetition_detection",
    "logprob_token_ids",
    "truncation_side",
    "vllm_xargs",
)
#: Fields that `SamplingParams` takes under the same name.
_PASSED_ON = tuple(
    name
    for name in SamplingFields.model_fields
    if name not in GenerateRequest.model_fields
    and name not in StructuredFields.model_fields
    and name not in _CONVERTED
)


def _repetition_detection(given: dict[str, Any]) -> RepetitionDetectionParams:
    """The object's fields, by name."""
    for name in given:
        if name not in RepetitionDetectionParams.__struct_fields__:
            path = f"repetition_detection.{name[:50]}"
            raise UnsupportedField(f"'{path}' is not supported.", param=path)
    return RepetitionDetectionParams(**given)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """String keys to token ids."""
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries, got {len(given)}.",
            param="logit_bias",
        )
    wrong = [key for key in given if not (key.isascii() and key.isdigit() and len(key) <= 10)]
    if wrong:
        shown = ", ".join(repr(key[:50]) for key in wrong[:5])
        raise InvalidRequest(
            f"logit_bias has the keys {shown}, which aren't token ids."
            if len(wrong) > 1
            else f"logit_bias has the key {shown}, which isn't a token id.",
            param="logit_bias",
        )
    return {int(key): bias for key, bias in given.items()}
