"""Offline prompts in the forms that `LLM.generate` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer

Prompt = str | dict[str, Any] | list[int]


class TokenPrompt(NamedTuple):
    """A prompt's text, if it had one, and its token ids.

    `embeds`: what stands in for the ids' embeddings, float [num_tokens, hidden]; the ids mean
    nothing then.
    """

    text: str | None
    token_ids: list[int]
    embeds: Tensor | None = None

    def last(self, count: int | None) -> TokenPrompt:
        """Its last tokens; all of them for None."""
        if count is None:
            return self
        embeds = None if self.embeds is None else self.embeds[-count:]
        return self._replace(token_ids=self.token_ids[-count:], embeds=embeds)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. A list of ints is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    entries: list[Any] = list(prompts)
    if entries and all(type(entry) is int for entry in entries):
        return [entries]
    return entries


def tokenise(prompt: Prompt, tokenizer: Tokenizer | None) -> TokenPrompt:
    """Token ids of a prompt: text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or
    {"prompt_embeds": tensor}.

    Raises `InvalidRequest` for anything else, and for text without a tokenizer.
    """
    if isinstance(prompt, dict):
        if "prompt_embeds" in prompt:
            return _of_embeds(prompt["prompt_embeds"])
        if "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
            return TokenPrompt(prompt.get("prompt"), _checked(ids))
        if "prompt" not in prompt:
            raise InvalidRequest(
                "A prompt dict needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'.",
                param="prompt",
            )
        prompt = prompt["prompt"]
    if isinstance(prompt, list):
        return TokenPrompt(None, _checked(prompt))
    if not isinstance(prompt, str):
        raise InvalidRequest(
            f"A prompt is a text, token ids or a dict, not {type(prompt).__name__}.", param="prompt"
        )
    if tokenizer is None:
        raise InvalidRequest("With skip_tokenizer_init prompts must be token ids.", param="prompt")
    return TokenPrompt(prompt, tokenizer.encode(prompt))


def _of_embeds(embeds: Any) -> TokenPrompt:
    """[num_tokens, hidden], or with a first dimension of 1."""
    if not isinstance(embeds, Tensor):
        raise InvalidRequest("prompt_embeds must be a tensor.", param="prompt_embeds")
    if embeds.dim() == 3 and len(embeds) == 1:
        embeds = embeds[0]
    if embeds.dim() != 2 or not embeds.is_floating_point():
        raise InvalidRequest(
            f"prompt_embeds must be floats of [num_tokens, hidden], got {embeds.dtype} "
            f"{list(embeds.shape)}.",
            param="prompt_embeds",
        )
    return TokenPrompt(None, [0] * len(embeds), embeds.detach())


def _checked(ids: Any) -> list[int]:
    if not isinstance(ids, list | tuple) or any(type(token) is not int for token in ids):
        raise InvalidRequest("prompt_token_ids must be a list of integers.", param="prompt")
    return list(ids)
