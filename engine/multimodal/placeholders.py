"""Where pictures stand in a prompt's token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.contract.messages import MediaItem


class Placed(Protocol):
    """A prepared picture."""

    @property
    def digest(self) -> bytes:
        """See `MediaItem`."""

    @property
    def num_vectors(self) -> int:
        """Placeholder tokens that stand for it."""

    @property
    def grid(self) -> tuple[int, ...]:
        """See `MediaItem`."""


def check_placeholders(num_placeholders: int, num_images: int) -> None:
    """Raise `InvalidRequest` unless there is a placeholder for each image."""
    if num_placeholders != num_images:
        raise InvalidRequest(
            f"The prompt has {num_placeholders} placeholders for {num_images} images.",
            param="prompt",
        )


def expand_placeholders(
    token_ids: Sequence[int], image_token_id: int, replacements: Sequence[Sequence[int]]
) -> list[int]:
    """The prompt with each placeholder replaced by the tokens that stand for its picture.

    Raises `InvalidRequest` unless there is one for each.
    """
    check_placeholders(list(token_ids).count(image_token_id), len(replacements))
    remaining = iter(replacements)
    expanded: list[int] = []
    for token in token_ids:
        expanded += next(remaining) if token == image_token_id else (token,)
    return expanded


def locate_media(
    token_ids: Sequence[int], image_token_id: int, pictures: Sequence[Placed]
) -> list[MediaItem]:
    """Which tokens of an expanded prompt stand for which picture.

    Raises `InvalidRequest` where there are more or fewer than the pictures need.
    """
    positions = np.flatnonzero(np.asarray(token_ids) == image_token_id)
    num_needed = sum(picture.num_vectors for picture in pictures)
    if len(positions) != num_needed:
        raise InvalidRequest(
            f"The prompt has {len(positions)} image tokens; its images need {num_needed}.",
            param="prompt",
        )
    items, first = [], 0
    for picture in pictures:
        part = positions[first : first + picture.num_vectors]
        first += picture.num_vectors
        runs = np.split(part, np.flatnonzero(np.diff(part) != 1) + 1)
        ranges = tuple((int(run[0]), len(run)) for run in runs)
        items.append(MediaItem("image", picture.digest, ranges, picture.grid))
    return items
