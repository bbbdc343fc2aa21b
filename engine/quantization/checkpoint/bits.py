"""Integers of a few bits, out of the words that checkpoints keep them in."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.matrix import Rows

WORD = 32


def row_numbers(rows: Rows, count: int) -> Tensor:
    """int64: a slice's numbers, or the numbers themselves."""
    if isinstance(rows, slice):
        return torch.arange(*rows.indices(count))
    return rows


def pack_factor(bits: int) -> int:
    """Whole integers of that many bits in a word."""
    return WORD // bits


def unpack_columns(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [n, count], unsigned, from int32 words [n, ceil(count / factor)].

    A word holds as many whole integers as fit, the lowest bits first.
    """
    factor = pack_factor(bits)
    shifts = torch.arange(factor, dtype=torch.int32) * bits
    values = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2)[..., :count]


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """uint8 [n, 32 * words / bits] from int32 [n, words]: without gaps, the lowest bits first.

    Of 3 bits, some integers begin in one word and end in the next.
    """
    if WORD % bits == 0:
        return unpack_columns(words, bits, words.shape[-1] * WORD // bits).to(torch.uint8)
    runs = words.unflatten(-1, (-1, bits)).long() & 0xFFFFFFFF
    following = torch.cat((runs[..., 1:], torch.zeros_like(runs[..., :1])), -1)
    starts = torch.arange(WORD) * bits
    word, shift = starts // WORD, starts % WORD
    both = runs[..., word] | (following[..., word] << WORD)
    return ((both >> shift) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def pick(words: Tensor, rows: Rows, bits: int, count: int, places: tuple[int, ...] = ()) -> Tensor:
    """int32 [n, rows]: those of `count` integers that lie along the words' last dimension.

    `places`: in which place of its word each of a word's integers is; default: in order.
    """
    numbers = row_numbers(rows, count)
    factor = pack_factor(bits)
    place = torch.tensor(places or tuple(range(factor)), dtype=torch.int32)
    shifts = place[numbers % factor] * bits
    return (words[:, numbers // factor] >> shifts) & ((1 << bits) - 1)


def pick_stream(words: Tensor, rows: Rows, bits: int, count: int) -> Tensor:
    """`pick` of integers without gaps, as `unpack_stream` reads them."""
    if WORD % bits == 0:
        return pick(words, rows, bits, count)
    return unpack_stream(words, bits)[:, row_numbers(rows, count)].to(torch.int32)


def nibbles(packed: Tensor, high_first: bool = False) -> Tensor:
    """uint8 [n, 2 k] from bytes [n, k]."""
    low, high = packed & 15, packed >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, -1).flatten(-2)
