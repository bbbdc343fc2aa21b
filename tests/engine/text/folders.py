"""Tokenizer folders of the common kinds, small and made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! How are you today?",
    "def main():\n    print('hello')\n\n    return {'a': 1, 'b': [2, 3]}\n",
    "naïve café Straße 東京 привет שלום 👩‍👩‍👧 e\u0301",
    "user assistant system tool start end <|im_ im_start|> role content name arguments",
] * 4
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
ADDED = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(*, prefix_space: bool = False) -> Tokenizer:
    """GPT-2's kind: BPE on bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer


def llama3(**_: Any) -> Tokenizer:
    """Byte-level BPE that puts a BOS before every text."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A",
        special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))],
    )
    return tokenizer


def sentencepiece_bpe(*, scheme: str = "first", strip: bool = True) -> Tokenizer:
    """Llama-2's kind: BPE with byte fallback. `scheme` "legacy" prefixes by the normalizer."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokenizer.train_from_iterator(
        [line[:40] for line in CORPUS],
        trainers.BpeTrainer(
            vocab_size=520, special_tokens=specials + BYTE_TOKENS, show_progress=False
        ),
    )
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] in specials]
    for token in data["added_tokens"]:
        token["normalized"] = False
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def metaspace_unigram() -> Tokenizer:
    """T5's and XGLM's kind: Unigram whose decoder is Metaspace alone."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200,
            special_tokens=["<unk>", "<s>", "</s>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's kind: decoding looks at more than one piece."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
        ),
    )
    return tokenizer


CHATML_CONFIG = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
SENTENCEPIECE_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def save(
    folder: Path, tokenizer: Tokenizer, config: dict[str, Any], template: str | None = None
) -> Path:
    """Write a tokenizer's files as a model folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def chat_template(name: str) -> str:
    """The Jinja source of one of the templates kept beside this file."""
    path = Path(__file__).parent / "templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8")
