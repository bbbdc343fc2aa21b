"""`GrammarCache`: the grammars used last, bounded by number and by bytes."""

from __future__ import annotations

from collections import OrderedDict

from engine.structured.grammar import CompiledGrammar
from engine.structured.vocabularies import MOST_KEPT

MAX_ENTRIES = 256
MAX_BYTES = 256 * 2**20
#: What an entry takes beside the grammar itself.
_ENTRY_BYTES = 4096


class GrammarCache:
    """Outcomes by spec: grammars, and reasons why there is none, so that a bad grammar that comes
    again costs nothing. The least recently used leave first. In memory only.
    """

    def __init__(
        self,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        max_vocabularies: int = MOST_KEPT,
    ) -> None:
        """`max_vocabularies`: of adapters."""
        self.max_vocabularies = max_vocabularies
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_queries = 0
        #: By vocabulary and spec.
        self._entries: OrderedDict[tuple[bytes, bytes], CompiledGrammar | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, vocabulary: bytes = b"") -> CompiledGrammar | str | None:
        """The outcome of a spec for a vocabulary, or None when it isn't known."""
        self.num_queries += 1
        found = self._entries.get((vocabulary, key))
        if found is not None:
            self.num_hits += 1
            self._entries.move_to_end((vocabulary, key))
        return found

    def put(self, key: bytes, outcome: CompiledGrammar | str, vocabulary: bytes = b"") -> None:
        """Keep an outcome; one larger than the whole cache isn't kept."""
        size = _size(outcome)
        if (vocabulary, key) in self._entries or size > self.max_bytes:
            return
        self._entries[vocabulary, key] = outcome
        self.num_bytes += size
        while len(self._entries) > self.max_entries or self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))
        self._drop_vocabularies()

    def _drop_vocabularies(self) -> None:
        """Let go of adapters' vocabularies that were used longest ago, with all of their grammars:
        these hold them, and they are large.
        """
        others = list(dict.fromkeys(each for each, _ in reversed(self._entries) if each))
        for old in others[self.max_vocabularies :]:
            for key in [key for key in self._entries if key[0] == old]:
                self._drop(key)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        self.num_bytes -= _size(self._entries.pop(key))


def _size(outcome: CompiledGrammar | str) -> int:
    if isinstance(outcome, str):
        return _ENTRY_BYTES + len(outcome)
    return _ENTRY_BYTES + outcome.num_bytes
