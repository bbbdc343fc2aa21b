"""Where drafts come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

from engine.contract.speculative import SpeculativeConfig
from engine.scheduler import Sequence
from engine.speculative.lookup import TokenLookup, continued


class Proposer(ABC):
    """Guesses at the tokens that follow a sequence's newest one."""

    @abstractmethod
    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """At most `count` tokens; none where it has no idea."""

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """The sequence has left."""


class NgramProposer(Proposer):
    """From the sequence's own prompt and output."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._lookups: dict[int, TokenLookup] = {}

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """See the base."""
        tokens = sequence.token_ids
        found = self.lookup_of(sequence).find(tokens, tokens)
        return [] if found is None else continued(tokens, found[0], count)

    def lookup_of(self, sequence: Sequence) -> TokenLookup:
        """The sequence's own, up to date."""
        lookup = self._lookups.get(sequence.seq_id)
        if lookup is None:
            lookup = self._lookups[sequence.seq_id] = TokenLookup(*self._lengths)
        lookup.extend(sequence.token_ids)
        return lookup

    def forget(self, sequence: Sequence) -> None:
        """See the base."""
        self._lookups.pop(sequence.seq_id, None)


class SuffixProposer(Proposer):
    """From earlier outputs of the same tenant too, the newest first (after Oliaro et al. 2024,
    "SuffixDecoding").

    Outputs meet nobody's but their own cache namespace's: what others were told shows neither in a
    draft nor in its time.
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

    def propose(self, sequence: Sequence, count: int) -> list[int]:
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
        return [] if best is None else continued(source, best[0], count)

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
        if len(self._outputs) > self._most:
            (oldest, number), _ = self._outputs.popitem(last=False)
            self._numbers[oldest].remove(number)
            if not self._numbers[oldest]:
                del self._numbers[oldest]


def _namespace(sequence: Sequence) -> str:
    """Whose outputs may meet: those that may share cached prefixes, of the same adapter."""
    message = sequence.request.message
    digest = message.adapter.digest if message.adapter else ""
    return f"{len(message.cache_namespace)}:{message.cache_namespace}{digest}"


PROPOSERS: dict[str, type[NgramProposer] | type[SuffixProposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
}
