"""Builds `tokenizer.json` from vocabulary files of SentencePiece, tiktoken and Mistral.

What the Python code of such folders would add (special tokens, a prefix) is in a table here; no
code in a folder is run. code of a folder runs.
"""

from __future__ import annotations

import base64
import binascii
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, normalizers, processors

from engine.contract.errors import ModelLoadError
from engine.text.bpe_builders import (
    CONTROL,
    USER_DEFINED,
    SentencePieceVocabulary,
    ranked_bpe,
    sentencepiece_bpe,
)
from engine.text.tokenizer_files import (
    CONFIG_FILE,
    parse_object,
    read_object,
    read_text,
    truncate_for_message,
)
from engine.text.vocabulary import UNDERLINE

SENTENCEPIECE_FILE, TEKKEN_FILE = "tokenizer.model", "tekken.json"
#: Maximum bytes of a vocabulary file; the largest have 5 million.
_MAX_BYTES = 1 << 26

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


#: tiktoken's cl100k skips the id after its last rank.
_PHI3_SMALL_TOKENS = (
    *("<|unused_100256|>", "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|dummy_id_0|>", "<|dummy_id_1|>", "<|end|>"),
    *(f"<|dummy_id_{number}|>" for number in range(2, 11)),
    "<|endofprompt|>",
    *(f"<|dummy_id_{number}|>" for number in range(12, 87)),
)
_QWEN_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|extra_{number}|>" for number in range(205)),
)
_CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)


@dataclass(frozen=True)
class _Rule:
    """The behavior of a tokenizer's Python code beyond its vocabulary file.

    Attributes:
        file: the vocabulary's file name.
        pattern: tiktoken's regex for splitting text; "": the file is SentencePiece's.
        appended: special tokens after the file's last one.
        prefix: tokens before every text.
        named: roles that tokenizer_config.json may omit.
        adds_bos: whether a text begins with BOS if tokenizer_config.json doesn't say.
    """

    file: str = SENTENCEPIECE_FILE
    pattern: str = ""
    appended: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    named: Mapping[str, str] | None = None
    adds_bos: bool = False


