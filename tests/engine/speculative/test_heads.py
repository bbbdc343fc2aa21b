"""Heads compute their papers' equations, in each layout that they are published in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from engine.contract.errors import ModelLoadError
from engine.speculative.heads import load_heads
from engine.speculative.heads.base import DraftHeads
from tests.engine.models import VOCAB
from tests.engine.speculative.head_folders import (
    HIDDEN,
    Equation,
    medusa_equation,
    medusa_parts,
    mlp_equation,
    mlp_parts,
    write,
)


def load(method: str, folder: Path, **settings: Any) -> DraftHeads:
    ops = kernels.get("cpu", use_compiled=False)
    sizes = settings.pop("sizes", (HIDDEN, VOCAB))
    return load_heads(method, folder, sizes, ops, torch.float32, **settings)


def check(heads: DraftHeads, equation: Equation, count: int) -> None:
    """Three rows, of which one is left out after the first draft."""
    torch.manual_seed(0)
    assert heads.max_drafts == count
    hidden = torch.randn(3, HIDDEN)
    texts = [torch.randint(VOCAB, (count,)).tolist() for _ in range(3)]
    rows, state = [0, 1, 2], heads.start(hidden)
    for depth in range(count):
        newest = torch.tensor([texts[row][depth] for row in rows])
        logits, state = heads.logits(depth, state, newest)
        expected = torch.stack([equation(hidden[row], texts[row][: depth + 1]) for row in rows])
        torch.testing.assert_close(logits.double(), expected, rtol=2e-4, atol=2e-4)
        if depth == 0:
            rows, state = [0, 2], state[[0, 2]]


@pytest.mark.parametrize(
    "changes", [{}, {"tied": True}, {"scaled": False}, {"count": 1}, {"inner": HIDDEN}]
)
def test_an_mlp_speculator_is_its_papers(changes: dict[str, Any], tmp_path: Path) -> None:
    config, tensors = mlp_parts(**changes)
    if config["inner_dim"] == HIDDEN:
        config["inner_dim"] = 0  # as wide as the model
    folder = write(tmp_path, config, tensors)
    check(load("mlp_speculator", folder), mlp_equation(config, tensors), config["n_predict"])


@pytest.mark.parametrize("layout", ["authors", "vllm", "shared", "truncated"])
@pytest.mark.parametrize("depth", [1, 2])
def test_medusa_is_its_papers(layout: str, depth: int, tmp_path: Path) -> None:
    config, tensors = medusa_parts(layout, depth=depth)
    equation = medusa_equation(config, tensors)
    if layout == "truncated":  # of one head the frequent tokens' columns alone are kept
        shortened = {
            **tensors,
            "lm_heads.1.weight": tensors["lm_heads.1.weight"][tensors["token_map"]],
        }
        folder = write(tmp_path, config, shortened)
    else:
        file = "medusa_lm_head.safetensors" if layout == "authors" else ""
        folder = write(tmp_path, config, tensors, file)
    check(load("medusa", folder), equation, 3)


def test_medusa_as_its_authors_pickled_it_is_read_as_tensors_alone(tmp_path: Path) -> None:
    config, tensors = medusa_parts()
    write(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    check(load("medusa", tmp_path), medusa_equation(config, tensors), 3)
    torch.save({"0.0.linear.weight": object()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelLoadError, match="can't be read as weights alone"):
        load("medusa", tmp_path)


def test_a_speculator_that_says_what_is_shared_once_a_stage(tmp_path: Path) -> None:
    config, tensors = mlp_parts(tied=True)
    more = {
        name.replace(".0.", ".2."): tensor.clone()
        for name, tensor in tensors.items()
        if ".0." in name
    }
    folder = write(tmp_path, config, {**tensors, **more})
    check(load("mlp_speculator", folder), mlp_equation(config, tensors), 3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_predict": 10**9}, r"n_predict must be a whole number in \[1, 64\]"),
        ({"n_predict": True}, "n_predict must be"),
        ({"n_predict": None}, "lacks 'n_predict'"),
        ({"n_predict": 5}, "no 'speculator.emb.3.weight'"),
        ({"emb_dim": 128}, "emb_dim is 128, the model's is 64"),
        ({"vocab_size": 99}, "vocab_size is 99, the model's is 384"),
        ({"inner_dim": -1}, "inner_dim must be"),
        ({"inner_dim": 1 << 19}, r"'speculator.emb.0.weight' has shape \(384, 48\)"),
        ({"inner_dim": "48"}, "inner_dim must be"),
        ({"scale_input": "no"}, "scale_input must be true or false"),
        ({"tie_weights": True, "n_predict": 1}, "n_predict of 2"),
        ({"speculator_type": "sum_lstm"}, "speculator_type 'sum_lstm' isn't run"),
    ],
)
def test_a_speculator_that_cannot_be_is_refused_by_the_field(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config, tensors = mlp_parts()
    folder = write(tmp_path, {**config, **changes}, tensors)
    with pytest.raises(ModelLoadError, match=says):
        load("mlp_speculator", folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_heads": 0}, "num_heads must be"),
        ({"num_heads": 65}, "num_heads must be"),
        ({"num_heads": 4}, "no 'lm_heads.3.weight'"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers must be"),
        ({"hidden_size": 65}, "hidden_size is 65, the model's is 64"),
        ({"logit_scale": "big"}, "logit_scale must be"),
        ({"truncated_vocab_size": 385}, "truncated_vocab_size must be"),
        ({"truncated_vocab_size": 99}, r"'token_map' must be \[99\]"),
        ({"token_map": torch.arange(100) + 300}, r"tokens outside \[0, 384\)"),
        ({"token_map": -torch.arange(100)}, "tokens outside"),
        ({"token_map": torch.rand(100)}, "whole numbers"),
        ({"token_map": None}, "there is no 'token_map'"),
        ({"lm_heads.2.weight": torch.rand(7, HIDDEN)}, r"'lm_heads.2.weight' has shape \(7, 64\)"),
    ],
)
def test_medusa_that_cannot_be_is_refused_by_the_field(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config, tensors = medusa_parts("truncated")
    for name, value in changes.items():
        if name == "token_map" and value is None:
            del tensors[name]
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            config[name] = value
    folder = write(tmp_path, config, tensors)
    with pytest.raises(ModelLoadError, match=says):
        load("medusa", folder)


@pytest.mark.parametrize(("bits", "error"), [("int8", 0.03), ("int4", 0.3)])
def test_rounded_heads_say_nearly_the_same(bits: str, error: float, tmp_path: Path) -> None:
    config, tensors = mlp_parts()
    folder, equation = write(tmp_path, config, tensors), mlp_equation(config, tensors)
    rounded = load("mlp_speculator", folder, quantization=bits)
    hidden = torch.randn(HIDDEN)
    logits, _ = rounded.logits(0, rounded.start(hidden[None]), torch.tensor([7]))
    expected = equation(hidden, [7])
    assert 0 < float((logits[0] - expected).norm() / expected.norm()) < error


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    write(tmp_path, *mlp_parts())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="holds neither model"):
        load("mlp_speculator", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08" * 64)
    with pytest.raises(ModelLoadError):
        load("mlp_speculator", tmp_path)
