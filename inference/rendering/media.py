"""Inserts the tokens of a chat's media into its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.messages import MediaItem, ModelInfo
from engine.multimodal.placeholders import expand_placeholders, locate_media
from engine.text.tokenizer import Tokenizer
from inference.rendering.media_pool import MediaOptions, get_media_pool
from inference.rendering.media_sources import MediaSource
from tenants.authentication import Caller


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat.

    Attributes:
        media, media_data: its images and sounds, and the encoder's input for each.
        audio_ms: total milliseconds of audio.
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
    """The prompt of a chat, with the model's number of placeholder tokens for each medium.

    `sources`: admitted, with documents replaced by their pages.

    Raises:
        InvalidRequest: a medium can't be fetched or read; names the part.
        Overloaded: too many of the tenant's media wait.
    """
    pool = get_media_pool()
    pictures = await pool.prepare_all(sources, options, info.path, caller)
    expanded, order = expand_placeholders(token_ids, pictures, tokenizer)
    items = locate_media(expanded, [pictures[index] for index in order])
    audio_ms = sum(math.ceil(1000 * prepared.seconds) for prepared in pictures)
    media_data = {prepared.digest: prepared.tensors for prepared in pictures}
    return ChatPrompt(expanded, items, media_data, audio_ms)