_LLAMA = _Rule(adds_bos=True, named={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
#: By `tokenizer_class` in tokenizer_config.json.
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        (
            *("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "YiTokenizer"),
            *("BaichuanTokenizer", "InternLMTokenizer", "InternLM2Tokenizer", "OrionTokenizer"),
        ),
        _LLAMA,
    ),
    "ChatGLMTokenizer": _Rule(
        appended=_CHATGLM_TOKENS,
        prefix=("[gMASK]", "sop"),
        named={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"},
    ),
    "ChatGLM4Tokenizer": _Rule(
        pattern=_CL100K, prefix=("[gMASK]", "<sop>"), named={"eos_token": "<|endoftext|>"}
    ),
    "QWenTokenizer": _Rule(
        file="qwen.tiktoken",
        pattern=_QWEN,
        appended=_QWEN_TOKENS,
        named={"eos_token": "<|endoftext|>"},
    ),
    "Phi3SmallTokenizer": _Rule(
        file="cl100k_base.tiktoken",
        pattern=_CL100K,
        appended=_PHI3_SMALL_TOKENS,
        named={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "TikTokenTokenizer": _Rule(file="tiktoken.model", pattern=_KIMI),
}
#: For unknown classes: file names that only one format uses.
_BY_FILE = {
    "qwen.tiktoken": _RULES["QWenTokenizer"],
    "cl100k_base.tiktoken": _RULES["Phi3SmallTokenizer"],
}


def write_tokenizer(folder: Path, destination: Path) -> bool:
    """Write `tokenizer.json` and related files; return False for an unknown kind of folder.

    Raises `ModelLoadError` for an invalid file.
    """
    config = read_object(folder / CONFIG_FILE)
    if (folder / TEKKEN_FILE).is_file():
        rule, path = None, folder / TEKKEN_FILE
    else:
        rule = _rule_of(folder, config)
        if rule is None:
            return False
        path = folder / rule.file
    if path.stat().st_size > _MAX_BYTES:
        raise ModelLoadError(f"{path} must have at most {_MAX_BYTES} bytes.")
    try:
        if rule is None:
            backend, named = _read_tekken(path)
        else:
            backend, named = _read(path, rule, config), dict(rule.named or {})
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises nothing more specific for invalid files
        raise ModelLoadError(
            f"{path} is no vocabulary that can be read: {truncate_for_message(error)}."
        ) from error
    destination.mkdir(parents=True, exist_ok=True)
    backend.save(str(destination / "tokenizer.json"))
    for path in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        if path.is_file():
            shutil.copy(path, destination)
    vocabulary = set(backend.get_vocab())
    named = {role: token for role, token in named.items() if token in vocabulary}
    written = named | {name: value for name, value in config.items() if value is not None}
    (destination / CONFIG_FILE).write_text(json.dumps(written), encoding="utf-8")
    return True


def _rule_of(folder: Path, config: Mapping[str, Any]) -> _Rule | None:
    name = str(config.get("tokenizer_class") or "")
    rule = _RULES.get(name)
    if name == "ChatGLMTokenizer" and _is_text(folder / SENTENCEPIECE_FILE):
        rule = _RULES["ChatGLM4Tokenizer"]
    if rule is None and not name:
        rule = next((rule for file, rule in _BY_FILE.items() if (folder / file).is_file()), None)
        if rule is None and (folder / SENTENCEPIECE_FILE).is_file():
            rule = _LLAMA
    return rule if rule is not None and (folder / rule.file).is_file() else None


def _is_text(path: Path) -> bool:
    """Whether a vocabulary consists of tiktoken's lines instead of SentencePiece's message."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline(256).endswith(b" 0\n")


def _read(path: Path, rule: _Rule, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    if rule.pattern:
        backend = ranked_bpe(_tiktoken_ranks(path), rule.pattern)
    else:
        backend = _sentencepiece(path)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in rule.appended])
    _add_declared(backend, config, path)
    prefix = list(rule.prefix)
    bos = _text(config.get("bos_token")) or (rule.named or {}).get("bos_token")
    adds_bos = config.get("add_bos_token")
    if bos and (rule.adds_bos if adds_bos is None else adds_bos):
        prefix.insert(0, bos)
    eos = _text(config.get("eos_token")) or (rule.named or {}).get("eos_token")
    suffix = [eos] if eos and config.get("add_eos_token") else []
    _add_frame(backend, prefix, suffix)
    return backend


def _text(token: Any) -> str | None:
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else None


def _add_frame(backend: tokenizers.Tokenizer, prefix: list[str], suffix: list[str]) -> None:
    """Add tokens around each text, if the vocabulary has them."""
    ids = {token: backend.token_to_id(token) for token in (*prefix, *suffix)}
    prefix = [token for token in prefix if ids[token] is not None]
    suffix = [token for token in suffix if ids[token] is not None]
    if prefix or suffix:
        backend.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A", *suffix],
            pair=[*prefix, "$A", *suffix, *(f"{token}:1" for token in prefix), "$B:1"]
            + [f"{token}:1" for token in suffix],
            special_tokens=[(token, ids[token]) for token in dict.fromkeys((*prefix, *suffix))],
        )


def _add_declared(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Add the tokens of `added_tokens_decoder` after the vocabulary's end."""
    declared = config.get("added_tokens_decoder") or {}
    for index, entry in sorted((int(key), value) for key, value in declared.items()):
        token = str(entry["content"])
        add = backend.add_special_tokens if entry.get("special") else backend.add_tokens
        add([AddedToken(token, special=bool(entry.get("special")), normalized=False)])
        if backend.token_to_id(token) != index:
            raise ModelLoadError(
                f"{path}: {token!r} must have id {index}, as added_tokens_decoder says; got "
                f"{backend.token_to_id(token)}."
            )


def _tiktoken_ranks(path: Path) -> dict[bytes, int]:
    """Parse lines of a base64 token and its id. Raises `ModelLoadError`."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelLoadError(
                f"{path}: line {number} must be a token in base64 and its number."
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelLoadError(f"{path}: its numbers must run from 0, without gaps.")
    return ranks


def _read_tekken(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Build Mistral's tekken.json: special tokens first, then bytes by rank."""
    data = parse_object(read_text(path), path)
    try:
        settings = data["config"]
        num_special = int(settings["default_num_special_tokens"])
        if not 0 <= num_special <= len(data["vocab"]):
            raise ValueError(f"default_num_special_tokens: {num_special}")
        count = int(settings["default_vocab_size"]) - num_special
        ranks = {
            base64.b64decode(entry["token_bytes"]): int(entry["rank"])
            for entry in data["vocab"][:count]
        }
        special = _tekken_special(data, num_special)
        backend = ranked_bpe(ranks, str(settings["pattern"]))
        backend = _shifted(backend, special)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path} has a malformed entry: {error!r}.") from error
    _add_frame(backend, ["<s>"], [])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return backend, named


def _tekken_special(data: Mapping[str, Any], count: int) -> list[str]:
    tokens = {
        int(entry["rank"]): str(entry["token_str"]) for entry in data.get("special_tokens") or []
    }
    if not tokens:  # files before version 7
        names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"]
        names += ["[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"]
        names += ["[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"]
        tokens = dict(enumerate(names))
    return [tokens.get(index, f"<SPECIAL_{index}>") for index in range(count)]


def _shifted(backend: tokenizers.Tokenizer, special: list[str]) -> tokenizers.Tokenizer:
    """Return the tokenizer with special tokens in front, which shifts all other ids."""
    data = json.loads(backend.to_str())
    vocabulary = {token: index + len(special) for token, index in data["model"]["vocab"].items()}
    data["model"]["vocab"] = {**{token: n for n, token in enumerate(special)}, **vocabulary}
    shifted = tokenizers.Tokenizer.from_str(json.dumps(data))
    shifted.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return shifted


def _sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """Parse a BPE model. Raises `ModelLoadError` for other kinds."""
    tokens: list[str] = []
    kinds: list[int] = []
    scores: list[float] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(path.read_bytes()):
        if number == 1:
            entry = dict(_fields(value))
            tokens.append(entry.get(1, b"").decode())
            scores.append(struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0)
            kinds.append(entry.get(3, 1))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not tokens:
        raise ModelLoadError(f"{path} holds no pieces of SentencePiece.")
    if trainer.get(3, 1) != 2:
        raise ModelLoadError(
            f"{path} must be a BPE model of SentencePiece; got model_type {trainer.get(3, 1)}."
        )
    unknown = trainer.get(40, 0)
    backend = sentencepiece_bpe(
        SentencePieceVocabulary(
            tokens,
            kinds,
            scores,
            unknown=tokens[unknown] if unknown < len(tokens) else None,
            byte_fallback=bool(trainer.get(35, 0)),
            adds_prefix=bool(normalizer.get(3, 1)),
        )
    )
    steps: list[normalizers.Normalizer] = []
    if charsmap := normalizer.get(2):
        steps.append(normalizers.Precompiled(charsmap))
    if normalizer.get(4, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence([*steps, backend.normalizer])
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == CONTROL or (kind == USER_DEFINED and UNDERLINE not in token)
    ]
    backend.add_tokens(added)
    return backend


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield fields of a message: number, and an integer or bytes. Raises `ValueError`."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        kind = key & 7
        if kind == 0:
            value, offset = _varint(message, offset)
            yield key >> 3, value
            continue
        if kind == 2:
            size, offset = _varint(message, offset)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or offset + size > len(message):
            raise ValueError("a field leads out of its message")
        yield key >> 3, message[offset : offset + size]
        offset += size


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while offset < len(message) and shift < 64:
        byte = message[offset]
        value |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return value, offset
    raise ValueError("a number doesn't end")
