"""Prompts to token ids: chats, texts and ready-made ids, with every bound checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contract.errors import ContextLengthExceeded, InvalidRequest
from engine.contract.protocol import ModelInfo
from engine.contract.sampling_params import check_context
from engine.contract.token_lists import untracked
from engine.text import Tokenizer, render_chat
from engine.text.jinja_limits import RenderLimits, TemplateLimit
from inference.rendering.pool import beside, render_pool
from inference.settings import gateway_settings

#: No vocabulary has longer pieces in characters: a longer text than this many a token of context
#: can't fit, and isn't tokenised at all.
MAX_PIECE_CHARS = 512
#: What a template may take on the event loop; a few milliseconds.
INLINE_LIMITS = RenderLimits(steps=5_000, seconds=0.02)
#: What a value costs a template besides its characters.
_EACH = 8


async def chat_token_ids(
    tokenizer: Tokenizer, model: ModelInfo, messages: Sequence[dict[str, Any]], **options: Any
) -> list[int]:
    """Token ids of a chat. Options are `engine.text.render_chat`'s.

    Raises:
        InvalidRequest, ContextLengthExceeded: what the chat template or the tokeniser refuses.
    """
    told = (messages, options.get("tools"), options.get("documents"))
    chars = await beside(_chars, told)
    refuse_endless(chars, model, "messages")
    settings = gateway_settings()
    options["content_format"] = settings.chat_template_content_format
    token_ids: list[int] | None = None
    if chars <= settings.inline_render_chars and options.get("chat_template") is None:
        try:
            token_ids = render_chat(tokenizer, messages, limits=INLINE_LIMITS, **options)
        except TemplateLimit:
            token_ids = None  # a template that takes its time does so in a thread
    if token_ids is None:
        limit_s = settings.render_timeout_s
        options["limits"] = RenderLimits(seconds=limit_s)
        token_ids = await render_pool().run_in_thread(
            limit_s, render_chat, tokenizer, messages, **options
        )
    if not token_ids:
        raise InvalidRequest("The messages render to an empty prompt.", param="messages")
    return token_ids


async def text_token_ids(
    tokenizer: Tokenizer,
    model: ModelInfo,
    texts: Sequence[str],
    *,
    add_special_tokens: bool = True,
    most: int | None = None,
) -> list[list[int]]:
    """Token ids of plain prompts, in their order. `most`: as of `Tokenizer.encode`.

    Raises:
        InvalidRequest, ContextLengthExceeded: an empty one, or one too long to fit in any case.
    """
    for text in texts:
        if not text:
            raise InvalidRequest("prompt must not be empty.", param="prompt")
        refuse_endless(len(text), model, "prompt")

    def encode_all() -> list[list[int]]:
        return [
            untracked(tokenizer.encode(text, add_special_tokens=add_special_tokens, most=most))
            for text in texts
        ]

    found = await render_pool().run(_chars(texts), encode_all)
    if not all(found):
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    return found


def checked_token_ids(token_ids: Sequence[Any], model: ModelInfo, vocab_size: int) -> list[int]:
    """A client's own token ids. Raises `InvalidRequest` for none, or one out of the vocabulary."""
    check_context(len(token_ids), None, model.max_model_len)  # before each of them is looked at
    check_vocabulary(token_ids, vocab_size)
    return list(token_ids)


def check_vocabulary(token_ids: Sequence[Any], vocab_size: int) -> None:
    """Raise `InvalidRequest` for no ids at all, or one that isn't in the vocabulary."""
    if not token_ids:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    for token in token_ids:
        if type(token) is not int:
            raise InvalidRequest(f"prompt holds {token!r}, which isn't a token id.", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequest(
            f"prompt holds token {wrong}, but the vocabulary has {vocab_size} entries.",
            param="prompt",
        )


def truncated(token_ids: list[int], limit: int | None, side: str | None = None) -> list[int]:
    """The last `limit` tokens (`truncate_prompt_tokens`); all without a limit.

    `side`: where tokens are cut off; at the "right" the first ones stay.
    """
    if limit is None or len(token_ids) <= limit:
        return token_ids
    return token_ids[:limit] if side == "right" else token_ids[-limit:]


def refuse_endless(chars: int, model: ModelInfo, param: str) -> None:
    """Raise `ContextLengthExceeded` for more characters than any vocabulary could fit."""
    if chars > model.max_model_len * MAX_PIECE_CHARS:
        raise ContextLengthExceeded(
            f"The prompt has {chars} characters, which can't fit the model's context of "
            f"{model.max_model_len} tokens.",
            param=param,
        )


def _chars(value: Any) -> int:
    """About how much there is to render: characters of all strings, and a little for each value."""
    if isinstance(value, str):
        return len(value) + _EACH
    if isinstance(value, dict):
        return sum(map(_chars, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_chars, value))
    return _EACH
