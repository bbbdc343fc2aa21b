"""A tiny tokenizer in the files of a model folder: bytes, a few words, ChatML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
EOS = 2
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}"
    " Answer with <tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and then some more words follow",
    "hello world, this is a small corpus for a small tokenizer: hello hello world",
    "Grüße, naïve café; 你好世界; emoji 🙂🙃🎉; one two three four five six seven",
] * 20


def with_template(folder: Path, copy: Path, template: str) -> str:
    """A copy of a tokenizer's folder with another chat template; its path."""
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = template
    (copy / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (copy / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return str(copy)


def with_added_tokens(folder: Path, copy: Path, tokens: Sequence[str]) -> str:
    """A copy of a tokenizer's folder with more special tokens behind its vocabulary; its path."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(copy / "tokenizer.json"))
    settings = (folder / "tokenizer_config.json").read_bytes()
    (copy / "tokenizer_config.json").write_bytes(settings)
    return str(copy)


def with_panicking_decoder(folder: Path, copy: Path) -> str:
    """A copy whose decoder panics on the token "!", which it cuts at both ends; its path."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.Strip(content="!", left=1, right=1)
    tokenizer.save(str(copy / "tokenizer.json"))
    (copy / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return str(copy)


def write_tokenizer(folder: Path) -> Path:
    """`tokenizer.json` and `tokenizer_config.json`; 512 entries, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[3],
        "chat_template": TEMPLATE,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
