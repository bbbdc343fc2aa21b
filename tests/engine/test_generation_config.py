"""EOS ids and sampling defaults of a checkpoint; tokenizers that must be converted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, ModelLoadError
from engine.text.tokenizer_files import eos_ids, read_generation_config, sampling_defaults
from engine.text.tokenizer_folder import tokenizer_folder
from tests.engine.models import make_model


def test_eos_ids_of_all_three_places_are_taken_once() -> None:
    assert eos_ids({"eos_token_id": [5, 2]}, (2, 7, None), vocab=10) == [5, 2, 7]
    assert eos_ids({"eos_token_id": 3}, (11, -1), vocab=10) == [3]
    assert eos_ids({}, (None,), vocab=10) == []


def test_the_tokenizers_eos_ends_a_chat_whose_config_names_another(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m", eos_token_id=0)
    llm = LLM(str(folder), num_gpu_blocks_override=16, max_model_len=64)
    assert set(llm.core.executor.worker.loaded.eos_token_ids) == {0, 2}


def test_defaults_out_of_range_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    defaults = sampling_defaults({"temperature": 0.6, "top_p": 7, "top_k": 20, "do_sample": True})
    assert defaults == {"temperature": 0.6, "top_k": 20}
    assert "top_p" in caplog.text


def test_a_broken_generation_config_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)


def test_defaults_apply_to_requests_that_bring_none(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 3}))
    settings = {"num_gpu_blocks_override": 16, "max_model_len": 64}
    assert LLM(str(folder), **settings).get_default_sampling_params() == SamplingParams(
        temperature=0.25, top_k=3
    )
    baseline_llm = LLM(str(folder), generation_config="vllm", **settings)
    assert baseline_llm.get_default_sampling_params() == SamplingParams()


def test_an_operators_values_replace_the_models(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m")
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.25, "top_k": 3, "eos_token_id": 9})
    )
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 16,
        "max_model_len": 64,
        "override_generation_config": {"temperature": 0.5, "eos_token_id": [7, 8]},
    }
    llm = LLM(str(folder), **settings)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=3)
    ends = llm.core.executor.worker.loaded.eos_token_ids  # type: ignore[attr-defined]
    assert ends[:2] == (7, 8)
    assert 9 not in ends
    isolated_llm = LLM(str(folder), generation_config="vllm", **settings)
    assert isolated_llm.get_default_sampling_params() == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"top_p": "x"}, {"max_new_tokens": 5}, {"eos_token_id": "x"}, {"x": 1}],
)
def test_an_operators_values_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(model="m", override_generation_config=values)
    assert refusal.value.param == "override_generation_config"
    assert next(iter(values)) in refusal.value.message


def test_a_folder_with_tokenizer_json_is_used_as_it_is(
    model_folder: Callable[[str], Path],
) -> None:
    folder = model_folder("llama")
    assert tokenizer_folder(EngineConfig(model=str(folder)), folder) == folder


def test_a_folder_without_any_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    folder = make_model("llama", tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelLoadError, match="tokenizer"):
        tokenizer_folder(EngineConfig(model=str(folder)), folder)
