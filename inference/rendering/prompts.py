"""Converts chats, texts and token ids to prompts, and checks every bound."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from django.conf import settings

from engine.contract.errors import ContextLengthExceeded, InvalidRequest
from engine.contract.messages import ModelInfo, gc_untracked
from engine.contract.sampling_params import check_context
from engine.text.chat_template import render_chat, render_chat_text
from engine.text.jinja_sandbox import RenderLimits, TemplateLimit
from engine.text.tokenizer import Tokenizer
from inference.errors import UnsupportedField
from inference.loop.offload import get_render_pool
from inference.parsers.custom_tools import to_function_call
from inference.schemas.chat import AUDIO_PARTS, IMAGE_PARTS, TEXT_PARTS, VIDEO_PART, part_type

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
#: A conversation with a late system message, which some templates reject.
PROBE_MESSAGES = [{"role": role, "content": "x"} for role in ("system", "user", "system", "user")]


def template_messages(messages: Sequence[Message], template: str) -> list[Message]:
    """The client's validated messages, adapted to the template.

    OpenAI's newer role "developer" becomes "system" for templates that don't know it; the legacy
    `function_call` and role "function" become tool calls and the role "tool".
    """
    knows_developer = "developer" in template
    return [_adapt_message(message, knows_developer) for message in messages]


def _adapt_message(message: Message, knows_developer: bool) -> Message:
    changes: Message = {}
    if message["role"] == "developer" and not knows_developer:
        changes["role"] = "system"
    if message["role"] == "function":
        changes |= {"role": "tool", "tool_call_id": message["name"]}
    calls = message.get("tool_calls") or _as_tool_calls(message)
    calls = [to_function_call(call) if call.get("type") == "custom" else call for call in calls]
    if calls:
        changes["tool_calls"] = calls
    content = message.get("content")
    if content is None and not calls:
        changes["content"] = ""
    elif isinstance(content, list):
        changes["content"] = [_text_part(part) for part in content]
    return {**message, **changes} if changes else message


def _as_tool_calls(message: Message) -> list[Message]:
    function = message.get("function_call")
    if function is None or message["role"] != "assistant":
        return []
    return [{"id": function["name"], "type": "function", "function": function}]


def _text_part(part: str | Message) -> str | Message:
    """A text part under the one type name that templates know."""
    if isinstance(part, str) or part.get("type") == "text":
        return part
    if (kind := part_type(part)) in IMAGE_PARTS:
        return {"type": "image"}
    if kind == VIDEO_PART:
        return {"type": "video"}
    if kind in AUDIO_PARTS:
        return {"type": "audio"}
    return {"type": "text", "text": part[TEXT_PARTS[kind]]}


def merge_late_system_messages(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Message]:
    """Move system messages to the front, for templates that accept them nowhere else.

    Those at the front are joined. A later one is joined with an adjacent user message: moving it to
    the front would change the start of the prompt, so that nothing of the last turn stays cached.
    """
    late = any(message["role"] in _SYSTEM for message in messages[1:])
    if not late or _supports_late_system(tokenizer):
        return list(messages)
    merged: list[Message] = []
    in_front, after_late = True, False
    for message in messages:
        is_system = message["role"] in _SYSTEM
        in_front = in_front and is_system
        is_late = is_system and not in_front
        role = "user" if is_late else "system" if is_system else message["role"]
        if merged and merged[-1]["role"] == role and (is_system or after_late):
            content = _joined(merged[-1]["content"], message["content"])
            merged[-1] = {**merged[-1], "content": content}
        else:
            merged.append({**message, "role": role})
        after_late = is_late
    return merged


def _joined(first: Any, second: Any) -> Any:
    """Join two contents: as text, or as parts if either of them has parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    contents = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in (first, second))
    return [part for content in contents for part in content]


@lru_cache(maxsize=16)
def _supports_late_system(tokenizer: Tokenizer) -> bool:
    try:
        render_chat_text(tokenizer, PROBE_MESSAGES)
    except InvalidRequest:
        return False
    return True


#: No vocabulary has tokens of more characters: a text longer than this many per token of context
#: can't fit, and isn't tokenized at all.
MAX_PIECE_CHARS = 512
#: Limits for rendering a template on the event loop; a few milliseconds.
INLINE_LIMITS = RenderLimits(steps=5_000, seconds=0.02)
#: Rendering cost of a value in addition to its characters.
PER_VALUE_CHARS = 8


async def chat_token_ids(
    tokenizer: Tokenizer,
    model: ModelInfo,
    messages: Sequence[dict[str, Any]],
    *,
    tenant: str,
    chars: int,
    **options: Any,
) -> list[int]:
    """Token ids of a chat. Options are `engine.text.render_chat`'s.

    Args:
        tenant: the tenant in whose turn a long chat is rendered.
        chars: `count_chars` of the messages, tools and documents.

    Raises:
        InvalidRequest, ContextLengthExceeded: the chat template or the tokenizer rejects the chat.
    """
    check_prompt_length(chars, model, "messages")
    quire = settings.QUIRE
    options["content_format"] = quire.chat_template_content_format
    token_ids: list[int] | None = None
    if chars <= quire.inline_render_chars and options.get("chat_template") is None:
        try:
            token_ids = render_chat(tokenizer, messages, limits=INLINE_LIMITS, **options)
        except TemplateLimit:
            token_ids = None  # a slow template is rendered in a thread
    if token_ids is None:
        limit_s = quire.render_timeout_s
        options["limits"] = RenderLimits(seconds=limit_s)
        token_ids = await get_render_pool().run_in_thread(
            tenant, limit_s, render_chat, tokenizer, messages, **options
        )
    if not token_ids:
        raise InvalidRequest("The messages render to an empty prompt.", param="messages")
    return token_ids


