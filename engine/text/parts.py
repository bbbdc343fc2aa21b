"""One text, or a pair, as token ids within a limit, special tokens included. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

import tokenizers

from engine.contract.errors import InvalidRequest
from engine.text.backend import encode


class Parts(NamedTuple):
    """Token ids; `second_segment` is the first token of type 1, 0 where there's none."""

    token_ids: list[int]
    second_segment: int = 0


def encode_parts(
    backend: tokenizers.Tokenizer,
    first: str,
    second: str | None,
    limit: int | None,
    add_special_tokens: bool,
    side: str = "right",
) -> Parts:
    """Token ids of a text, or of two with what the model puts between and around them.

    Args:
        limit: most tokens in all; the texts lose their ends (of two the longer one first, as in
            the tokenizers library's `longest_first`), special tokens stay. None: no limit.
        side: where texts are cut, at the "right" or, their beginnings, at the "left".

    Raises `InvalidRequest` when the special tokens alone are over the limit.
    """
    one = encode(backend, first, add_special_tokens=False)
    two = None if second is None else encode(backend, second, add_special_tokens=False)
    if limit is not None:
        special = backend.num_special_tokens_to_add(two is not None) if add_special_tokens else 0
        kept = _kept(len(one.ids), 0 if two is None else len(two.ids), room_for(limit, special))
        one.truncate(kept[0], direction=side)
        if two is not None:
            two.truncate(kept[1], direction=side)
    whole = backend.post_process(one, two, add_special_tokens)
    types: list[int] = whole.type_ids
    return Parts(whole.ids, types.index(1) if 1 in types else 0)


def room_for(limit: int, special: int) -> int:
    """How many tokens stay beside the special ones. Raises `InvalidRequest` for none."""
    if limit <= special:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be over {special}: so many special tokens are added.",
            param="truncate_prompt_tokens",
        )
    return limit - special


def shortened_text(backend: tokenizers.Tokenizer, text: str, limit: int) -> str:
    """The beginning of `text` with at most `limit` tokens, special ones aside.

    At least one character stays, whatever it takes. The beginning is tokenised again, for it may
    be divided otherwise than as a part of the whole.
    """
    while len(text) > 1:
        found = encode(backend, text, add_special_tokens=False, offsets=True)
        if len(found.ids) <= limit:
            break
        end = min(found.offsets[limit - 1][1], found.offsets[limit][0])
        text = text[: max(1, min(end, len(text) - 1))]
    return text


def _kept(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay: the longer one is cut first."""
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)
