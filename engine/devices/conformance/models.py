"""Tiny random models of several architectures, and the outputs of `transformers` for them."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 320
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
    # Large weights, so that random logits lie far apart and greedy choices aren't ties.
    "initializer_range": 0.3,
}
#: Architectures that differ in what they ask of a device.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 16,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 15.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "n_inner": 96,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "phi": {"model_type": "phi", "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
}


def prompts(seed: int = 5) -> list[list[int]]:
    """Twelve prompts of 1 to 90 tokens; some share a prefix of 40."""
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    lengths = [1, 2, 15, 16, 17, 33, 7, 20, 31, 48, 50, 50]
    return [
        (stem if index >= 6 else []) + [rng.randrange(4, VOCAB) for _ in range(length)]
        for index, length in enumerate(lengths)
    ]


class TinyModel:
    """A random float32 checkpoint in `folder`, and `transformers`' answers with its weights."""

    def __init__(self, family: str, folder: Path) -> None:
        options = {**_SHAPE, **FAMILIES[family]}
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Biases and norms are all 0 or 1 at first: a forgotten one would go unnoticed.
                noise = torch.randn(parameter.shape) * 0.2
                parameter.data = noise + (1.0 if "norm" in name or "ln_" in name else 0.0)
        self.folder, self.model = folder, model.eval()
        self.model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy tokens after a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], count: int) -> list[float]:
        """The log probabilities of the last `count` tokens."""
        logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        rows = logits.log_softmax(-1)[-count - 1 : -1]
        return rows.gather(1, torch.tensor(tokens[-count:])[:, None])[:, 0].tolist()


def write_adapter(folder: Path, model: TinyModel, rank: int = 4) -> None:
    """A random LoRA adapter of the query projections, for a model of the Llama kind."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for index, layer in enumerate(model.model.model.layers):
        outputs, inputs = layer.self_attn.q_proj.weight.shape
        name = f"base_model.model.model.layers.{index}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def merge_adapter(model: TinyModel, folder: Path) -> None:
    """Add an adapter to the weights of `transformers`' model."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    for index, layer in enumerate(model.model.model.layers):
        name = f"base_model.model.model.layers.{index}.self_attn.q_proj"
        low, high = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        layer.self_attn.q_proj.weight.data += high @ low


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and some special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = ["<|begin|>", "<|end|>", *alphabet]
    texts += [f"<|{number}|>" for number in range(VOCAB - len(texts))]
    vocab = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>"
    )
