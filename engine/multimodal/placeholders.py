"""Positions of pictures in a prompt's token ids."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.contract.messages import MediaItem

#: In a replacement: the picture's number in the prompt, from 0.
NUMBER = "\ue000"


class Placed(Protocol):
    """A prepared picture or video."""

    @property
    def kind(self) -> str:
        """See `MediaItem`."""

    @property
    def placeholder_id(self) -> int:
        """The token that stands for it in an unexpanded prompt."""

    @property
    def replacement(self) -> str:
        """Text that takes the placeholder's place."""

    @property
    def token_id(self) -> int:
        """The token that stands for each of its vectors."""

    @property
    def wrapper(self) -> tuple[int, ...]:
        """The tokens before and after the placeholder that its replacement brings itself, or ()."""

    @property
    def time_interval(self) -> float:
        """See `MediaItem`."""

    @property
    def digest(self) -> bytes:
        """See `MediaItem`."""

    @property
    def num_vectors(self) -> int:
        """Placeholder tokens that stand for it."""

    @property
    def grid(self) -> tuple[int, ...]:
        """See `MediaItem`."""

    @property
    def retained(self) -> bytes:
        """See `MediaItem`."""


def check_placeholders(num_placeholders: int, num_items: int, kind: str = "image") -> None:
    """Raise `InvalidRequest` unless there is a placeholder for each item of a kind."""
    if num_placeholders != num_items:
        raise InvalidRequest(
            f"The prompt has {num_placeholders} placeholders for {num_items} {kind}s.",
            param="prompt",
        )


class PromptTokenizer(Protocol):
    """Tokens of a text, and the text of tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        """Their text."""


def expand_placeholders(
    token_ids: Sequence[int], media: Sequence[Placed], tokenizer: PromptTokenizer
) -> tuple[list[int], list[int]]:
    """The prompt with each placeholder replaced by the tokens that stand for its picture, and the
    indices of `media` in the prompt's order. Those of one kind are in that order already.

    Raises `InvalidRequest` unless there is one for each.
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
    """Append tokens. Newlines on both sides are one piece, as where a whole text is tokenized."""
    edges = tokenizer.decode(expanded[-1:]), tokenizer.decode(tokens[:1])
    if all(edge and not edge.strip("\n") for edge in edges):
        expanded[-1:] = tokenizer.encode("".join(edges), add_special_tokens=False)
        tokens = tokens[1:]
    expanded += tokens


def locate_media(token_ids: Sequence[int], media: Sequence[Placed]) -> list[MediaItem]:
    """Which tokens of an expanded prompt stand for which picture, in the prompt's order.

    `media`: those whose vectors have the same token, in that order. Raises `InvalidRequest` where
    there are more or fewer tokens than they need.
    """
    tokens = np.asarray(token_ids)
    items: list[MediaItem] = []
    for token_id in dict.fromkeys(item.token_id for item in media):
        items += _locate_token(tokens, [item for item in media if item.token_id == token_id])
    return sorted(items, key=lambda item: item.start)


def _locate_token(token_ids: np.ndarray, media: Sequence[Placed]) -> list[MediaItem]:
    """The same for media whose vectors have one token."""
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
