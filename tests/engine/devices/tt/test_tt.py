"""Tenstorrent's models behind their vLLM interface, on a stand-in for ttnn: no chip is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError, ModelLoadError
from engine.devices import registry
from engine.models.registry import ModelRegistry
from tests.engine.devices.tt import fake_ttnn
from tests.engine.models import Oracle
from tests.packages import EXAMPLE

PACKAGE = EXAMPLE.parents[3] / "packages" / "tt"
ARCHITECTURE = "TTLlamaForCausalLM"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5], [9, 8, 7] * 9, [60, 61, 62], list(range(3, 20)), [9, 8, 7] * 9 + [4]]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package's module, with the stand-in as ttnn."""
    monkeypatch.setitem(sys.modules, "ttnn", fake_ttnn)
    monkeypatch.syspath_prepend(str(PACKAGE))
    import quire_tt

    find_spec = quire_tt.importlib.util.find_spec
    monkeypatch.setattr(
        quire_tt.importlib.util,
        "find_spec",
        lambda name: True if name == "ttnn" else find_spec(name),
    )
    monkeypatch.setattr(registry, "device_class", lambda name: quire_tt.TTDevice)
    monkeypatch.delenv("MESH_DEVICE", raising=False)
    fake_ttnn.LlamaForCausalLM.calls.clear()
    fake_ttnn.LlamaForCausalLM.warmed_up = 0
    fake_ttnn.opened.clear()
    fake_ttnn.closed.clear()
    ModelRegistry.register_model(ARCHITECTURE, fake_ttnn.LlamaForCausalLM)
    yield quire_tt
    ModelRegistry.unregister_model(ARCHITECTURE)


def make(folder: Path, **settings: Any) -> LLM:
    # `device` is "cpu" so that the settings don't look for an installed package.
    defaults = {
        "dtype": "float32", "num_gpu_blocks_override": 60, "max_model_len": 64, "max_num_seqs": 4,
        "block_size": 8, "device": "cpu",
    }  # fmt: skip
    return LLM(str(folder), **{**defaults, **settings})


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_prompts_or_decodes_give_the_tokens_of_transformers(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"))
    assert answers(llm) == oracle("llama").greedy_all(PROMPTS, 6)
    assert {"prefill", "decode"} == set(fake_ttnn.LlamaForCausalLM.calls)
    assert fake_ttnn.LlamaForCausalLM.warmed_up == 1
    llm.core.check_integrity()
    llm.core.shutdown()
    assert fake_ttnn.opened == fake_ttnn.closed == [(1, 2)]


def test_a_preempted_sequence_is_prefilled_again(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"), num_gpu_blocks_override=8)
    assert answers(llm) == oracle("llama").greedy_all(PROMPTS, 6)
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("caches", [False, True])
def test_prefixes_are_cached_where_the_model_supports_it(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle], caches: bool
) -> None:
    if caches:
        ModelRegistry.register_model(ARCHITECTURE, fake_ttnn.CachingLlama)
    llm = make(model_folder("llama"))
    expected = oracle("llama").greedy_all(PROMPTS, 6)
    assert [answers(llm), answers(llm)] == [expected, expected]
    assert (llm.core.scheduler.kv.num_hit_tokens > 0) is caches


def test_penalties_and_seeds_are_the_hosts(model_folder: Callable[[str], Path]) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, repetition_penalty=1.3, max_tokens=6, ignore_eos=True, logprobs=2
    )
    llm = make(model_folder("llama"))
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [each.outputs[0].token_ids for each in together] == [
        each.outputs[0].token_ids for each in alone
    ]


def test_prompt_logprobs_fail_by_a_sentence_and_cost_others_nothing(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"))
    scored = GREEDY.clone()
    scored.prompt_logprobs = 1
    first, second = llm.generate(PROMPTS[1:3], [scored, GREEDY], use_tqdm=False)
    assert "prompt_logprobs aren't available" in str(first.error)
    assert list(second.outputs[0].token_ids) == oracle("llama").greedy_all(PROMPTS[2:3], 6)[0]


@pytest.mark.parametrize(
    ("name", "param", "words"),
    [("T3K", "MESH_DEVICE", "has 8 chips"), ("N151", "MESH_DEVICE", "must be one of N150")],
)
def test_a_mesh_that_is_not_there_is_refused(
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    param: str,
    words: str,
) -> None:
    monkeypatch.setenv("MESH_DEVICE", name)
    with pytest.raises(ConfigError, match=words) as raised:
        make(model_folder("llama"))
    assert raised.value.param == param


def test_an_architecture_without_a_registered_model_is_refused(
    model_folder: Callable[[str], Path],
) -> None:
    with pytest.raises(ModelLoadError, match="No Tenstorrent model is registered for TTQwen2"):
        make(model_folder("qwen2"))


def test_a_model_without_methods_is_refused_by_their_names(
    model_folder: Callable[[str], Path],
) -> None:
    ModelRegistry.register_model(ARCHITECTURE, fake_ttnn.Unfinished)
    with pytest.raises(ModelLoadError, match="lacks initialize_vllm_model, allocate_kv_cache"):
        make(model_folder("llama"))
