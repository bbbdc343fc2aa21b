"""Sleep and wake-up of the offline engine: memory falls, answers stay the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError, EngineSleeping, InvalidRequest, ModelLoadError
from engine.contract.messages import KV_CACHE, WEIGHTS, EngineRequest
from tests.engine.models import Oracle, make_model

Folder = Callable[[str], Path]

PROMPTS = [[5] * 20, [7, 8, 9], list(range(10, 50))]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
MIB = 1 << 20


def make(folder: Path, **settings: object) -> LLM:
    options = {"num_gpu_blocks_override": 64, "max_model_len": 128, "enable_sleep_mode": True}
    return LLM(str(folder), dtype="float32", **{**options, **settings})


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some 70 MB, so that its coming and going shows."""
    folder = tmp_path_factory.mktemp("large")
    return make_model("llama", folder, hidden_size=512, intermediate_size=3072)


@pytest.mark.parametrize("level", [1, 2])
def test_memory_falls_and_answers_are_the_same(level: int, large: Path) -> None:
    llm = make(large, num_gpu_blocks_override=256)
    initial_tokens = tokens(llm)
    kv = 0
    for cache in llm.core.executor.worker.loaded.model.kv_caches:  # type: ignore[attr-defined]
        for tensor in cache[:2]:
            tensor.fill_(1.0)  # all of its pages, not only those that a few prompts touch
            kv += tensor.nbytes
    assert kv >= 20 * MIB
    awake = resident()
    llm.sleep(level)
    asleep = resident()
    weights = 60 * MIB if level == 2 else 0
    assert awake - asleep > 0.8 * (kv + weights)
    assert llm.is_sleeping()
    llm.wake_up()
    assert not llm.is_sleeping()
    assert tokens(llm) == initial_tokens
    llm.core.check_integrity()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_that_run_go_on_afterwards(
    async_scheduling: bool, model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"), async_scheduling=async_scheduling)
    core, outputs = llm.core, {index: [] for index in range(len(PROMPTS))}

    def collect(deltas: list) -> None:
        for delta in deltas:
            assert delta.error is None
            outputs[int(delta.request_id)] += delta.token_ids

    for index, prompt in enumerate(PROMPTS):
        core.add_request(
            EngineRequest(
                request_id=str(index), gateway_id="", prompt_token_ids=prompt, sampling=GREEDY
            )
        )
    for level in (1, 2):
        for _ in range(2):
            collect(core.step())
        collect(core.sleep(level))
        assert not core.has_work
        assert core.scheduler.kv.pool.num_free_blocks == core.scheduler.kv.pool.num_blocks
        core.wake_up()
    while core.has_work:
        collect(core.step())
    assert list(outputs.values()) == [oracle("llama").greedy(prompt, 6) for prompt in PROMPTS]
    core.check_integrity()


def test_a_new_request_gets_a_typed_error_while_it_sleeps(model_folder: Folder) -> None:
    llm = make(model_folder("llama"))
    llm.sleep()
    with pytest.raises(EngineSleeping) as caught:
        tokens(llm)
    assert (caught.value.status, caught.value.code) == (503, "engine_sleeping")
    llm.wake_up()
    assert all(len(token) == 6 for token in tokens(llm))


@pytest.mark.parametrize("first", [WEIGHTS, KV_CACHE])
@pytest.mark.parametrize("level", [1, 2])
def test_tags_wake_one_part_after_the_other(level: int, first: str, model_folder: Folder) -> None:
    llm = make(model_folder("llama"))
    initial_tokens = tokens(llm)
    llm.sleep(level)
    llm.wake_up(tags=[first])
    assert llm.is_sleeping()
    with pytest.raises(EngineSleeping):
        tokens(llm)
    llm.wake_up(tags=[KV_CACHE if first == WEIGHTS else WEIGHTS])
    assert tokens(llm) == initial_tokens


def test_the_prefix_cache_is_empty_afterwards(model_folder: Folder) -> None:
    llm = make(model_folder("llama"))
    tokens(llm)
    cached = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)[0].num_cached_tokens
    assert cached == 32
    llm.sleep()
    llm.wake_up()
    assert llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_sleeping_twice_is_sleeping_deeper(model_folder: Folder) -> None:
    llm = make(model_folder("llama"))
    initial_tokens = tokens(llm)
    llm.sleep(1)
    llm.sleep(2)
    llm.sleep(1)
    with pytest.raises(RuntimeError, match="weights sleep"):
        _ = llm.core.executor.worker.loaded.model.decode_bytes
    llm.wake_up()
    llm.wake_up()
    assert tokens(llm) == initial_tokens


def test_weights_that_are_gone_are_named_and_sleep_on(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model")
    llm = make(folder)
    initial_tokens = tokens(llm)
    llm.sleep(2)
    file = folder / "model.safetensors"
    file.rename(tmp_path / "away")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        llm.wake_up()
    assert llm.is_sleeping()
    (tmp_path / "away").rename(file)
    llm.wake_up()
    assert tokens(llm) == initial_tokens


def test_another_model_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    llm = make(folder)
    llm.sleep(2)
    make_model("llama", tmp_path, num_hidden_layers=2)
    with pytest.raises(ModelLoadError, match="another model"):
        llm.wake_up()


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda llm: llm.sleep(3), "level"),
        (lambda llm: llm.sleep(True), "level"),
        (lambda llm: llm.wake_up(["gpu"]), "tags"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable, param: str, model_folder: Folder) -> None:
    llm = make(model_folder("llama"))
    with pytest.raises(InvalidRequest) as caught:
        call(llm)
    assert caught.value.param == param
    assert not llm.is_sleeping()


def test_it_has_to_be_allowed(model_folder: Folder) -> None:
    llm = make(model_folder("llama"), enable_sleep_mode=False)
    with pytest.raises(InvalidRequest, match="enable_sleep_mode"):
        llm.sleep()


def test_a_model_that_cannot_give_its_cache_back_is_refused(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(model_folder("llama"))
    monkeypatch.delattr(type(llm.core.executor.worker.loaded.model), "release_kv")
    with pytest.raises(ConfigError, match="release_kv"):
        llm.sleep()
    assert len(tokens(llm)) == 3


@pytest.mark.parametrize("model_impl", ["transformers", "quire"])
def test_bridged_and_native_models_sleep(model_impl: str, model_folder: Folder) -> None:
    llm = make(model_folder("llama"), model_impl=model_impl)
    initial_tokens = tokens(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm) == initial_tokens


def test_int8_caches_and_quantized_weights_wake_up(model_folder: Folder) -> None:
    llm = make(model_folder("llama"), kv_cache_dtype="int8", quantization="int8")
    initial_tokens = tokens(llm)
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == initial_tokens
    assert torch.is_tensor(llm.core.executor.worker.loaded.model.kv_caches[0].key_scales)  # type: ignore[attr-defined]