async def text_token_ids(
    tokenizer: Tokenizer,
    model: ModelInfo,
    texts: Sequence[str],
    *,
    tenant: str,
    add_special_tokens: bool = True,
    limit: int | None = None,
) -> list[list[int]]:
    """Token ids of plain prompts, in order. `limit`: as for `Tokenizer.encode`.

    Raises:
        InvalidRequest, ContextLengthExceeded: an empty prompt, or one that is certainly too long.
    """
    for text in texts:
        if not text:
            raise InvalidRequest("prompt must not be empty.", param="prompt")
        check_prompt_length(len(text), model, "prompt")

    def encode_all() -> list[list[int]]:
        return [
            gc_untracked(
                tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=limit)
            )
            for text in texts
        ]

    token_ids = await get_render_pool().run(tenant, count_chars(texts), encode_all)
    if not all(token_ids):
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    return token_ids


def checked_token_ids(token_ids: Sequence[Any], model: ModelInfo, vocab_size: int) -> list[int]:
    """A client's own token ids. Raises `InvalidRequest` for none, or for one out of range."""
    check_context(len(token_ids), None, model.prompt_context)  # before each token is checked
    check_vocabulary(token_ids, vocab_size)
    return list(token_ids)


def check_vocabulary(token_ids: Sequence[Any], vocab_size: int) -> None:
    """Raise `InvalidRequest` for no ids, or for an id that isn't in the vocabulary."""
    if not token_ids:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    for token in token_ids:
        if type(token) is not int:
            raise InvalidRequest(f"prompt holds {token!r}, which isn't a token id.", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        invalid = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequest(
            f"prompt holds token {invalid}, but the vocabulary has {vocab_size} entries.",
            param="prompt",
        )


def truncate_tokens(token_ids: list[int], limit: int | None, side: str | None = None) -> list[int]:
    """The last `limit` tokens (`truncate_prompt_tokens`); all without a limit.

    `side`: the side on which tokens are cut off; "right" keeps the first tokens.
    """
    if limit is None or len(token_ids) <= limit:
        return token_ids
    return token_ids[:limit] if side == "right" else token_ids[-limit:]


def check_prompt_length(chars: int, model: ModelInfo, param: str) -> None:
    """Raise `ContextLengthExceeded` for more characters than fit with any vocabulary."""
    context = model.prompt_context
    if chars > context * MAX_PIECE_CHARS:
        raise ContextLengthExceeded(
            f"The prompt has {chars} characters, which can't fit the model's context of "
            f"{context} tokens.",
            param=param,
        ).with_counts(chars // MAX_PIECE_CHARS, context)


def count_chars(value: Any) -> int:
    """Approximate rendering cost: characters of all strings, plus a constant for each value."""
    if isinstance(value, str):
        return len(value) + PER_VALUE_CHARS
    if isinstance(value, dict):
        return sum(map(count_chars, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(count_chars, value))
    return PER_VALUE_CHARS


#: The control tokens before the prefix, the suffix and the middle. A vocabulary with all three of a
#: format belongs to a model that was trained with it.
FIM_FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def fim_tokens(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """The three control tokens. Raises `UnsupportedField` for a model without them."""
    ids = {text: token for token, text in tokenizer.added_tokens.items()}
    for form in FIM_FORMATS:
        if all(text in ids for text in form):
            prefix, suffix, middle = (ids[text] for text in form)
            return prefix, suffix, middle
    raise UnsupportedField(
        "This model has no tokens for filling in the middle: 'suffix' is not supported.",
        param="suffix",
    )


async def fim_prompt(
    tokenizer: Tokenizer,
    model: ModelInfo,
    prefixes: Sequence[str],
    suffix: str,
    *,
    tenant: str,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Token ids of each prefix with the suffix. Control tokens in their text stay text.

    Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (arXiv
    2207.14255): prefix, suffix, and then the middle, which the model generates.

    Raises:
        InvalidRequest: unsupported by the model, an empty prefix, or certainly too long.
    """
    prefix_id, suffix_id, middle_id = fim_tokens(tokenizer)
    for prefix in prefixes:
        if not prefix:
            raise InvalidRequest("prompt must not be empty.", param="prompt")
        check_prompt_length(len(prefix) + len(suffix), model, "prompt")

    def encode_all() -> list[list[int]]:
        start = tokenizer.encode("", add_special_tokens=add_special_tokens)
        end = [suffix_id, *tokenizer.encode_as_text(suffix, inside=True), middle_id]
        return [
            [*start, prefix_id, *tokenizer.encode_as_text(p, inside=True), *end] for p in prefixes
        ]

    return await get_render_pool().run(tenant, sum(map(len, prefixes)) + len(suffix), encode_all)
