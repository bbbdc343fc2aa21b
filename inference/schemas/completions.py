"""The body of `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from django.conf import settings
from pydantic import Field, model_validator

from engine.contract.errors import InvalidRequest
from inference.errors import UnsupportedField
from inference.schemas.base import UNSUPPORTED, RejectedRequest
from inference.schemas.sampling import SamplingFields

DEFAULT_MAX_TOKENS = 16
#: Maximum number of prompts times `n` in one request.
MAX_CHOICES = 2048
#: Fields of chats that completions don't support.
CHAT_ONLY_FIELDS = (
    "chat_template",
    "chat_template_kwargs",
    "messages",
    "tools",
    "tool_choice",
)

#: Fields that require a prompt's token ids.
TOKEN_PROMPT_ONLY_FIELDS = ("echo", "suffix", "truncate_prompt_tokens")

Prompt = str | list[int]


class CompletionRequest(SamplingFields):
    """Prompts to complete. `prompts` is what `prompt` was, as a list."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "store": (False,),
    }

    prompt: Any = Field(default=None, description="Text or token ids that the output continues.")
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    logprobs: int | None = Field(
        default=None, description="Number of log probabilities for each output token."
    )
    echo: bool | None = False
    suffix: str | None = None
    add_special_tokens: bool | None = True
    prompt_embeds: str | list[str] | None = None
    forced_bos_token_id: int | None = Field(
        default=None,
        ge=0,
        description="First token of outputs of an encoder and decoder, after the start token, such "
        "as the language that NLLB translates to.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self._embeds = self._split_embeds()
            # OpenAI's SDK always sends `prompt`.
            nothing = bool(self._embeds) and self.prompt in (None, "", [])
            self._prompts = [] if nothing else split_prompts(self.prompt)
            self._check_fields()
        except InvalidRequest as error:
            raise RejectedRequest(error) from None
        return self

    def _check_fields(self) -> None:
        if self.suffix:
            self._check_suffix()
        for name in CHAT_ONLY_FIELDS:
            if (self.model_extra or {}).get(name) is not None:
                raise UnsupportedField(f"A completion has no '{name}'.", param=name)
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequest("best_of over n can't be streamed.", param="best_of")
        name = "best_of" if (self.best_of or 1) > (self.n or 1) else "n"
        choices = (len(self._embeds) + len(self._prompts)) * (getattr(self, name) or 1)
        if choices > MAX_CHOICES:
            raise InvalidRequest(
                f"A request may ask for at most {MAX_CHOICES} outputs, over all its prompts.",
                param=name,
            )

    def _split_embeds(self) -> list[str]:
        """Return `prompt_embeds` as a list. Raises `InvalidRequest` for incompatible fields."""
        value = self.prompt_embeds
        embeds = [value] if isinstance(value, str) else value or []
        limit = settings.QUIRE.max_prompts
        if len(embeds) > limit:
            raise InvalidRequest(
                f"prompt_embeds hold {len(embeds)} prompts; at most {limit} may be sent at once.",
                param="prompt_embeds",
            )
        for name in TOKEN_PROMPT_ONLY_FIELDS if embeds else ():
            if getattr(self, name):
                raise InvalidRequest(
                    f"prompt_embeds and {name} can't be used together.", param=name
                )
        return embeds

    def _check_suffix(self) -> None:
        if not isinstance(self._prompts[0], str):
            raise InvalidRequest("suffix needs a prompt that is text.", param="suffix")
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self, name):
                raise InvalidRequest(f"suffix and {name} can't be used together.", param=name)

    _prompts: list[Prompt] = []
    _embeds: list[str] = []

    @property
    def embeds(self) -> list[str]:
        """Prompts as embeddings, each a base64-encoded file, unchecked. They precede `prompts`."""
        return self._embeds

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or a list of (unchecked) token ids."""
        return self._prompts

    @property
    def is_scoring_request(self) -> bool:
        """Whether only the prompt's log probabilities are requested: `echo`, `max_tokens` 0."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def output_limit(self) -> int | None:
        """Maximum number of output tokens; at least one, since the engine always generates one."""
        return 1 if self.is_scoring_request else self.max_tokens


def split_prompts(prompt: Any) -> list[Prompt]:
    """Convert a text, texts, token ids or lists of token ids to a list of prompts.

    Raises:
        InvalidRequest: any other type, no prompt, or too many.
    """
    if prompt is None:
        raise InvalidRequest(
            "Missing required parameter: 'prompt'.",
            param="prompt",
            code="missing_required_parameter",
        )
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _type_error()
    if not prompt:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    if not isinstance(prompt[0], str | list):
        return [prompt]
    limit = settings.QUIRE.max_prompts
    if len(prompt) > limit:
        raise InvalidRequest(
            f"prompt holds {len(prompt)} prompts; at most {limit} may be sent at once.",
            param="prompt",
        )
    kind = type(prompt[0])
    if not all(type(item) is kind for item in prompt):
        raise _type_error()
    return prompt


def _type_error() -> InvalidRequest:
    return InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists.",
        param="prompt",
        code="invalid_type",
    )
