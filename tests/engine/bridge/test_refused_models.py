"""What the paged cache can't serve is refused when it loads, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.contract.errors import ConfigError, ModelLoadError
from engine.transformers_backend.load import Source
from tests.engine.bridge.conftest import make


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("codegen", "doesn't go through transformers' attention interface"),
        ("gptj", "doesn't go through transformers' attention interface"),
        ("doge", "attention masks of its own"),
        ("rwkv", "state in a way of its own"),
        ("bart", "other logits than by its own attention"),
    ],
)
def test_the_reason_is_named(name: str, reason: str, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ModelLoadError, match=reason) as caught:
        make(checkpoint(name), model_impl="transformers")
    assert caught.value.param == "model"


def copy(source: Path, target: Path, **changes: object) -> Path:
    """The checkpoint in `target`, its config.json changed."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_an_architecture_that_nobody_knows(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(
        checkpoint("arcee"), tmp_path / "m", architectures=["NoSuchModel"], model_type="no-such"
    )
    with pytest.raises(ModelLoadError, match="NoSuchModel isn't supported"):
        make(folder, model_impl="auto")


@pytest.mark.parametrize(
    ("model_type", "name", "text_part"),
    [
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
        ("llama4", "Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        ("gemma3n", "Gemma3nForConditionalGeneration", "Gemma3nForCausalLM"),
        ("fuyu", "FuyuForCausalLM", ""),
    ],
)
def test_models_that_take_media_are_not_read_as_text_alone(
    model_type: str, name: str, text_part: str, tmp_path: Path
) -> None:
    config = {"model_type": model_type, "architectures": [name]}
    source = Source(tmp_path, write_config(tmp_path, config))
    assert source.sees
    assert (f'"{text_part}"' in source.text_part) is bool(text_part)
    if text_part and model_type != "gemma3n":  # which the bridge doesn't run at all
        config["architectures"] = [text_part]
        assert not Source(tmp_path, write_config(tmp_path, config)).sees


def test_models_that_hear_are_not_read_as_text_alone(tmp_path: Path) -> None:
    config = {"model_type": "phi4_multimodal", "architectures": ["Phi4MultimodalForCausalLM"]}
    with pytest.raises(ModelLoadError, match=r"isn't supported .* takes images or sound"):
        Source(tmp_path, write_config(tmp_path, config))


def write_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_an_encoder_and_decoder_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(checkpoint("bart"), tmp_path / "m", is_encoder_decoder=True)
    with pytest.raises(ModelLoadError, match="native ones alone"):
        make(folder)


def test_a_chunk_shorter_than_the_context_is_no_window(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(checkpoint("llama4_text"), tmp_path / "m", attention_chunk_size=64)
    with pytest.raises(ModelLoadError, match="neither causal nor a sliding window"):
        make(folder)
    assert make(folder, max_model_len=64).core.executor.worker.loaded.spec.sliding_windows == (0, 0)


def test_a_missing_tensor_isnt_made_up(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(checkpoint("arcee"), tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing keys: model\.layers\.1\.mlp\.down_proj"):
        make(folder)


def test_a_truncated_file_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(checkpoint("arcee"), tmp_path / "m")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ModelLoadError, match="can't load it"):
        make(folder)


def test_code_in_the_folder_isnt_run_without_the_operators_word(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(
        checkpoint("arcee"),
        tmp_path / "m",
        model_type="evil",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ModelLoadError, match="only with trust_remote_code"):
        make(folder)
    assert not (tmp_path / "ran").exists()


def test_both_ways_are_named_where_neither_goes(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(checkpoint("mpt"), tmp_path / "m", attn_config={"qk_ln": True})
    with pytest.raises(ModelLoadError, match=r"qk_ln = True.*bridge: MptForCausalLM") as caught:
        make(folder, model_impl="auto")
    assert caught.value.param == "qk_ln"


@pytest.mark.parametrize("setting", [{"rope_theta": 2e4}, {"rope_scaling": {"rope_type": "yarn"}}])
def test_a_rotary_setting_is_refused_where_nothing_rotates(
    setting: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    for impl in ("quire", "transformers"):
        with pytest.raises(ConfigError, match="no rotary embedding"):
            make(checkpoint("gpt2"), model_impl=impl, **setting)


def test_the_native_decoder_can_be_insisted_on(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ModelLoadError, match="ArceeForCausalLM isn't supported"):
        make(checkpoint("arcee"), model_impl="quire")
