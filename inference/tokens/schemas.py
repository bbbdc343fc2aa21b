"""The body of `POST /inference/v1/generate`: a prompt as token ids, and how to go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from engine.contract.errors import InvalidRequest
from engine.contract.sampling_params import ThinkingParams
from inference.errors import UnsupportedField, as_quire_error
from inference.openai.schemas import CompletionRequest
from inference.openai.schemas.base import GenerateRequest, ModelName, Priority, StreamOptions
from inference.openai.schemas.sampling import SamplingFields
from inference.openai.serving import parse
from inference.web.known_fields import KnownFields

#: Fields of `sampling_params`; all are a completion's too.
SAMPLING = (
    (SamplingFields.model_fields.keys() - GenerateRequest.model_fields.keys()) | {"logprobs"}
) - {"truncate_prompt_tokens", "truncation_side"}
#: Of vLLM's `SamplingParams`, which mean nothing here.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "detokenize": (True, False),
    "output_kind": (0, 1, 2),
    "skip_clone": (True, False),
}


class TokensRequest(KnownFields):
    """One prompt. `sampling_params` are those of `SamplingParams`; all of the context without a
    `max_tokens`. `request_id` is the client's own name for the request.
    """

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "content_parts": ([],),
        "ec_transfer_params": (),
        "features": (),
        "kv_transfer_params": (),
        "parse_context": (),
        "reasoning_parser_kwargs": ({},),
        "token_offsets": ([],),
    }

    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: ModelName | None = None
    request_id: str | None = None
    return_token_ids: bool | None = False
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Priority | None = 0
    reasoning_ended: bool | None = None

    def thinking(self) -> ThinkingParams | None:
        """How reasoning is told that comes before a form, as a rendered chat says it.

        Raises `InvalidRequest`.
        """
        given = self.sampling_params.get("thinking")
        if given is None or self.reasoning_ended:
            return None
        try:
            return msgspec.convert(given, ThinkingParams)
        except msgspec.ValidationError as error:  # its own errors have ours as their cause
            cause = error.__cause__ or error
            field = getattr(cause, "param", None) or "thinking"
            raise InvalidRequest(str(cause), param=field) from None

    def completion(self) -> CompletionRequest:
        """The same as a completion. Raises `InvalidRequest`, in this endpoint's words."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self.token_ids,
            "stream": self.stream,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "max_tokens": None,
        }
        if self.stream_options is not None:
            body["stream_options"] = self.stream_options.model_dump(exclude_unset=True)
        try:
            return parse(CompletionRequest, body | self._sampling())
        except ValueError as error:  # pydantic's, in a completion's words
            told = as_quire_error(error)
            if isinstance(told, InvalidRequest):
                raise in_our_words(told) from None
            raise
        except InvalidRequest as error:
            raise in_our_words(error) from None

    def _sampling(self) -> dict[str, Any]:
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        if given.get("detokenize") is False and (self.output_mode == "text" or given.get("stop")):
            what = "output_mode 'text'" if self.output_mode == "text" else "stop"
            raise InvalidRequest(f"{what} needs detokenize.", param="sampling_params.detokenize")
        for name, value in given.items():
            if name not in SAMPLING | {"thinking"} and value not in NEUTRAL.get(name, ()):
                path = f"sampling_params.{name[:100]}"
                raise UnsupportedField(f"'{path}' is not supported.", param=path)
        return {name: value for name, value in given.items() if name in SAMPLING}


def in_our_words(error: InvalidRequest) -> InvalidRequest:
    """A completion's error with the field as this endpoint calls it."""
    param = error.param or ""
    head = param.split(".")[0].split("[")[0]
    if head in SAMPLING or head == "thinking":
        error.param = f"sampling_params.{param}"
    elif head == "prompt":
        error.param = f"token_ids{param[len(head) :]}"
    return error
