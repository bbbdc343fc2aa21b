"""Tiny random pooling models, made by `transformers`, which is also the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

VOCAB = 200
WORDS = "the quick brown fox jumps over the lazy dog and runs away from it all day long "
TEXTS = [
    "the quick brown fox",
    "it runs away from the lazy dog all day long and over the fox " * 3,
    "dog",
    "the lazy fox",
]
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
    "pad_token_id": 1,
    "initializer_range": 0.3,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "electra": {"embedding_size": 32},
    "roberta": {},
    "xlm-roberta": {},
    "camembert": {},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 3},
    "mpnet": {},
    "modernbert": {
        "local_attention": 16,
        "num_hidden_layers": 4,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
    },
    "nomic_bert": {},
}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"intermediate_size": 128, "bos_token_id": 0, "eos_token_id": 3},
}


def make(kind: str, folder: Path, head: str = "Model", seed: int = 0, **changes: Any) -> Path:
    """Write a random float32 checkpoint of `AutoModel` or `AutoModelFor...`; returns its folder."""
    options = {**_SHAPE, **ENCODERS.get(kind, DECODERS.get(kind, {})), **changes}
    config = AutoConfig.for_model(kind, **options)
    torch.manual_seed(seed)
    auto = AutoModel if head == "Model" else getattr(transformers, f"AutoModel{head}")
    model = auto.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            # Biases and norms are all 0 or 1 at first: then a forgotten one would go unnoticed.
            noise = torch.randn(parameter.shape) * 0.2
            parameter.data = noise + (1.0 if "norm" in name.lower() else 0.0)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer that puts [CLS] and [SEP] around texts and pairs."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS * 4, "abcdefghijklmnopqrstuvwxyz"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=256,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def change_config(folder: Path, **values: Any) -> None:
    """Set values in the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_sentence_files(
    folder: Path,
    pooling: str = "mean",
    *,
    normalize: bool = True,
    dense: int | None = None,
    **config: Any,
) -> None:
    """What sentence-transformers puts beside a model, in its older form."""
    kinds = ["Transformer", "Pooling"]
    write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": 32,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": pooling == "max",
            "pooling_mode_lasttoken": pooling == "lasttoken",
        },
    )
    if dense is not None:
        _write_dense(folder / f"{len(kinds)}_Dense", dense)
        kinds.append("Dense")
    if normalize:
        (folder / f"{len(kinds)}_Normalize").mkdir(exist_ok=True)
        kinds.append("Normalize")
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    write(folder / "modules.json", modules)
    write(folder / "config_sentence_transformers.json", config)


def write(path: Path, value: Any) -> None:
    """JSON into a file, whose folder is made."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def _write_dense(folder: Path, size: int) -> None:
    from safetensors.torch import save_file

    write(
        folder / "config.json",
        {
            "in_features": 32,
            "out_features": size,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    )
    torch.manual_seed(5)
    save_file(
        {"linear.weight": torch.randn(size, 32), "linear.bias": torch.randn(size)},
        folder / "model.safetensors",
    )
