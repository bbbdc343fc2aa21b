"""Where drafts come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import NamedTuple

from engine.contract.speculative import SpeculativeConfig
from engine.scheduler import Sequence
from engine.speculative.chances import MOST_ALIKE
from engine.speculative.lookup import TokenLookup, continued

#: Tokens of running sequences whose runs are known, and of the outputs that "suffix" keeps: about
#: 115 MB each.
MOST_TOKENS = 1 << 18


class Guess(NamedTuple):
    """Tokens that may follow; `matched`: how many of the newest stood before those copied, of which
    no more than `MOST_ALIKE` are counted.
    """

    tokens: list[int]
    matched: int


class Proposer(ABC):
    """Guesses at the tokens that follow a sequence's newest one."""

    @abstractmethod
    def propose(self, sequence: Sequence, count: int) -> Guess:
        """At most `count` tokens; none where it has no idea."""

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """The sequence has left."""


class NgramProposer(Proposer):
    """From the sequence's own prompt and output.

    Of many long sequences, `MOST_TOKENS` together, the longest forget what they said so far.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._lookups: dict[int, TokenLookup] = {}
        self._size = 0

    def propose(self, sequence: Sequence, count: int) -> Guess:
        """See the base."""
        tokens = sequence.token_ids
        return _guess(tokens, tokens, self.lookup_of(sequence).find(tokens, tokens), count)

    def lookup_of(self, sequence: Sequence) -> TokenLookup:
        """The sequence's own, up to date."""
        lookup = self._lookups.get(sequence.seq_id)
        if lookup is None:
            lookup = self._lookups[sequence.seq_id] = TokenLookup(*self._lengths)
        before = lookup.size
        lookup.extend(sequence.token_ids)
        self._size += lookup.size - before
        while self._size > MOST_TOKENS:
            longest = max(self._lookups.values(), key=lambda each: each.size)
            self._size -= longest.size
            longest.clear()
        return lookup

    def forget(self, sequence: Sequence) -> None:
        """See the base."""
        lookup = self._lookups.pop(sequence.seq_id, None)
        self._size -= 0 if lookup is None else lookup.size


class SuffixProposer(Proposer):
    """From earlier outputs of the same tenant too, the newest first (after Oliaro et al. 2024,
    "SuffixDecoding").

    They hold `MOST_TOKENS` together, the oldest go first. Outputs meet nobody's but their own cache
    namespace's: what others were told shows neither in a draft nor in its time.
    """

    #: Earlier outputs that are searched for one draft.
    MOST_SEARCHED = 32

    def __init__(self, config: SpeculativeConfig) -> None:
        self._own = NgramProposer(config)
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._most = config.suffix_decoding_max_cached_requests
        #: (namespace, number) -> an output and its lookup, oldest first, over all namespaces.
        self._outputs: OrderedDict[tuple[str, int], tuple[list[int], TokenLookup]] = OrderedDict()
        #: Namespace -> the numbers of its outputs, oldest first.
        self._numbers: dict[str, list[int]] = {}
        self._count = 0
        self._size = 0

    def propose(self, sequence: Sequence, count: int) -> Guess:
        """The continuation of the longest run found anywhere; of equals, the sequence's own."""
        tokens = sequence.token_ids
        best = self._own.lookup_of(sequence).find(tokens, tokens)
        source, newest = tokens, tokens[-self._lengths[1] :]
        namespace = _namespace(sequence)
        for number in reversed(self._numbers.get(namespace, [])[-self.MOST_SEARCHED :]):
            if best is not None and best[1] == self._lengths[1]:
                break
            output, lookup = self._outputs[namespace, number]
            found = lookup.find(output, newest)
            if found is not None and (best is None or found[1] > best[1]):
                best, source = found, output
        return _guess(tokens, source, best, count)

    def forget(self, sequence: Sequence) -> None:
        """Keep what it said."""
        self._own.forget(sequence)
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        if not self._most or len(output) <= self._lengths[0]:
            return
        lookup = TokenLookup(*self._lengths)
        lookup.extend(output)
        namespace = _namespace(sequence)
        self._outputs[namespace, self._count] = output, lookup
        self._numbers.setdefault(namespace, []).append(self._count)
        self._count += 1
        self._size += len(output)
        while len(self._outputs) > self._most or self._size > MOST_TOKENS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        (namespace, number), (output, _) = self._outputs.popitem(last=False)
        self._size -= len(output)
        self._numbers[namespace].remove(number)
        if not self._numbers[namespace]:
            del self._numbers[namespace]


def _guess(
    newest: list[int], source: list[int], found: tuple[int, int] | None, count: int
) -> Guess:
    """What stands in `source` where `TokenLookup.find` found what `newest` ends with."""
    if found is None:
        return Guess([], 0)
    at, matched = found
    most = min(MOST_ALIKE, at, len(newest))
    while matched < most and source[at - matched - 1] == newest[-matched - 1]:
        matched += 1
    return Guess(continued(source, at, count), matched)


def _namespace(sequence: Sequence) -> str:
    """Whose outputs may meet: those that may share cached prefixes, of the same adapter."""
    message = sequence.request.message
    digest = message.adapter.digest if message.adapter else ""
    return f"{len(message.cache_namespace)}:{message.cache_namespace}{digest}"


PROPOSERS: dict[str, type[NgramProposer] | type[SuffixProposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
}
