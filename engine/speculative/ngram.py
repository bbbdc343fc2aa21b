"""Drafts from text: prompt lookup, and lookup in a tenant's earlier outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.contract.speculative_config import SpeculativeConfig
from engine.scheduler import Sequence as EngineSequence
from engine.speculative.acceptance import MAX_KIND


class NgramIndex:
    """Index of the last occurrence of each n-gram in a text that grows at its end.

    Prompt lookup decoding (Saxena 2023): edited, quoted or repeated text continues the same way.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """Index n-grams of `shortest` to `longest` tokens; both at least 1."""
        self._lengths = range(longest, shortest - 1, -1)
        #: By length: n-gram -> index of the token after its last occurrence.
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}
        self._num_indexed = 0
        #: Number of indexed tokens, each of which takes about 450 bytes.
        self.size = 0

    def clear(self) -> None:
        """Forget all n-grams; only tokens that are appended later will be indexed."""
        self._after = {length: {} for length in self._lengths}
        self.size = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the new tokens of a text that begins with the previous one."""
        for length, after in self._after.items():
            for end in range(max(self._num_indexed, length), len(tokens)):
                after[tuple(tokens[end - length : end])] = end
        self.size += len(tokens) - self._num_indexed
        self._num_indexed = len(tokens)

    def find(self, newest: Sequence[int]) -> int | None:
        """Return the index of the token after the longest n-gram that `newest` ends with; None
        without a match.
        """
        for length, after in self._after.items():
            if length <= len(newest):
                start = after.get(tuple(newest[-length:]))
                if start is not None:
                    return start
        return None


class MultiTextNgramIndex:
    """Index of the last occurrence of each n-gram in several texts."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        #: By length: n-gram -> the newest text with it, and the index of the token after it there.
        self._after: dict[int, dict[tuple[int, ...], tuple[list[int], int]]] = {
            length: {} for length in self._lengths
        }

    def add(self, tokens: list[int]) -> None:
        """Index a text that is newer than all others; it is identified by its object identity."""
        for length, after in self._after.items():
            for end in range(length, len(tokens)):
                after[tuple(tokens[end - length : end])] = tokens, end

    def drop(self, tokens: list[int]) -> None:
        """Remove a text from the index."""
        for length, after in self._after.items():
            for end in range(length, len(tokens)):
                run = tuple(tokens[end - length : end])
                if run in after and after[run][0] is tokens:
                    del after[run]

    def find(self, newest: Sequence[int]) -> tuple[list[int], int] | None:
        """Return the text and index of the token after the longest n-gram that ends `newest`."""
        for length, after in self._after.items():
            if length <= len(newest):
                match = after.get(tuple(newest[-length:]))
                if match is not None:
                    return match
        return None


def copy_continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Copy `count` tokens from `start` on; after the text's end, repeat what was copied."""
    copied = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied


#: Maximum number of indexed tokens of running sequences, and of cached outputs for "suffix": about
#: 115 MB each.
MAX_TOKENS = 1 << 18


class Proposal(NamedTuple):
    """Tokens that may follow. `match_length`: number of the sequence's newest tokens that equal
    those before the copied ones, at most `MAX_KIND`.
    """

    tokens: list[int]
    match_length: int


class Proposer(ABC):
    """Proposes tokens that may follow a sequence's newest one."""

    @abstractmethod
    def propose(self, sequence: EngineSequence, count: int) -> Proposal:
        """Return at most `count` tokens; none without a match."""

    @abstractmethod
    def forget(self, sequence: EngineSequence) -> None:
        """Forget a sequence that has finished."""


