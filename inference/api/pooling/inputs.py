"""Converts texts and ids to the engine's input, and checks every bound before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import msgspec
from django.conf import settings

from engine.contract.errors import InvalidRequest
from engine.contract.messages import MediaItem, gc_untracked
from engine.contract.pooling_params import PoolingParams, check_length
from inference.api.pooling.schemas import Item, chat_prompts
from inference.loop.offload import get_render_pool
from inference.rendering.prompts import check_vocabulary, truncate_tokens
from inference.request.context import RequestContext
from inference.request.job import ResolvedModel
from inference.schemas.chat import ChatRequest

T = TypeVar("T")


class Entry(NamedTuple):
    """One prompt and its parameters. `media`, `media_data`: see `ChatPrompt`."""

    token_ids: list[int]
    params: PoolingParams
    media: Sequence[MediaItem] = ()
    media_data: Mapping[bytes, bytes] = MappingProxyType({})


async def item_entries(
    ctx: RequestContext,
    served: ResolvedModel,
    items: list[Item],
    params: PoolingParams,
    *,
    add_special_tokens: bool = True,
    side: str = "right",
) -> list[Entry]:
    """An entry for each text or list of token ids. Long ones are truncated at `side`.

    Raises: `InvalidRequest` about `prompt`; `ContextLengthExceeded` for one that is too long.
    """
    limit = params.prompt_limit(served.info.max_model_len)
    prefix = served.info.pooling.prompt if served.info.pooling is not None else ""

    def encoded(item: Item) -> list[int]:
        if not isinstance(item, str):
            return truncate_tokens(item, limit, side)
        parts = served.tokenizer.encode_parts(
            prefix + item, limit=limit, add_special_tokens=add_special_tokens, side=side
        )
        return gc_untracked(parts.token_ids)

    def encode_all() -> list[list[int]]:
        return list(_within_total(map(encoded, items)))

    texts = [prefix + item for item in items if isinstance(item, str)]
    return await ctx.offload(_entries, await _rendered(ctx, texts, encode_all), served, params)


async def chat_entries(
    ctx: RequestContext,
    served: ResolvedModel,
    chats: list[ChatRequest],
    params: PoolingParams,
    side: str = "right",
) -> list[Entry]:
    """An entry for each chat. Raises as `item_entries` and the chat's template do."""
    prompts = await chat_prompts(ctx, served, chats, params, side)
    token_ids = [prompt.token_ids for prompt in prompts]
    entries = await ctx.offload(_entries, token_ids, served, params)
    return [
        entry._replace(media=prompt.media, media_data=prompt.media_data)
        for entry, prompt in zip(entries, prompts, strict=True)
    ]


def _entries(prompts: list[list[int]], served: ResolvedModel, params: PoolingParams) -> list[Entry]:
    for prompt in _within_total(prompts):
        check_vocabulary(prompt, served.vocab_size)
        check_length(len(prompt), served.info.max_model_len)
    return [Entry(prompt, params) for prompt in prompts]


async def shortened_texts(
    ctx: RequestContext, served: ResolvedModel, texts: list[str], limit: int
) -> list[str]:
    """The first `limit` tokens of each text, without special tokens; 0: the whole text."""
    if not limit:
        return texts
    return await _rendered(
        ctx, texts, lambda: [served.tokenizer.shortened(t, limit) for t in texts]
    )


async def pair_entries(
    ctx: RequestContext,
    served: ResolvedModel,
    pairs: list[tuple[str, str]],
    params: PoolingParams,
    side: str = "right",
) -> list[Entry]:
    """An entry for each pair of texts, for a cross-encoder. Raises as `item_entries` does."""
    limit = params.prompt_limit(served.info.max_model_len)
    typed = served.info.pooling is not None and served.info.pooling.token_types

    def encode_all() -> list[Entry]:
        segments: list[int] = []

        def encoded() -> Iterator[list[int]]:
            for first, second in pairs:
                parts = served.tokenizer.encode_parts(first, second, limit=limit, side=side)
                segments.append(parts.second_segment if typed else 0)
                yield gc_untracked(parts.token_ids)

        prompts = list(_within_total(encoded()))
        return [
            Entry(prompt, msgspec.structs.replace(params, second_segment=segment))
            for prompt, segment in zip(prompts, segments, strict=True)
        ]

    texts = [text for pair in pairs for text in pair]
    entries = await _rendered(ctx, texts, encode_all)
    for entry in entries:
        check_length(len(entry.token_ids), served.info.max_model_len)
    return entries


async def _rendered(ctx: RequestContext, texts: Sequence[str], encode_all: Callable[[], T]) -> T:
    """`encode_all()` off the event loop, unless the texts are too long together."""
    chars, limit = sum(map(len, texts)), settings.QUIRE.max_body_bytes
    if chars > limit:
        # One query repeated for many documents may be far more text than the body had.
        raise InvalidRequest(
            f"The prompts have {chars} characters in all; at most {limit} may be sent at once.",
            param="prompt",
        )
    return await get_render_pool().run(ctx.caller.tenant, chars, encode_all)


def _within_total(prompts: Iterable[list[int]]) -> Iterator[list[int]]:
    """The prompts, as long as their total number of tokens is within the limit.

    Raises `InvalidRequest` at the first prompt beyond it, so that the millions of tokens that a
    body of 10 MB may contain are neither counted nor allocated.
    """
    total, limit = 0, settings.QUIRE.max_pooling_tokens
    for prompt in prompts:
        total += len(prompt)
        if total > limit:
            raise InvalidRequest(
                f"The prompts have more than {limit} tokens in all. Send fewer at once.",
                param="prompt",
            )
        yield prompt
