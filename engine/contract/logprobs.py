"""`FlatLogprobs`: log probabilities of many positions in a few plain lists. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload


@dataclass(slots=True)
class Logprob:
    """Log probability of one token at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Position = dict[int, Logprob]


@dataclass(slots=True)
class FlatLogprobs(Sequence[Position]):
    """Reads like the list of dicts that is returned without `flat_logprobs`, under vLLM's names,
    but costs the garbage collector the same for a million positions as for one.

    Attributes:
        start_indices, end_indices: range of each position's tokens in the following lists; a
            position without any (a prompt's first token) is empty.
        token_ids, logprobs, ranks, decoded_tokens: of all positions, one after another.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: Mapping[int, Logprob] | None) -> None:
        """Add a position; None is an empty one."""
        logprobs = position or {}
        entries = logprobs.values()
        self.append_lists(
            logprobs.keys(),
            (entry.logprob for entry in entries),
            (entry.rank for entry in entries),
            (entry.decoded_token for entry in entries),
        )

    def append_lists(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position from its parts, which have equal lengths."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.decoded_tokens += decoded_tokens
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Mapping[int, Logprob] | None]) -> None:
        """Add several positions."""
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> Position | FlatLogprobs:
        if not isinstance(index, slice):
            return self._position(self.start_indices[index], self.end_indices[index])
        part = FlatLogprobs()
        for start, end in zip(self.start_indices[index], self.end_indices[index], strict=True):
            part.append_lists(
                self.token_ids[start:end],
                self.logprobs[start:end],
                self.ranks[start:end],
                self.decoded_tokens[start:end],
            )
        return part

    def _position(self, start: int, end: int) -> Position:
        return {
            self.token_ids[index]: Logprob(
                self.logprobs[index], self.ranks[index], self.decoded_tokens[index]
            )
            for index in range(start, end)
        }

    def copy(self) -> FlatLogprobs:
        """A copy with lists of its own."""
        return FlatLogprobs(
            self.start_indices.copy(),
            self.end_indices.copy(),
            self.token_ids.copy(),
            self.logprobs.copy(),
            self.ranks.copy(),
            self.decoded_tokens.copy(),
        )
