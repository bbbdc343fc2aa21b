"""Placeholder tokens of media in prompts, and their positions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.contract.messages import MediaItem

#: Stands in a replacement for the item's number in the prompt, from 0.
NUMBER = "\ue000"


class Placed(Protocol):
    """A prepared image, video or audio."""

    @property
    def kind(self) -> str:
        """See `MediaItem`."""

    @property
    def placeholder_id(self) -> int:
        """The token that stands for it in an unexpanded prompt."""

    @property
    def replacement(self) -> str:
        """The text that replaces the placeholder."""

    @property
    def token_id(self) -> int:
        """The token that stands for each of its vectors."""

    @property
    def wrapper(self) -> tuple[int, ...]:
        """The tokens before and after the placeholder that are part of the replacement, or ()."""

    @property
    def time_interval(self) -> float:
        """See `MediaItem`."""

    @property
    def digest(self) -> bytes:
        """See `MediaItem`."""

    @property
    def num_vectors(self) -> int:
        """The number of its vectors, and of tokens in the replacement that stand for one."""

    @property
    def grid(self) -> tuple[int, ...]:
        """See `MediaItem`."""

    @property
    def retained(self) -> bytes:
        """See `MediaItem`."""


def check_placeholders(num_placeholders: int, num_items: int, kind: str = "image") -> None:
    """Raise `InvalidRequest` unless there are as many placeholders as items of a kind."""
    if num_placeholders != num_items:
        raise InvalidRequest(
            f"The prompt has {num_placeholders} placeholders for {num_items} {kind}s.",
            param="prompt",
        )


class PromptTokenizer(Protocol):
    """A tokenizer, as far as placeholders need it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens."""


def expand_placeholders(
    token_ids: Sequence[int], media: Sequence[Placed], tokenizer: PromptTokenizer
) -> tuple[list[int], list[int]]:
    """Return the prompt with placeholders replaced by the tokens of their items, and the indices of
    `media` in the prompt's order. Items with the same placeholder must be in that order.

    Raises `InvalidRequest` unless there is one placeholder for each item.
    """
    token_ids = list(token_ids)
    remaining: defaultdict[int, deque[int]] = defaultdict(deque)
    for index, item in enumerate(media):
        remaining[item.placeholder_id].append(index)
    for placeholder_id, indices in remaining.items():
        kind = media[indices[0]].kind
        check_placeholders(token_ids.count(placeholder_id), len(indices), kind)
    replacements = [
        tokenizer.encode(item.replacement.replace(NUMBER, str(number)), add_special_tokens=False)
        for number, item in enumerate(media)
    ]
    expanded: list[int] = []
    order: list[int] = []
    position = 0
    follows_replacement = False
    while position < len(token_ids):
        token = token_ids[position]
        position += 1
        if not remaining.get(token):
            if follows_replacement:
                _append_joined(expanded, [token], tokenizer)
                follows_replacement = False
            else:
                expanded.append(token)
            continue
        order.append(remaining[token].popleft())
        wrapper = media[order[-1]].wrapper
        if wrapper and (*expanded[-1:], *token_ids[position : position + 1]) == wrapper:
            expanded.pop()
            position += 1
        _append_joined(expanded, replacements[order[-1]], tokenizer)
        follows_replacement = True
    return expanded, order


def _append_joined(expanded: list[int], tokens: Sequence[int], tokenizer: PromptTokenizer) -> None:
    """Append tokens. Newlines at the seam are tokenized together, as they would be in one text."""
    edges = tokenizer.decode(expanded[-1:]), tokenizer.decode(tokens[:1])
    if all(edge and not edge.strip("\n") for edge in edges):
        expanded[-1:] = tokenizer.encode("".join(edges), add_special_tokens=False)
        tokens = tokens[1:]
    expanded += tokens


def locate_media(token_ids: Sequence[int], media: Sequence[Placed]) -> list[MediaItem]:
    """Return the items with their positions in an expanded prompt, in the prompt's order.

    Items whose vectors have the same token must be in that order. Raises `InvalidRequest` unless
    there are as many tokens as vectors.
    """
    tokens = np.asarray(token_ids)
    items: list[MediaItem] = []
    for token_id in dict.fromkeys(item.token_id for item in media):
        items += _locate_token(tokens, [item for item in media if item.token_id == token_id])
    return sorted(items, key=lambda item: item.start)


def _locate_token(token_ids: np.ndarray, media: Sequence[Placed]) -> list[MediaItem]:
    """Do the same for items whose vectors have the same token."""
    positions = np.flatnonzero(token_ids == media[0].token_id)
    num_needed = sum(item.num_vectors for item in media)
    if len(positions) != num_needed:
        kind = media[0].kind
        raise InvalidRequest(
            f"The prompt has {len(positions)} {kind} tokens; its {kind}s need {num_needed}.",
            param="prompt",
        )
    items, first = [], 0
    for item in media:
        part = positions[first : first + item.num_vectors]
        first += item.num_vectors
        runs = np.split(part, np.flatnonzero(np.diff(part) != 1) + 1)
        ranges = tuple((int(run[0]), len(run)) for run in runs)
        items.append(
            MediaItem(item.kind, item.digest, ranges, item.grid, item.time_interval, item.retained)
        )
    return items