class NgramProposer(Proposer):
    """Copies from the sequence's prompt and output.

    If running sequences exceed `MAX_TOKENS` together, the longest lose their indexed tokens.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._lookups: dict[int, NgramIndex] = {}
        self._size = 0

    def propose(self, sequence: EngineSequence, count: int) -> Proposal:
        tokens = sequence.token_ids
        start = self.lookup_of(sequence).find(tokens)
        if start is None:
            return Proposal([], 0)
        return Proposal(copy_continuation(tokens, start, count), _matched(tokens, tokens, start))

    def lookup_of(self, sequence: EngineSequence) -> NgramIndex:
        """Return the sequence's index, up to date."""
        lookup = self._lookups.get(sequence.seq_id)
        if lookup is None:
            lookup = self._lookups[sequence.seq_id] = NgramIndex(*self._lengths)
        previous_size = lookup.size
        lookup.extend(sequence.token_ids)
        self._size += lookup.size - previous_size
        while self._size > MAX_TOKENS:
            longest = max(self._lookups.values(), key=lambda index: index.size)
            self._size -= longest.size
            longest.clear()
        return lookup

    def forget(self, sequence: EngineSequence) -> None:
        lookup = self._lookups.pop(sequence.seq_id, None)
        self._size -= 0 if lookup is None else lookup.size


class _Outputs:
    """Outputs of one namespace. They are indexed at the first lookup, since full batches look
    nothing up.
    """

    def __init__(self, lengths: tuple[int, int]) -> None:
        self._lookup = MultiTextNgramIndex(*lengths)
        self._new: list[list[int]] = []
        self.count = 0

    def add(self, output: list[int]) -> None:
        self._new.append(output)
        self.count += 1

    def drop(self, output: list[int]) -> None:
        self.count -= 1
        if any(new is output for new in self._new):
            self._new = [new for new in self._new if new is not output]
        else:
            self._lookup.drop(output)

    def find(self, newest: list[int]) -> tuple[list[int], int] | None:
        """See `MultiTextNgramIndex.find`."""
        for output in self._new:
            self._lookup.add(output)
        self._new.clear()
        return self._lookup.find(newest)


class SuffixProposer(Proposer):
    """Copies from earlier outputs of the same tenant too, if these match more of the newest tokens
    than the sequence does (after Oliaro et al. 2024, "SuffixDecoding").

    Outputs have at most `MAX_TOKENS` together; the oldest are dropped first. They are only matched
    within their cache namespace, so that neither drafts nor timing reveal them to other tenants.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._ngrams = NgramProposer(config)
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._max_outputs = config.suffix_decoding_max_cached_requests
        #: Namespace and output, oldest first.
        self._history: deque[tuple[tuple[str, str], list[int]]] = deque()
        self._outputs: dict[tuple[str, str], _Outputs] = {}
        self._size = 0

    def propose(self, sequence: EngineSequence, count: int) -> Proposal:
        """Return the continuation of the longest match; the sequence itself wins ties."""
        proposal, tokens = self._ngrams.propose(sequence, count), sequence.token_ids
        outputs = self._outputs.get(_namespace(sequence))
        if proposal.match_length >= MAX_KIND or outputs is None:
            return proposal
        match = outputs.find(tokens[-self._lengths[1] :])
        if match is None or (matched := _matched(tokens, *match)) <= proposal.match_length:
            return proposal
        return Proposal(copy_continuation(*match, count), matched)

    def forget(self, sequence: EngineSequence) -> None:
        """Keep the sequence's output for later sequences."""
        self._ngrams.forget(sequence)
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        if not self._max_outputs or len(output) <= self._lengths[0]:
            return
        namespace = _namespace(sequence)
        self._history.append((namespace, output))
        self._outputs.setdefault(namespace, _Outputs(self._lengths)).add(output)
        self._size += len(output)
        while len(self._history) > self._max_outputs or self._size > MAX_TOKENS:
            namespace, output = self._history.popleft()
            self._size -= len(output)
            self._outputs[namespace].drop(output)
            if not self._outputs[namespace].count:
                del self._outputs[namespace]


def _matched(newest: list[int], source: list[int], start: int) -> int:
    """Return how many tokens before `start` equal those that `newest` ends with, at most
    `MAX_KIND`.
    """
    matched, limit = 0, min(MAX_KIND, start, len(newest))
    while matched < limit and source[start - matched - 1] == newest[-matched - 1]:
        matched += 1
    return matched


def _namespace(sequence: EngineSequence) -> tuple[str, str]:
    """Return the scope within which outputs are matched: that of cached prefixes."""
    return sequence.request.message.cache_scope


PROPOSERS: dict[str, type[NgramProposer] | type[SuffixProposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
}
