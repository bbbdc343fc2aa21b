"""Packs tokenized conversations into rows of one length, each kept apart by its own attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from demo.generator.example import Example
from demo.render import render

OPEN_ROWS = 32  # rows kept open for a conversation that fits


@dataclass(slots=True)
class Row:
    """Conversations side by side. Documents are numbered from 1; 0 is padding."""

    tokens: list[int]
    learned: list[bool]  # whether the token is one the model is to predict
    document: list[int]

    def append(self, tokens: list[int], learned: list[bool]) -> None:
        """Adds a conversation."""
        number = self.document[-1] + 1 if self.document else 1
        self.tokens += tokens
        self.learned += learned
        self.document += [number] * len(tokens)


@dataclass(slots=True)
class Batch:
    """Rows as tensors."""

    tokens: torch.Tensor
    labels: torch.Tensor  # the token that follows, or -100
    mask: torch.Tensor  # [rows, 1, length, length]: who attends to whom
    positions: torch.Tensor


class Encoder:
    """Turns examples into tokens, and says which of them are learned."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        self._end = tokenizer.eos_token_id

    def encode(self, example: Example) -> tuple[list[int], list[bool]]:
        """The example's tokens. In a chat only the assistant's are learned, its end included."""
        tokens = self._tokenizer.encode(render(example), add_special_tokens=False)
        if example.plain:
            return tokens, [index > 0 for index in range(len(tokens))]
        return tokens, self._assistant(tokens)

    def _assistant(self, tokens: list[int]) -> list[bool]:
        learned, inside, width = [], False, len(self._start)
        for index, token in enumerate(tokens):
            inside = inside or tokens[max(0, index - width) : index] == self._start
            learned.append(inside)
            inside = inside and token != self._end
        return learned


def pack(examples: Iterable[Example], encoder: Encoder, length: int) -> Iterator[Row]:
    """Rows of at most the length, filled first fit. Longer conversations are left out."""
    rows: list[Row] = []
    for example in examples:
        tokens, learned = encoder.encode(example)
        if len(tokens) > length:
            continue
        row = next((row for row in rows if len(row.tokens) + len(tokens) <= length), None)
        if row is None:
            if len(rows) == OPEN_ROWS:
                yield rows.pop(_fullest(rows))
            rows.append(row := Row([], [], []))
        row.append(tokens, learned)


def _fullest(rows: list[Row]) -> int:
    return max(range(len(rows)), key=lambda index: len(rows[index].tokens))


def collate(rows: list[Row], length: int, pad: int) -> Batch:
    """The rows as one batch."""
    tokens = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), -100)
    document = torch.zeros((len(rows), length), dtype=torch.long)
    for index, row in enumerate(rows):
        size = len(row.tokens)
        tokens[index, :size] = torch.tensor(row.tokens)
        document[index, :size] = torch.tensor(row.document)
        learned = torch.tensor(row.learned[1:])
        labels[index, : size - 1] = tokens[index, 1:size].where(learned, torch.tensor(-100))
    same = document[:, :, None] == document[:, None, :]
    mask = (same & torch.ones(length, length).tril().bool())[:, None]
    positions = torch.arange(length).expand(len(rows), length)
    return Batch(tokens, labels, mask, positions)
