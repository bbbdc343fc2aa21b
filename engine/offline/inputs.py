"""Offline prompts in the forms that `LLM.generate` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.contract.lora import AdapterRef
from engine.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text. `cache_salt`: only prompts with the same one share cached prefixes."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is shown with the result."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, float [num_tokens, hidden]."""

    prompt_embeds: Tensor
    cache_salt: NotRequired[str]


Prompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | dict[str, Any]
#: By vLLM's names, today's and the manual's.
PromptType = Prompt
PromptInputs = Prompt
PromptStrictInputs = Prompt
_KEYS = frozenset({"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt"})
#: What vLLM takes beside these, and why it can't be taken here.
_REFUSED = {
    "multi_modal_data": "images, audio and video aren't taken; leave multi_modal_data out",
    "multi_modal_uuids": "images, audio and video aren't taken; leave multi_modal_uuids out",
    "mm_processor_kwargs": "images, audio and video aren't taken; leave mm_processor_kwargs out",
    "encoder_prompt": "encoder-decoder models aren't run",
    "decoder_prompt": "encoder-decoder models aren't run",
    "negative_prompt": "there is no negative_prompt",
    "token_type_ids": "token types come from the model; leave token_type_ids out",
}


class TokenPrompt(NamedTuple):
    """A prompt's text, if it had one, and its token ids.

    `embeds`: what stands in for the ids' embeddings, float [num_tokens, hidden]; the ids mean
    nothing then. `cache_salt`: only prompts with the same one share cached prefixes. `adapter`:
    what it goes through; None: the model alone.
    """

    text: str | None
    token_ids: list[int]
    embeds: Tensor | None = None
    cache_salt: str = ""
    adapter: AdapterRef | None = None

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


def resolve_prompt(prompt: Prompt | None, inputs: Prompt | None) -> Prompt:
    """A prompt that may be given by its old name, `inputs`.

    Raises `TypeError` for both and for neither, as a missing argument does.
    """
    if prompt is not None and inputs is not None:
        raise TypeError("prompt and inputs are the same: give one of them.")
    found = inputs if prompt is None else prompt
    if found is None:
        raise TypeError("missing 1 required argument: 'prompt'")
    return found


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> TokenPrompt:
    """Token ids of a prompt: text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or
    {"prompt_embeds": tensor}. With "cache_salt" beside them only prompts with the same salt share
    cached prefixes.

    Raises `InvalidRequest` for anything else, for another key, and for text without a tokenizer.
    """
    if isinstance(prompt, dict):
        return _of_dict(dict(prompt), tokenizer)
    if isinstance(prompt, list):
        return TokenPrompt(None, _checked(prompt))
    if not isinstance(prompt, str):
        raise InvalidRequest(
            f"A prompt is a text, token ids or a dict, not {type(prompt).__name__}.", param="prompt"
        )
    if tokenizer is None:
        raise InvalidRequest("With skip_tokenizer_init prompts must be token ids.", param="prompt")
    return TokenPrompt(prompt, tokenizer.encode(prompt))


def _of_dict(prompt: dict[str, Any], tokenizer: Tokenizer | None) -> TokenPrompt:
    for key, value in prompt.items():
        if key not in _KEYS and value not in (None, {}):
            why = _REFUSED.get(key, f"there is no {key!r}; there are {', '.join(sorted(_KEYS))}")
            raise InvalidRequest(f"A prompt's key can't be used: {why}.", param=key)
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequest("cache_salt must be a text that isn't empty.", param="cache_salt")
    if "prompt_embeds" in prompt:
        found = _of_embeds(prompt["prompt_embeds"])
    elif "prompt_token_ids" in prompt:
        found = TokenPrompt(prompt.get("prompt"), _checked(prompt["prompt_token_ids"]))
    elif isinstance(prompt.get("prompt"), str | list):
        found = tokenize_prompt(prompt["prompt"], tokenizer)
    else:
        raise InvalidRequest(
            "A prompt dict needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'.",
            param="prompt",
        )
    return found._replace(cache_salt=salt or "")


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
