"""Random checkpoints of heads in their published layouts, and their papers' equations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, silu

from tests.engine.models import VOCAB

HIDDEN = 64
#: The logits of each depth, float64 [vocab], of the hidden state and the tokens from the newest on.
Equation = Callable[[Tensor, list[int]], Tensor]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / (file or "model.safetensors"),
    )
    return folder


def mlp_parts(
    inner: int = 48, count: int = 3, *, tied: bool = False, scaled: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    torch.manual_seed(3)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "emb_dim": HIDDEN, "inner_dim": inner, "n_predict": count, "n_candidates": 4,
        "top_k_tokens_per_head": [4] * count, "vocab_size": VOCAB, "tie_weights": tied,
        "scale_input": scaled,
    }  # fmt: skip
    tensors = {}
    for index in range(1 if tied else count):
        initial = HIDDEN if index == 0 else inner
        tensors[f"speculator.emb.{index}.weight"] = torch.randn(VOCAB, inner)
        tensors[f"speculator.proj.{index}.weight"] = torch.randn(inner, initial) / 8
        tensors[f"speculator.ln.{index}.weight"] = 1 + torch.randn(inner) / 4
        tensors[f"speculator.ln.{index}.bias"] = torch.randn(inner) / 4
        tensors[f"speculator.head.{index}.weight"] = torch.randn(VOCAB, inner)
    if tied:
        tensors["speculator.proj.1.weight"] = torch.randn(inner, inner) / 8
    return config, tensors


def mlp_equation(config: dict[str, Any], tensors: dict[str, Tensor]) -> Equation:
    count, inner = config["n_predict"], config["inner_dim"] or HIDDEN
    decay = 0.5 ** (0.5 / count)
    added = math.sqrt((1 - decay**2) * (inner / 2))

    def part(name: str, index: int) -> Tensor:
        kind, _, rest = name.partition(".")
        if config["tie_weights"]:
            index = min(index, 1) if kind == "proj" else 0
        return tensors[f"speculator.{kind}.{index}.{rest}"].double()

    def normed(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-6)

    def logits(hidden: Tensor, tokens: list[int]) -> Tensor:
        state = hidden.double()
        if config["scale_input"]:
            state = normed(state) / math.sqrt(2)
        for index, token in enumerate(tokens):
            mixed = part("proj.weight", index) @ state
            mixed = mixed + added / decay * part("emb.weight", index)[token]
            state = gelu(normed(mixed) * part("ln.weight", index) + part("ln.bias", index))
        return part("head.weight", len(tokens) - 1) @ state

    return logits


def medusa_parts(
    layout: str = "authors", count: int = 3, depth: int = 1
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`layout`: "authors", or vLLM's, which may be "truncated" or "shared"."""
    torch.manual_seed(4)
    blocks = [[torch.randn(HIDDEN, HIDDEN) / 8 for _ in range(depth)] for _ in range(count)]
    biases = [[torch.randn(HIDDEN) / 4 for _ in range(depth)] for _ in range(count)]
    outputs = [torch.randn(VOCAB, HIDDEN) for _ in range(count)]
    tensors = {}
    if layout == "authors":
        config = {
            "medusa_num_heads": count,
            "medusa_num_layers": depth,
            "base_model_name_or_path": "x",
        }
        for head in range(count):
            for index in range(depth):
                tensors[f"{head}.{index}.linear.weight"] = blocks[head][index]
                tensors[f"{head}.{index}.linear.bias"] = biases[head][index]
            tensors[f"{head}.{depth}.weight"] = outputs[head]
        return config, tensors
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN,
        "vocab_size": VOCAB, "num_heads": count, "num_hidden_layers": depth,
        "medusa_fc_bias": True, "logit_scale": 0.5,
    }  # fmt: skip
    for head in range(count):
        for index in range(depth):
            tensors[f"blocks.{head}.layers.{index}.weight"] = blocks[head][index]
            tensors[f"blocks.{head}.layers.{index}.bias"] = biases[head][index]
        if layout != "shared" or head == 0:
            tensors[f"lm_heads.{head}.weight"] = outputs[head]
    if layout == "shared":
        config["original_lm_head"] = True
    if layout == "truncated":
        config["truncated_vocab_size"] = 100
        tensors["token_map"] = torch.randperm(VOCAB)[:100]
    return config, tensors


def medusa_equation(config: dict[str, Any], tensors: dict[str, Tensor]) -> Equation:
    authors = "medusa_num_heads" in config
    depth = config["medusa_num_layers"] if authors else config["num_hidden_layers"]

    def logits(hidden: Tensor, tokens: list[int]) -> Tensor:
        head, x = len(tokens) - 1, hidden.double()
        for index in range(depth):
            name = f"{head}.{index}.linear" if authors else f"blocks.{head}.layers.{index}"
            x = x + silu(tensors[f"{name}.weight"].double() @ x + tensors[f"{name}.bias"].double())
        local_head = 0 if config.get("original_lm_head") else head
        name = f"{head}.{depth}.weight" if authors else f"lm_heads.{local_head}.weight"
        logits = tensors[name].double() @ x * config.get("logit_scale", 1.0)
        if "token_map" in tensors:
            outside = torch.ones(VOCAB, dtype=torch.bool)
            outside[tensors["token_map"]] = False
            logits[outside] = -torch.inf
        return logits

    return logits
