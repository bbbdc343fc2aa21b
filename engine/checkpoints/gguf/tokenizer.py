"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoints.gguf.file import Header, corrupt_file_error
from engine.contract.errors import ModelLoadError
from engine.text.bpe_builders import (
    CONTROL,
    USER_DEFINED,
    SentencePieceVocabulary,
    sentencepiece_bpe,
    sentencepiece_decoder,
)
from engine.text.vocabulary import UNDERLINE

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Qwen 3.5's, where combining marks belong to their letters.
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Applied one after the other: numbers, ideographs and kana, then the rest.
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PATTERNS: dict[str, str | tuple[str, ...]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "stablelm2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "tekken": _TEKKEN,
    "deepseek-v3": _DEEPSEEK3,
    "command-r": _GPT2,
    "starcoder": _GPT2,
    "refact": _GPT2,
    "smollm": _GPT2,
}
"""tokenizer.ggml.pre -> the pre-tokenizer's pattern."""
#: Those that normalize text to NFC.
_NORMALIZED = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r", "stablelm2")
#: Those that split digits first.
_DIGITS = ("command-r", "starcoder", "refact", "smollm")
_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")
#: Control tokens that end a turn, whether or not a file assigns them a role.
_ENDS_OF_TURNS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *(
        "<EOT>",
        "_<EOT>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<eos>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "[EOT]",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
    ),
)


