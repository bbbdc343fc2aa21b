"""Checkpoints of tests are copies of one, and as if each were made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import made_once
from tests.engine.models import make_model
from tests.survey import tiny
from tests.survey.recipes import RECIPES


def files(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_a_copy_is_what_would_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "copy"):
        assert tiny.make_checkpoint(RECIPES["llama"], tmp_path / name, 3) == "LlamaForCausalLM"
    after = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(made_once, "kept_in", None)
        tiny.make_checkpoint(RECIPES["llama"], tmp_path / "anew", 3)
    made = [files(tmp_path / name) for name in ("first", "copy", "anew")]
    assert made[0] == made[1] == made[2]
    assert torch.equal(torch.get_rng_state(), after)
    tiny.make_checkpoint(RECIPES["llama"], tmp_path / "other", 4)
    assert files(tmp_path / "other")["model.safetensors"] != made[0]["model.safetensors"]


def test_who_changes_a_copy_changes_no_other(tmp_path: Path) -> None:
    first = make_model("llama", tmp_path / "first")
    before = files(first)
    for each in first.iterdir():
        each.write_bytes(b"x")
    assert files(make_model("llama", tmp_path / "second")) == before
    assert files(make_model("llama", tmp_path / "first")) == before
    small = make_model("llama", tmp_path / "small", num_hidden_layers=1)
    assert files(small)["model.safetensors"] != before["model.safetensors"]


def test_what_stood_in_a_folder_is_in_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(made_once, "kept_in", tmp_path / "kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "own.txt").write_text("mine")
    make_model("llama", tmp_path / "full")
    assert "own.txt" not in files(make_model("llama", tmp_path / "empty"))
