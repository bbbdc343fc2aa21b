"""`Tokenizer`: text to token ids and back, using only a model folder's files. Torch-free."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import tokenizers

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.text.chat_messages import without_surrogates
from engine.text.tokenizer_backend import (
    decode,
    encode,
    encode_ids,
    load_backend,
    with_special_tokens,
    without_special_tokens,
)
from engine.text.tokenizer_files import TokenizerSettings, read_settings
from engine.text.vocabulary import ByteDecoder, byte_decoder


class EncodedPair(NamedTuple):
    """Token ids; `second_segment`: index of the first token of type 1, 0 without one."""

    token_ids: list[int]
    second_segment: int = 0


def encode_pair(
    backend: tokenizers.Tokenizer,
    first: str,
    second: str | None,
    limit: int | None,
    add_special_tokens: bool,
    side: str = "right",
) -> EncodedPair:
    """Return token ids of a text, or of two with what the model puts between and around them.

    Args:
        limit: maximum number of tokens; the texts are truncated (of two the longer one first, as
            in the tokenizers library's `longest_first`), special tokens stay. None: no limit.
        side: side where texts are truncated: "right" or "left".

    Raises `InvalidRequest` when the special tokens alone exceed the limit.
    """
    one = encode(backend, first, add_special_tokens=False)
    two = None if second is None else encode(backend, second, add_special_tokens=False)
    if limit is not None:
        special = backend.num_special_tokens_to_add(two is not None) if add_special_tokens else 0
        limits = _split_limit(
            len(one.ids), 0 if two is None else len(two.ids), max_pair_tokens(limit, special)
        )
        one.truncate(limits[0], direction=side)
        if two is not None:
            two.truncate(limits[1], direction=side)
    encoding = backend.post_process(one, two, add_special_tokens)
    types: list[int] = encoding.type_ids
    return EncodedPair(encoding.ids, types.index(1) if 1 in types else 0)


def max_pair_tokens(limit: int, special: int) -> int:
    """Return the number of tokens left besides special ones. Raises `InvalidRequest` for none."""
    if limit <= special:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be over {special}: so many special tokens are added.",
            param="truncate_prompt_tokens",
        )
    return limit - special


def shortened_text(backend: tokenizers.Tokenizer, text: str, limit: int) -> str:
    """Return the beginning of `text` with at most `limit` tokens, without counting special ones.

    At least one character stays, however many tokens it has. The beginning is tokenized again,
    since its tokens may differ from those within the full text.
    """
    while len(text) > 1:
        encoding = encode(backend, text, add_special_tokens=False, offsets=True)
        if len(encoding.ids) <= limit:
            break
        end = min(encoding.offsets[limit - 1][1], encoding.offsets[limit][0])
        text = text[: max(1, min(end, len(text) - 1))]
    return text


def _split_limit(first: int, second: int, limit: int) -> tuple[int, int]:
    """Return the number of tokens to keep of two texts; the longer one is truncated first."""
    if first + second <= limit:
        return first, second
    short, long = sorted((first, second))
    long = short if short > limit else max(short, limit - short)
    if short + long > limit:
        short, long = limit // 2, limit - limit // 2
    return (short, long) if first <= second else (long, short)


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model folder, from `tokenizer.json` and related files.

    A folder's Python code (`auto_map`) is never run here, whatever `trust_remote_code` is: only
    `engine.text.tokenizer_folder`, for folders without `tokenizer.json`, can run it.

    Raises:
        ModelLoadError: a file is missing or invalid; it names the file.
    """
    folder = Path(path)
    settings = read_settings(folder)
    return Tokenizer(load_backend(folder, settings), settings)


class AddedEntry(NamedTuple):
    """An added token's id, and whether it absorbs the spaces to its left and right."""

    id: int
    lstrip: bool
    rstrip: bool


class Tokenizer:
    """A model's tokenizer. Thread-safe.

    Attributes:
        settings: settings in the files besides `tokenizer.json`.
        special_token_ids: ids that `skip_special_tokens` leaves out.
        special_tokens: their texts.
        control_tokens: special tokens, and added ones that the chat template writes (such as
            `<tool_call>`): in a user's text they are ordinary characters.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        self.settings = settings
        self._backend = backend
        self._lock = threading.Lock()
        self._text_backends: dict[bool, tokenizers.Tokenizer] = {}
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        #: Tokens outside the model's vocabulary, special or not, by id.
        self.added_tokens: dict[int, str] = {i: token.content for i, token in added.items()}
        self._by_text = {
            token.content: AddedEntry(i, token.lstrip, token.rstrip) for i, token in added.items()
        }
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens = frozenset(self.added_tokens[i] for i in self.special_token_ids)
        self.control_tokens = self.special_tokens | self._template_tokens()

    def with_chat_template(self, source: str) -> Tokenizer:
        """Return a tokenizer with this chat template instead of all of the folder's."""
        return Tokenizer(self._backend, replace(self.settings, chat_templates={"default": source}))

    def with_tokens(self, tokens: Sequence[tuple[int, tokenizers.AddedToken]]) -> Tokenizer:
        """Return a tokenizer with tokens added at these ids, which follow its own; existing tokens
        stay.

        Raises `ModelLoadError` for a token that can't have its id.
        """
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        new = [token for _, token in tokens if backend.token_to_id(token.content) is None]
        # In groups, since each addition processes all existing tokens.
        for special, run in groupby(new, key=lambda token: bool(token.special)):
            (backend.add_special_tokens if special else backend.add_tokens)(list(run))
        for token_id, token in tokens:
            if (actual_id := backend.token_to_id(token.content)) != token_id:
                raise ModelLoadError(
                    f"The token {token.content[:80]!r} can't be added at {token_id}: here it is "
                    f"{actual_id}.",
                    param="tokenizer",
                )
        return Tokenizer(backend, self.settings)

    def _template_tokens(self) -> frozenset[str]:
        """Return added, non-special tokens that look like markup and occur in a chat template."""
        source = "\0".join(self.settings.chat_templates.values())
        return frozenset(
            text
            for text in self.added_tokens.values()
            if len(text) > 1 and not text[0].isalnum() and not text.isspace() and text in source
        )

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return token ids of `text`.

        Args:
            text: lone surrogates are read as U+FFFD.
            add_special_tokens: add the tokens that the model expects around a text (usually BOS).
            parse_special: encode control tokens in the text as such; False: as characters.
            max_tokens: maximum useful length: a text that is far longer isn't read to its end.
                None: a million.

        Raises:
            InvalidRequest: `text` isn't a string. ContextLengthExceeded: it is far too long.
        """
        if not isinstance(text, str):
            raise InvalidRequest(
                f"text must be a string, got {type(text).__name__}.", param="prompt"
            )
        text = without_surrogates(text)
        if parse_special:
            return encode_ids(
                self._backend, text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
        ids = self.encode_as_text(text, max_tokens=max_tokens)
        return self.wrapped(ids) if add_special_tokens else ids

    def encode_parts(
        self,
        first: str,
        second: str | None = None,
        *,
        limit: int | None = None,
        add_special_tokens: bool = True,
        side: str = "right",
    ) -> EncodedPair:
        """Return a text, or a pair of texts, within a limit; see `encode_pair`."""
        texts = without_surrogates(first), None if second is None else without_surrogates(second)
        return encode_pair(self._backend, *texts, limit, add_special_tokens, side)

    def shortened(self, text: str, limit: int) -> str:
        """Return the beginning of `text` with at most `limit` (>= 1) tokens."""
        return shortened_text(self._backend, without_surrogates(text), limit)

    def encode_as_text(
        self, text: str, *, inside: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Return token ids of `text` with every control token encoded as ordinary characters.

        `inside`: the text follows other text, so it gets no prefix space.
        `max_tokens`: see `encode`, also for errors.
        """
        ids = encode_ids(
            self._text_backend(inside), text, add_special_tokens=False, max_tokens=max_tokens
        )
        return ids if self._never_from_text.isdisjoint(ids) else self._broken_up(text, inside)

    def _broken_up(self, text: str, inside: bool) -> list[int]:
        """Return token ids of `text` if the model's vocabulary merges characters into special
        tokens: the text is split after the first character of each special token.
        """
        ids: list[int] = []
        waiting = [text]
        while waiting:
            chunk = waiting.pop()
            backend = self._text_backend(inside)
            encoding = encode(backend, chunk, add_special_tokens=False, offsets=True)
            cuts = [
                self._cut(chunk, *offsets)
                for token, offsets in zip(encoding.ids, encoding.offsets, strict=True)
                if token in self._never_from_text
            ]
            if cuts:
                parts = pairwise([0, *cuts, len(chunk)])
                waiting += reversed([chunk[start:end] for start, end in parts])
            else:
                ids += encoding.ids
                inside = True
        return ids

    @staticmethod
    def _cut(text: str, start: int, end: int) -> int:
        if end - start < 2:
            raise InvalidRequest(
                f"The text holds {text[start:end]!r}, which this model can't read as text.",
                param="prompt",
            )
        return start + 1

    def _text_backend(self, inside: bool) -> tokenizers.Tokenizer:
        """The tokenizer without control tokens, created at its first use."""
        with self._lock:
            if inside not in self._text_backends:
                copy = without_special_tokens(self._backend, self.control_tokens, inside=inside)
                self._text_backends[inside] = copy
            return self._text_backends[inside]

    @cached_property
    def _never_from_text(self) -> frozenset[int]:
        """Ids that plain text must not become: special ones except the unknown token."""
        unknown = self._token_id(self.settings.named_tokens.get("unk_token"))
        return self.special_token_ids - {unknown}

    def wrapped(self, ids: list[int]) -> list[int]:
        """Return `ids` with the special tokens that the model expects around a text."""
        return with_special_tokens(self._backend, ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD, unknown ids are skipped.

        Raises:
            InvalidRequest: an id is negative or not an integer.
            EngineFault: the tokenizer's decoder fails.
        """
        token_ids = self._checked(ids)
        rules = self.byte_rules
        if rules is None:
            return decode(self._backend, token_ids, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token not in self.special_token_ids]
        return self.join_bytes(token_ids, at_start=True).decode("utf-8", "replace")

    def join_bytes(self, ids: Sequence[int], *, at_start: bool) -> bytes:
        """Return the concatenated bytes of `ids`; only for tokenizers with `byte_rules`."""
        if not at_start or self.byte_rules is None or not self.byte_rules.strip_first:
            return b"".join(map(self.token_bytes, ids))
        for k, token in enumerate(ids):
            piece = self.id_to_piece(token)
            if piece:
                head = self.byte_rules.first_bytes(piece)
                return head + b"".join(map(self.token_bytes, ids[k + 1 :]))
        return b""

    def decode_window(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decode with the library, for tokenizers without `byte_rules`."""
        return decode(self._backend, ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text that has begun; b"" for unknown ids."""
        data = self._bytes.get(token_id)
        if data is None:
            rules = self.byte_rules or ByteDecoder()
            data = self._bytes[token_id] = rules.to_bytes(self.id_to_piece(token_id))
        return data

    def token_text(self, token_id: int) -> str:
        """Return a single token as text, for display: partial characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_to_piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling (such as `Ġhello`); "" for unknown ids."""
        return self._backend.id_to_token(token_id) or ""

    def piece_to_id(self, piece: str) -> int | None:
        """Return the id of a vocabulary entry, or None."""
        return self._backend.token_to_id(piece)

    @cached_property
    def byte_rules(self) -> ByteDecoder | None:
        """Rules for decoding pieces to bytes; None if only sequences can be decoded."""
        return byte_decoder(json.loads(self._backend.to_str())["decoder"])

    @staticmethod
    def _checked(ids: Iterable[int]) -> list[int]:
        token_ids = list(ids)
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**32:
                raise InvalidRequest(f"{token!r} is no token id.", param="tokens")
        return token_ids

    def to_json(self) -> str:
        """Return a `tokenizer.json` for this tokenizer, including declared tokens."""
        return self._backend.to_str()

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, if the files name one."""
        return self._token_id(self.settings.named_tokens.get("eos_token"))

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token, if the files name one."""
        return self._token_id(self.settings.named_tokens.get("bos_token"))

    @property
    def chat_template(self) -> str | None:
        """The ordinary chat template's Jinja source, if the folder has one."""
        return self.settings.chat_templates.get("default")

    def added_token(self, text: str) -> AddedEntry:
        """Return the added token with this text. Raises KeyError for others."""
        return self._by_text[text]

    def _token_id(self, text: str | None) -> int | None:
        return None if text is None else self._backend.token_to_id(text)
