"""Vocabularies of adapters that bring tokens, or a tokenizer that gives rows other texts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.adapters import AdapterRef
from engine.scheduler.sequence import Request
from engine.structured.vocabularies import MODELS, VocabularySource
from engine.text.adapter_tokenizers import AdapterTokenizers
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AdapterVocabulary(VocabularySource):
    """An adapter's. `vocab_size`: of its rows, where it brings tokens; 0: the model's."""

    adapter: AdapterRef

    @property
    def key(self) -> bytes:
        """See `VocabularySource`."""
        return f"{self.adapter.tokenizer}:{self.vocab_size}".encode()

    def tokenizer(self, base: Tokenizer) -> Tokenizer:
        """See `VocabularySource`: files may have to be read for it. Raises `InvalidRequest`."""
        return AdapterTokenizers().of(self.adapter, base)  # kept as a text alone, by who asks


def source_of(request: Request) -> VocabularySource:
    """Of a request, whose adapter is there if it has one."""
    adapter = request.message.adapter
    if adapter is None or not (adapter.tokenizer or request.vocab_size):
        return MODELS
    return AdapterVocabulary(request.vocab_size, adapter)
