"""Models from ModelScope, by a package of its interface."""

from __future__ import annotations

import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError, ModelLoadError
from engine.contract.modelscope import VARIABLE
from tests.engine.models import make_model

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_model_len": 64, "dtype": "float32"}


class Hub(ModuleType):
    """`modelscope` with one function, which copies what the patterns allow."""

    def __init__(self, source: Path, cache: Path) -> None:
        super().__init__("modelscope")
        self.source, self.cache = source, cache
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(
        self,
        model_id: str | None = None,
        revision: str | None = None,
        cache_dir: str | None = None,
        allow_patterns: list[str] | None = None,
    ) -> str:
        self.calls.append({"model_id": model_id, "revision": revision, "cache_dir": cache_dir})
        if model_id != "qwen/small":
            raise ValueError(f"404: {model_id} isn't there")
        folder = self.cache / model_id
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.source.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns or ["*"]):
                shutil.copy(file, folder)
        return str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    source = make_model("llama", tmp_path / "source")
    (source / "README.pdf").write_bytes(b"x")
    hub = Hub(source, tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "modelscope", hub)
    monkeypatch.setenv(VARIABLE, "True")
    return hub


def test_a_model_and_its_tokenizer_come_from_modelscope(hub: Hub) -> None:
    llm = LLM("qwen/small", revision="v1", download_dir="there", **SMALL)
    (output,) = llm.generate(["the quick"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].token_ids
    assert hub.calls == [{"model_id": "qwen/small", "revision": "v1", "cache_dir": "there"}]
    assert not list(hub.cache.rglob("*.pdf"))
    LLM(str(hub.source), tokenizer="qwen/small", **SMALL)
    assert hub.calls[-1] == {"model_id": "qwen/small", "revision": None, "cache_dir": None}


def test_pytorchs_weights_are_fetched_where_there_are_no_others(hub: Hub) -> None:
    import torch
    from safetensors.torch import load_file

    weights = hub.source / "model.safetensors"
    torch.save(load_file(weights), hub.source / "pytorch_model.bin")
    weights.unlink()
    LLM("qwen/small", **SMALL)
    assert len(hub.calls) == 2


def test_what_modelscope_refuses_is_said(hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match=r"qwen/none is no folder here.*404") as raised:
        LLM("qwen/none", **SMALL)
    assert raised.value.param == "model"


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelLoadError, match="pip install modelscope"):
        LLM("qwen/small", **SMALL)


def test_a_value_that_is_no_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "maybe")
    with pytest.raises(ConfigError, match="must be 0 or 1") as raised:
        LLM("qwen/small", **SMALL)
    assert raised.value.param == VARIABLE
