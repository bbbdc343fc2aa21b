"""Offline prompts in the forms that `LLM.generate` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer

Prompt = str | dict[str, Any] | list[int]


class TokenPrompt(NamedTuple):
    """A prompt's text, if it had one, and its token ids."""

    text: str | None
    token_ids: list[int]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. A list of ints is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    entries: list[Any] = list(prompts)
    if entries and all(type(entry) is int for entry in entries):
        return [entries]
    return entries


def tokenise(prompt: Prompt, tokenizer: Tokenizer | None) -> TokenPrompt:
    """Token ids of a prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.

    Raises `InvalidRequest` for anything else, and for text without a tokenizer.
    """
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
            return TokenPrompt(prompt.get("prompt"), _checked(ids))
        if "prompt" not in prompt:
            raise InvalidRequest(
                "A prompt dict needs 'prompt' or 'prompt_token_ids'.", param="prompt"
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


def _checked(ids: Any) -> list[int]:
    if not isinstance(ids, list | tuple) or any(type(token) is not int for token in ids):
        raise InvalidRequest("prompt_token_ids must be a list of integers.", param="prompt")
    return list(ids)
