"""Builds `tokenizers` objects from other libraries' vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from engine.contract.errors import ModelLoadError
from engine.text.vocabulary import UNDERLINE, byte_level_token

#: Types of SentencePiece's pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

#: Maximum bytes of a token, as merges take quadratic time; tiktoken's longest one has 128 bytes.
_MAX_TOKEN_LENGTH = 1024


@dataclass(frozen=True)
class SentencePieceVocabulary:
    """A SentencePiece vocabulary.

    Attributes:
        tokens, kinds, scores: one entry per token, by id.
        unknown: the piece for unknown text; None without one.
        byte_fallback: unknown characters become their bytes.
        adds_prefix: a space is added before a text.
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    unknown: str | None
    byte_fallback: bool
    adds_prefix: bool


def sentencepiece_bpe(vocabulary: SentencePieceVocabulary) -> tokenizers.Tokenizer:
    """Build SentencePiece's BPE, in which the scores of pieces determine the order of merges."""
    ids: dict[str, int] = {}
    for index, token in enumerate(vocabulary.tokens):
        ids.setdefault(token, index)
    model = models.BPE(
        vocab=ids,
        merges=_scored_merges(vocabulary, ids),
        unk_token=vocabulary.unknown,
        fuse_unk=True,
        byte_fallback=vocabulary.byte_fallback,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", UNDERLINE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(UNDERLINE), spaces])
        if vocabulary.adds_prefix
        else spaces
    )
    backend.decoder = sentencepiece_decoder(adds_prefix=vocabulary.adds_prefix)
    return backend


def sentencepiece_decoder(*, adds_prefix: bool) -> decoders.Decoder:
    """Build the decoder from pieces to text: `▁` is a space, `<0xE2>` a byte."""
    steps = [decoders.Replace(UNDERLINE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)


def _check_length(token: str | bytes) -> None:
    if len(token) > _MAX_TOKEN_LENGTH:
        raise ModelLoadError(
            f"A token may have at most {_MAX_TOKEN_LENGTH} characters; got {len(token)}."
        )


def _scored_merges(
    vocabulary: SentencePieceVocabulary, ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return every way to join a piece from two others, the best pieces first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    entries = zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True)
    for token, kind, score in entries:
        if kind in (CONTROL, UNKNOWN, UNUSED, BYTE):
            continue
        _check_length(token)
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ids and second in ids:
                ranked.append((-score, ids[first], ids[second], first, second))
    ranked.sort()
    return [(first, second) for *_, first, second in ranked]


def ranked_bpe(ranks: Mapping[bytes, int], pattern: str) -> tokenizers.Tokenizer:
    """Build tiktoken's BPE over bytes.

    Args:
        ranks: token -> id; pairs with smaller ids are merged first.
        pattern: regex for the parts of a text that are encoded separately.
    """
    merges: list[tuple[int, int, int, str, str]] = []
    for token, rank in ranks.items():
        _check_length(token)
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ranks and second in ranks:
                pair = byte_level_token(first), byte_level_token(second)
                merges.append((rank, ranks[first], ranks[second], *pair))
    merges.sort()
    vocabulary = {byte_level_token(token): rank for token, rank in ranks.items()}
    pairs = [(first, second) for *_, first, second in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend
