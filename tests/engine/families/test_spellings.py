"""An architecture under another spelling of its checkpoints is the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint


def answer(folder: Path) -> list[int]:
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params)[0].outputs[0].token_ids


def respell(folder: Path, changes: dict[str, Any], renamed: dict[str, str]) -> None:
    """Change config.json: a value of None removes a key; `renamed`: old key -> new one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config = {renamed.get(name, name): value for name, value in config.items()} | changes
    config = {name: value for name, value in config.items() if value is not None}
    path.write_text(json.dumps(config))


def rename_weights(folder: Path, *names: tuple[str, str]) -> dict[str, torch.Tensor]:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in names:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


_FALCON = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_AS_MPT = {"logit_scale": None, "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}}


@pytest.mark.parametrize(
    ("recipe", "spelling", "changes", "renamed", "weights"),
    [
        ("mpt", "MPTForCausalLM", _AS_MPT, {}, ()),
        ("falcon", "RWForCausalLM", {"new_decoder_architecture": None}, _FALCON, ()),
        (
            "falcon-new",
            "RWForCausalLM",
            {"new_decoder_architecture": None},
            {**_FALCON, "num_kv_heads": "n_head_kv"},
            (),
        ),
        (
            "stablelm",
            "StableLMEpochForCausalLM",
            {"rope_pct": 0.25, "rope_parameters": None, "rope_theta": 10000},
            {"layer_norm_eps": "norm_eps"},
            (),
        ),
        (
            "llama",
            "YiForCausalLM",
            {},
            {},
            (("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2")),
        ),
        ("mixtral", "QuantMixtralForCausalLM", {}, {}, ()),
        (
            "minimax",
            "MiniMaxText01ForCausalLM",
            {"attn_type_list": [0, 1, 0], "layer_types": None, "postnorm": True, "rotary_dim": 16},
            {
                f"{new}_{letter}_factor": f"layernorm_{old}_{letter}"
                for new, old in (
                    ("full_attn", "full_attention"),
                    ("linear_attn", "linear_attention"),
                    ("mlp", "mlp"),
                )
                for letter in ("alpha", "beta")
            },
            (),
        ),
        (
            "kimi_linear",
            "KimiLinearForCausalLM",
            {
                "linear_attn_config": {
                    "full_attn_layers": [2],
                    "kda_layers": [1, 3, 4],
                    "head_dim": 16,
                    "num_heads": 4,
                    "short_conv_kernel_size": 4,
                },
                **dict.fromkeys(("layer_types", "mlp_layer_types", "linear_head_dim")),
                "first_k_dense_replace": 1,
            },
            {},
            (("layers.0.block_sparse_moe", "layers.0.mlp"),),
        ),
    ],
)
def test_older_spellings_are_the_same_model(
    tmp_path: Path,
    recipe: str,
    spelling: str,
    changes: dict[str, Any],
    renamed: dict[str, str],
    weights: tuple[tuple[str, str], ...],
) -> None:
    make_checkpoint(RECIPES[recipe], tmp_path)
    expected = answer(tmp_path)
    respell(tmp_path, {"architectures": [spelling], "model_type": "older", **changes}, renamed)
    rename_weights(tmp_path, *weights)
    assert answer(tmp_path) == expected


def test_deepseeks_first_experts_are_weighted_and_beside_shared_ones(tmp_path: Path) -> None:
    """All of the experts are Llama's MLP, halved: chosen ones and the shared one add up to it."""
    make_checkpoint(RECIPES["llama"], tmp_path)
    expected = answer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    width = json.loads((tmp_path / "config.json").read_text())["intermediate_size"]
    moved: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        head, separator, tail = name.partition(".mlp.")
        if not separator or ".layers.0." in name:
            moved[name] = tensor
            continue
        half = tensor / 2 if tail.startswith("down") else tensor
        for part in ("shared_experts", "experts.0", "experts.1"):
            moved[f"{head}.mlp.{part}.{tail}"] = half.clone()
        moved[f"{head}.mlp.gate.weight"] = torch.randn(2, tensors["model.norm.weight"].numel())
    save_file(moved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    experts = {
        "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek",
        "n_routed_experts": 2, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": width, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "norm_topk_prob": False, "scoring_func": "softmax",
    }  # fmt: skip
    respell(tmp_path, experts, {})
    assert answer(tmp_path) == expected
