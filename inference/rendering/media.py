"""A chat's media in its prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.messages import MediaItem, ModelInfo
from engine.multimodal.placeholders import expand_placeholders, locate_media
from engine.text import Tokenizer
from inference.rendering.media_pool import MediaOptions, get_media_pool
from inference.rendering.media_sources import MediaSource
from tenants.authentication import Caller


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat.

    Attributes:
        media, media_data: its pictures and sounds, and what the encoder reads of each.
        audio_ms: milliseconds of all sounds.
    """

    token_ids: list[int]
    media: list[MediaItem]
    media_data: dict[bytes, bytes]
    audio_ms: int = 0


async def insert_media_tokens(
    token_ids: list[int],
    sources: Sequence[MediaSource],
    options: MediaOptions,
    info: ModelInfo,
    tokenizer: Tokenizer,
    caller: Caller,
) -> ChatPrompt:
    """A chat's prompt with as many tokens for each picture as the model takes.

    `sources`: admitted, and pages in place of documents.

    Raises:
        InvalidRequest: one can't be fetched or read; the part is named.
        Overloaded: too many of the tenant's pictures wait.
    """
    if not sources:
        return ChatPrompt(token_ids, [], {})
    pool = get_media_pool()
    pictures = await asyncio.gather(
        *(pool.prepare(source, options, info.path, caller) for source in sources)
    )
    expanded, order = expand_placeholders(token_ids, pictures, tokenizer)
    items = locate_media(expanded, [pictures[index] for index in order])
    audio_ms = sum(math.ceil(1000 * prepared.seconds) for prepared in pictures)
    media_data = {prepared.digest: prepared.tensors for prepared in pictures}
    return ChatPrompt(expanded, items, media_data, audio_ms)
