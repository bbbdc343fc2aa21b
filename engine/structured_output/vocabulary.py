"""`Vocabularies`: the tokens that grammars are for, a model's or those of one of its adapters.

An adapter may bring tokens, and a tokenizer that gives them, or rows that the model has to spare,
other texts. Its grammars are compiled against these.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from engine.contract.errors import InvalidRequest
from engine.contract.lora import AdapterRef
from engine.scheduler.request import Request
from engine.structured_output.backend_llguidance import Vocabulary, available, words_for
from engine.structured_output.grammar import CompiledGrammar
from engine.text.adapter_tokenizers import AdapterTokenizers
from engine.text.tokenizer import Tokenizer

PARAM = "structured_outputs"
#: Maximum cached vocabularies of adapters, each of which takes megabytes.
MAX_CACHED = 4
#: Texts of tokens that an adapter may add to the model's, in all: a grammar's backend takes many
#: times as much for them.
MAX_TEXT_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Whose tokens a grammar is for: the model's, unless a subclass says otherwise.

    Attributes:
        vocab_size: columns of the logits; 0: the model's.
    """

    vocab_size: int

    @property
    def key(self) -> bytes:
        """Names their content; b"": the model's."""
        return b""

    def tokenizer(self, base: Tokenizer) -> Tokenizer:
        """Return the tokenizer for their texts; `base` is the model's."""
        return base


#: The model's own.
BASE_MODEL = TokenizerSource(0)


class Vocabularies:
    """A model's and its adapters'. Any thread may ask.

    Args:
        tokenizer: None where the engine runs on token ids alone; then there are none.
        vocab_size: width of the model's logits.
        eos_token_ids: what ends an output of the model's.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._cached: OrderedDict[bytes, Vocabulary] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_words(self) -> int:
        """int32 words of a mask of the model's tokens."""
        return words_for(max(self._vocab_size, self.check().vocab_size))

    @property
    def models(self) -> Vocabulary:
        """The model's. Raises `InvalidRequest` where it can't have grammars."""
        return self._build(self.check(), self._vocab_size, self.eos_token_ids)

    def check(self) -> Tokenizer:
        """The model's tokenizer. Raises `InvalidRequest` where it can't have grammars."""
        if self._tokenizer is None:
            raise _lacking("This model", "tokenizer")
        if not self.eos_token_ids:
            raise _lacking("This model", "end-of-sequence token")
        if not available():
            raise InvalidRequest("Structured output isn't installed here.", param=PARAM)
        return self._tokenizer

    def get(self, source: TokenizerSource) -> Vocabulary:
        """An adapter's: files may have to be read for it.

        Raises `InvalidRequest` where they can't be read, or no grammar is possible with them.
        """
        with self._lock:
            vocabulary = self._cached.get(source.key)
        if vocabulary is None:
            vocabulary = self._read(source)
        with self._lock:
            self._cached[source.key] = vocabulary
            self._cached.move_to_end(source.key)
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return vocabulary

    def _read(self, source: TokenizerSource) -> Vocabulary:
        base, size = self.check(), source.vocab_size or self._vocab_size
        tokenizer = source.tokenizer(base)
        added = sum(len(text.encode()) for text in tokenizer.added_tokens.values())
        if added > MAX_TEXT_BYTES + sum(len(text.encode()) for text in base.added_tokens.values()):
            raise InvalidRequest(
                f"The adapter's tokenizer adds texts of {added} bytes; at most {MAX_TEXT_BYTES} "
                "are taken for structured output.",
                param=PARAM,
            )
        ends = [*self.eos_token_ids, tokenizer.eos_token_id]
        eos = dict.fromkeys(token for token in ends if token is not None and token < size)
        if not eos:
            raise _lacking("The adapter", "end-of-sequence token")
        return self._build(tokenizer, size, tuple(eos))

    @staticmethod
    def _build(tokenizer: Tokenizer, size: int, eos: tuple[int, ...]) -> Vocabulary:
        return Vocabulary(tokenizer.to_json(), max(size, tokenizer.vocab_size), eos)


def _lacking(whose: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{whose} has no {what}, which structured output needs.", param=PARAM)


@dataclass(frozen=True, slots=True)
class AdapterVocabulary(TokenizerSource):
    """An adapter's. `vocab_size`: of its rows, where it brings tokens; 0: the model's."""

    adapter: AdapterRef

    @property
    def key(self) -> bytes:
        return f"{self.adapter.tokenizer}:{self.vocab_size}".encode()

    def tokenizer(self, base: Tokenizer) -> Tokenizer:
        """See `TokenizerSource`: files may have to be read for it. Raises `InvalidRequest`."""
        return AdapterTokenizers().get(self.adapter, base)  # kept as a text alone, by who asks


def source_of(request: Request) -> TokenizerSource:
    """Return the vocabulary of a request, whose adapter must be loaded if it has one."""
    adapter = request.message.adapter
    if adapter is None or not (adapter.tokenizer or request.vocab_size):
        return BASE_MODEL
    return AdapterVocabulary(request.vocab_size, adapter)


MAX_ENTRIES = 256
MAX_BYTES = 256 * 2**20
#: Size of an entry in addition to the grammar itself.
_ENTRY_BYTES = 4096


class GrammarCache:
    """Outcomes by spec: grammars, and reasons why there is none, so that a bad grammar that comes
    again costs nothing. The least recently used leave first. In memory only.
    """

    def __init__(
        self,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        max_vocabularies: int = MAX_CACHED,
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
        outcome = self._entries.get((vocabulary, key))
        if outcome is not None:
            self.num_hits += 1
            self._entries.move_to_end((vocabulary, key))
        return outcome

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
        keys = list(
            dict.fromkeys(vocabulary for vocabulary, _ in reversed(self._entries) if vocabulary)
        )
        for old in keys[self.max_vocabularies :]:
            for key in [key for key in self._entries if key[0] == old]:
                self._drop(key)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        self.num_bytes -= _size(self._entries.pop(key))


def _size(outcome: CompiledGrammar | str) -> int:
    if isinstance(outcome, str):
        return _ENTRY_BYTES + len(outcome)
    return _ENTRY_BYTES + outcome.num_bytes
