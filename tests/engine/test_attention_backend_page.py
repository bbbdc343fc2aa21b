"""The attention backend of docs/extending.md, followed to the letter."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from engine.models import registry as plugins
from kernels.attention import BACKENDS, register_backend
from kernels.attention.registry import PRIORITY
from tests.engine.models import Oracle
from tests.engine.pages import install

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5], [9, 8, 7] * 7, [60, 61, 62]]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install("An attention backend", "quire_plain_attention", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv("QUIRE_PLUGINS", "plain_attention")
    initial, tried = dict(BACKENDS), dict(PRIORITY)
    yield
    for registry, initial_entries in ((BACKENDS, initial), (PRIORITY, tried)):
        registry.clear()
        registry.update(initial_entries)
    sys.modules.pop("quire_plain_attention", None)


def make(folder: Path) -> LLM:
    return LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=60, max_model_len=64, device="cpu",
        attention_backend="PLAIN_ATTN", max_num_batched_tokens=16,
    )  # fmt: skip


def test_the_backend_gives_the_tokens_of_transformers(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"))
    assert llm.core.executor.worker.loaded.model.ops.why.endswith("attention: PLAIN_ATTN")
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    expected = oracle("llama").greedy_all(PROMPTS, 8)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert PRIORITY["cpu"][-1] == "PLAIN_ATTN"


def test_a_model_that_needs_more_is_refused(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="sliding window not supported"):
        make(model_folder("mistral"))


def test_a_name_that_is_taken_is_refused() -> None:
    plugins.load_plugins()
    register_backend(BACKENDS["PLAIN_ATTN"])
    with pytest.raises(ValueError, match="already"):
        register_backend(dataclasses.replace(BACKENDS["CPU_ATTN"]))
