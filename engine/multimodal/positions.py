"""How far the positions of a prompt with media reach, for models whose tokens have three of them
(M-RoPE, arXiv 2409.12191): further than its tokens, where a video is long or vectors are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.contract.messages import MediaItem

#: Further than any model's context.
_TOO_FAR = 1 << 40


def count_positions(num_tokens: int, media: Sequence[MediaItem]) -> int:
    """One more than the largest position of a prompt's tokens; see `plane_positions`."""
    token = position = count = 0
    for item in media:
        if not item.grid:
            return num_tokens
        frames, side = item.grid[0], max(item.grid[1:])
        reach = _TOO_FAR
        if item.time_interval < _TOO_FAR:
            reach = max(side, 1 + int(np.float32(frames - 1) * np.float32(item.time_interval)))
        for start, length in item.ranges:
            position += start - token
            count = max(count, position + reach)
            position += side
            token = start + length
    return max(count, position + num_tokens - token)


def check_positions(num_tokens: int, media: Sequence[MediaItem], limit: int) -> None:
    """Raise `InvalidRequest` for a prompt that has more positions than `limit`."""
    if (count := count_positions(num_tokens, media)) > limit:
        raise InvalidRequest(
            f"Positions of the prompt's media reach {count}; at most {limit} are taken. Sample "
            "videos more often, or send shorter ones.",
            param="messages",
        )