class Vocabulary:
    """A file's vocabulary."""

    def __init__(self, header: Header) -> None:
        self._metadata = header.metadata
        self.tokens = self._strings("tokens")
        if not self.tokens:
            raise corrupt_file_error("it has no tokenizer.ggml.tokens")
        kinds = self._metadata.get("tokenizer.ggml.token_type")
        self.kinds = [1] * len(self.tokens) if kinds is None else self._numbers(kinds, int)
        if len(self.kinds) != len(self.tokens):
            raise corrupt_file_error(
                "tokenizer.ggml.token_type has not as many entries as there are tokens"
            )
        # With a duplicate, one of its ids could never be produced.
        self.ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            self.ids.setdefault(token, index)

    def _strings(self, key: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(value, list):
            raise corrupt_file_error(f"tokenizer.ggml.{key} is no list of strings")
        return value

    @staticmethod
    def _numbers(value: Any, kind: type) -> list[Any]:
        if not isinstance(value, np.ndarray) or not np.isfinite(value).all():
            raise corrupt_file_error("what should be a list of numbers is none")
        return [kind(number) for number in value]

    @property
    def merges(self) -> list[tuple[str, str]]:
        """BPE merges in order of priority."""
        pairs = [tuple(merge.split(" ")) for merge in self._strings("merges")]
        if any(len(pair) != 2 for pair in pairs):
            raise corrupt_file_error("an entry of tokenizer.ggml.merges is no pair")
        ids = self.ids
        return [
            (first, second)
            for first, second in pairs
            if first in ids and second in ids and first + second in ids
        ]

    @property
    def scores(self) -> list[float]:
        """SentencePiece's scores, one per token."""
        value = self._metadata.get("tokenizer.ggml.scores")
        scores = [] if value is None else self._numbers(value, float)
        if len(scores) != len(self.tokens):
            raise corrupt_file_error(
                "tokenizer.ggml.scores has not as many entries as there are tokens"
            )
        return scores

    def token(self, role: str) -> str | None:
        """Return the token with a role ("bos", "eos", ...), or None if the file names none."""
        index = self.token_id(role)
        return None if index is None else self.tokens[index]

    def token_id(self, role: str) -> int | None:
        """Return its id. Raises `ModelLoadError` if it isn't in the vocabulary."""
        index = self._metadata.get(f"tokenizer.ggml.{role}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise corrupt_file_error(f"tokenizer.ggml.{role}_token_id is {index!r}")
        return index

    def metadata_flag(self, key: str, default: bool) -> bool:
        """Return a boolean. Raises `ModelLoadError` for another type."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, (bool, int)):
            raise corrupt_file_error(f"tokenizer.ggml.{key} is neither true nor false")
        return bool(value)

    @property
    def added(self) -> Iterable[AddedToken]:
        """Added tokens, which are matched before the text is split."""
        for token, kind in zip(self.tokens, self.kinds, strict=True):
            if kind in (CONTROL, USER_DEFINED):
                yield AddedToken(token, special=kind == CONTROL, normalized=False)


def make_tokenizer(header: Header) -> tokenizers.Tokenizer:
    """Make the tokenizer. Raises `ModelLoadError` for an unknown kind."""
    vocabulary = Vocabulary(header)
    kind = header.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama", "gemma4"):
        raise ModelLoadError(
            f"tokenizer.ggml.model is {kind!r}; gpt2, llama and gemma4 are read. "
            "Name the model's tokenizer folder with --tokenizer.",
            param="tokenizer",
        )
    try:
        if kind == "gpt2":
            tokenizer, with_bos = _byte_level(vocabulary, header.metadata.get("tokenizer.ggml.pre"))
        else:
            read = _sentencepiece if kind == "llama" else _gemma4
            tokenizer, with_bos = read(vocabulary), True
        tokenizer.add_tokens(list(vocabulary.added))
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise corrupt_file_error(f"its tokenizer can't be made: {error}") from error
    bos, eos = vocabulary.token("bos"), vocabulary.token("eos")
    prefix = [bos] if bos and vocabulary.metadata_flag("add_bos_token", with_bos) else []
    suffix = [eos] if eos and vocabulary.metadata_flag("add_eos_token", False) else []
    if prefix or suffix:
        tokens = dict.fromkeys((*prefix, *suffix))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A", *suffix],
            pair=[*prefix, "$A", *suffix, "$B:1", *(f"{token}:1" for token in suffix)],
            special_tokens=[(token, vocabulary.ids[token]) for token in tokens],
        )
    return tokenizer


def tokenizer_config(header: Header) -> dict[str, Any]:
    """Return tokenizer_config.json: the special tokens and the chat template."""
    vocabulary = Vocabulary(header)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {
        f"{role}_token": vocabulary.token(key)
        for role, key in roles.items()
        if vocabulary.token(key) is not None
    }
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    names = header.metadata.get("tokenizer.chat_templates")
    named = {
        name: header.metadata.get(f"tokenizer.chat_template.{name}")
        for name in (names if isinstance(names, list) else [])
    }
    if any(isinstance(source, str) for source in named.values()):
        templates = {"default": template, **named}
        config["chat_template"] = [
            {"name": name, "template": source}
            for name, source in templates.items()
            if isinstance(source, str)
        ]
    return config


def eos_token_ids(header: Header) -> list[int]:
    """Return the tokens that end an output: end of text and end of turn."""
    vocabulary = Vocabulary(header)
    roles = [vocabulary.token_id(role) for role in ("eos", "eot", "eom")]
    by_text = {
        token: index
        for token in _ENDS_OF_TURNS
        if (index := vocabulary.ids.get(token)) is not None and vocabulary.kinds[index] == CONTROL
    }
    if {"<|return|>", "<|call|>"} <= by_text.keys():
        by_text.pop("<|end|>", None)  # gpt-oss: ends a message, not the turn
    return list(dict.fromkeys(index for index in (*roles, *by_text.values()) if index is not None))


def _byte_level(vocabulary: Vocabulary, cut: Any) -> tuple[tokenizers.Tokenizer, bool]:
    """Make a byte-level BPE as GPT-2's; also return whether texts begin with BOS."""
    pattern = _PATTERNS.get("default" if cut is None else str(cut))
    if pattern is None:
        raise ModelLoadError(
            f"tokenizer.ggml.pre is {cut!r}, which isn't known (known: {', '.join(_PATTERNS)}). "
            "Name the model's tokenizer folder with --tokenizer.",
            param="tokenizer",
        )
    model = models.BPE(
        vocab=vocabulary.ids, merges=vocabulary.merges, ignore_merges=cut in _WITH_BOS
    )
    tokenizer = tokenizers.Tokenizer(model)
    if cut in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    digits = [pre_tokenizers.Digits(individual_digits=True)] if cut in _DIGITS else []
    patterns = (pattern,) if isinstance(pattern, str) else pattern
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *digits,
            *(pre_tokenizers.Split(Regex(part), behavior="isolated") for part in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut in _WITH_BOS


def _gemma4(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Make a BPE over characters with `▁` for spaces and byte fallback."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=vocabulary.merges,
            unk_token=vocabulary.token("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", UNDERLINE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    tokenizer.decoder = sentencepiece_decoder(adds_prefix=False)
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Make a SentencePiece BPE."""
    return sentencepiece_bpe(
        SentencePieceVocabulary(
            vocabulary.tokens,
            vocabulary.kinds,
            vocabulary.scores,
            unknown=vocabulary.token("unknown"),
            byte_fallback=True,
            adds_prefix=vocabulary.metadata_flag("add_space_prefix", True),
        )
    )
