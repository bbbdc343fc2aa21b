"""Random checkpoints with a layer for drafts, and DeepSeek-V3's equation of it."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.models import make_tokenizer
from tests.engine.speculative.eagle_folders import Equation, Round
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

LAYERS = 3
PREFIX = f"model.layers.{LAYERS}."


def glm_with_drafts(folder: Path, *, tables: bool = False, **changes: Any) -> Path:
    """GLM-4.5's, see `with_drafts`."""
    return with_drafts("glm4_moe", folder, tables=tables, **changes)


def with_drafts(recipe: str, folder: Path, *, tables: bool = False, **changes: Any) -> Path:
    """`tables`: embeddings and an output layer of its own; else copies of the model's."""
    make_checkpoint({**RECIPES[recipe], "num_nextn_predict_layers": 1, **changes}, folder)
    tensors = load_file(folder / "model.safetensors")
    hidden = tensors["model.norm.weight"].numel()
    torch.manual_seed(9)
    last = f"model.layers.{LAYERS - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        tensor = tensors[name]
        noise = torch.randn(tensor.shape)
        weight = noise * 0.2 + 1 if "norm" in name else noise * tensor.std()
        tensors[PREFIX + name.removeprefix(last)] = weight
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{PREFIX}{name}.weight"] = 1 + torch.randn(hidden) / 4
    tensors[f"{PREFIX}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / 4
    for name, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        table = tensors[f"{original}.weight"]
        tensors[f"{PREFIX}{name}.weight"] = torch.randn(table.shape) if tables else table.clone()
    save(folder, tensors)
    make_tokenizer().save_pretrained(folder)
    return folder


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def mtp_equation(folder: Path, oracle: Any) -> Equation:
    """The layer itself is the one that `transformers` has, in float64, over whole sequences."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

    kinds = {"glm4_moe": Glm4MoeDecoderLayer, "deepseek_v3": DeepseekV3DecoderLayer}
    tensors = {
        name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    config = copy.deepcopy(oracle.config)
    config._experts_implementation = "eager"  # others take no float64
    layer = kinds[config.model_type](config, LAYERS).double().eval()
    parts = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }
    for name, tensor in _experts(parts).items():
        parts[name] = tensor
    layer.load_state_dict({name: parts[name] for name in layer.state_dict()})
    embedding, head = parts["embed_tokens.weight"], parts["shared_head.head.weight"]

    def normed(x: Tensor, name: str) -> Tensor:
        scale = torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps)
        return x / scale * parts[f"{name}.weight"]

    def of_all(x: Tensor) -> Tensor:
        position = torch.arange(len(x))[None]
        rotary = tuple(tensor.double() for tensor in oracle.model.rotary_emb(x[None], position))
        mask = torch.full((len(x), len(x)), -torch.inf).double().triu(1)[None, None]
        output = layer(x[None], attention_mask=mask, position_embeddings=rotary)
        return (output[0] if isinstance(output, tuple) else output).view(len(x), -1)

    rounds = Round()

    def logits(states: Tensor, tokens: list[int]) -> Tensor:
        entries, hidden = rounds.entries(states, states.double), torch.empty(0)
        while len(entries) < len(tokens):
            embeddings = normed(embedding[tokens[1 : len(entries) + 1]], "enorm")
            x = (
                torch.cat((embeddings, normed(entries, "hnorm")), dim=-1)
                @ parts["eh_proj.weight"].T
            )
            text = tokens[: len(entries) + 1]
            hidden = rounds.last(states, text, functools.partial(of_all, x))
            entries = rounds.add(hidden)
        return head @ normed(hidden, "shared_head.norm")

    return logits


def _experts(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `transformers` keeps them in memory: all of a kind in one."""
    count = sum(name.endswith(".gate_proj.weight") and ".experts." in name for name in parts)

    def all_of(name: str) -> Tensor:
        return torch.stack([parts[f"mlp.experts.{one}.{name}.weight"] for one in range(count)])

    return {
        "mlp.experts.gate_up_proj": torch.cat((all_of("gate_proj"), all_of("up_proj")), dim=1),
        "mlp.experts.down_proj": all_of("down_proj"),
    }


def right_glm(folder: Path) -> Path:
    """A model for which the layer says what it says itself, but for a sequence's first token, which
    the layer never sees: it is the model's first layer, and the others add nothing.
    """
    hidden = 64
    glm_with_drafts(folder, first_k_dense_replace=0)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    first = "model.layers.0."
    for name, tensor in tensors.items():
        if name.startswith(first):
            tensors[PREFIX + name.removeprefix(first)] = tensor.clone()
        elif not name.startswith(PREFIX) and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors[f"{PREFIX}eh_proj.weight"] = torch.eye(hidden, 2 * hidden)
    tensors[f"{PREFIX}enorm.weight"] = torch.ones(hidden)
    tensors[f"{PREFIX}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors[f"{PREFIX}embed_tokens.weight"] = embedding.clone()
    save(folder, tensors)
    return folder
