"""`GrammarCache`: the grammars used last, bounded by number and by bytes."""

from __future__ import annotations

from collections import OrderedDict

from engine.structured.grammar import CompiledGrammar

MAX_ENTRIES = 256
MAX_BYTES = 256 * 2**20
#: What an entry takes beside the grammar itself.
_ENTRY_BYTES = 4096


class GrammarCache:
    """Outcomes by spec: grammars, and reasons why there is none, so that a bad grammar that comes
    again costs nothing. The least recently used leave first. In memory only.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_queries = 0
        self._entries: OrderedDict[bytes, CompiledGrammar | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> CompiledGrammar | str | None:
        """The outcome of a spec, or None when it isn't known."""
        self.num_queries += 1
        found = self._entries.get(key)
        if found is not None:
            self.num_hits += 1
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, outcome: CompiledGrammar | str) -> None:
        """Keep an outcome; one larger than the whole cache isn't kept."""
        size = _size(outcome)
        if key in self._entries or size > self.max_bytes:
            return
        self._entries[key] = outcome
        self.num_bytes += size
        while len(self._entries) > self.max_entries or self.num_bytes > self.max_bytes:
            _, old = self._entries.popitem(last=False)
            self.num_bytes -= _size(old)


def _size(outcome: CompiledGrammar | str) -> int:
    if isinstance(outcome, str):
        return _ENTRY_BYTES + len(outcome)
    return _ENTRY_BYTES + outcome.num_bytes
