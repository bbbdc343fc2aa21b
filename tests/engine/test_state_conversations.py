"""Models with states on the engine: conversations, shared prefixes, kills and preemptions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import LLM, SamplingParams
from engine.contract.messages import EngineRequest
from engine.core.engine_core import EngineCore
from engine.devices.cpu import CpuDevice
from tests.engine.test_state_checkpoints import best_share
from tests.survey.recipes import RECIPES, VOCAB
from tests.survey.tiny import make_checkpoint

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint with Mamba-2 layers and one with short convolutions."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("granite4", "lfm2")}
    for name, folder in folders.items():
        make_checkpoint({**RECIPES[name], "max_position_embeddings": 4096}, folder)
    return folders


def make(folder: Path, **settings: Any) -> EngineCore:
    defaults = {
        "num_gpu_blocks_override": 1000,
        "max_model_len": 2400,
        "max_num_batched_tokens": 64,
    }
    settings = {**defaults, **settings}
    llm = LLM(str(folder), dtype="float32", num_threads=1, block_size=BLOCK_SIZE, **settings)
    core = llm.core
    assert isinstance(core, EngineCore)
    return core


def random_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(4, VOCAB) for _ in range(count)]


def request(request_id: str, prompt: list[int], max_tokens: int, **options: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
    return EngineRequest(
        request_id=request_id, gateway_id="g", prompt_token_ids=prompt, sampling=sampling
    )


def output_of(core: EngineCore, message: EngineRequest) -> list[int]:
    """Its tokens, with nobody else on the engine."""
    core.add_request(message)
    tokens: list[int] = []
    while core.has_work:
        for delta in core.step():
            assert delta.error is None, delta.error
            tokens += delta.token_ids
    return tokens


@pytest.mark.parametrize(
    ("name", "compares"),
    [
        ("lfm2", False),
        pytest.param("lfm2", True, marks=pytest.mark.slow),
        pytest.param("granite4", True, marks=pytest.mark.slow),
    ],
)
def test_conversations_with_four_times_more_states_than_fit(
    name: str, compares: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen take twelve turns, four checkpoints fit: at least four fifths of an oracle's hits."""
    monkeypatch.setattr(CpuDevice, "max_checkpoints", lambda *_: 4)
    core = make(folders[name], max_num_seqs=1, max_num_batched_tokens=512)
    cold = make(folders[name], max_num_seqs=1, enable_prefix_caching=False)
    source, order = random.Random(3), list(range(16)) * 12
    texts: list[list[int]] = [[] for _ in range(16)]
    num_shared = []
    for turn, chat in enumerate(order):
        num_shared.append(len(texts[chat]))
        texts[chat] += random_tokens(source, 60)
        message = request(f"{turn}", texts[chat], 8, temperature=0)
        tokens = output_of(core, message)
        assert not compares or tokens == output_of(cold, message)
        texts[chat] = [*texts[chat], *tokens]
    core.check_integrity()
    share = core.snapshot().prefix_cache_hits_total / sum(num_shared)
    assert share >= 0.8 * best_share(4, order, num_shared, beginning=0)


@pytest.mark.parametrize("name", ["granite4", "lfm2"])
@pytest.mark.parametrize("num_tokens", [63, 64, 65, 127, 128, 129])
def test_prompts_that_end_about_a_step_end(
    name: str, num_tokens: int, folders: dict[str, Path]
) -> None:
    """Steps of 64 tokens; the second time but for the last block's all come from the cache."""
    core = make(folders[name])
    prompt = random_tokens(random.Random(num_tokens), num_tokens)
    first, second = (
        output_of(core, request(f"{turn}", prompt, 8, temperature=0)) for turn in range(2)
    )
    assert first == second
    num_hits = core.snapshot().prefix_cache_hits_total
    assert num_hits == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_shared_prefix_without_a_state_is_counted_with_its_reason(
    folders: dict[str, Path],
) -> None:
    core, source = make(folders["lfm2"]), random.Random(5)
    shared = random_tokens(source, 200)
    for turn in range(3):
        prompt = shared + random_tokens(source, 40)
        output_of(core, request(f"{turn}", prompt, 2, temperature=0))
    stats = core.snapshot()
    # Where prompts part is known from the second on.
    assert stats.prefix_cold_total["no_state"] == 1
    assert stats.prefix_cache_hits_total == 192


@pytest.mark.parametrize(
    "shifts", [[100, 600], pytest.param(range(0, 601, 40), marks=pytest.mark.slow)]
)
def test_a_shared_prefix_is_reused_whatever_comes_behind_it(
    shifts: list[int], folders: dict[str, Path]
) -> None:
    core = make(folders["granite4"], max_num_batched_tokens=512)
    cold = make(folders["granite4"], max_num_batched_tokens=512, enable_prefix_caching=False)
    for shift in shifts:
        source = random.Random(shift)
        shared = random_tokens(source, 1600)
        for turn, min_share in enumerate((0, 0.8, 0.95)):
            initial_prefix_cache_hits_total = core.snapshot().prefix_cache_hits_total
            prompt = shared + random_tokens(source, shift)
            message = request(f"{shift}.{turn}", prompt, 2, temperature=0)
            assert output_of(core, message) == output_of(cold, message)
            assert (
                core.snapshot().prefix_cache_hits_total - initial_prefix_cache_hits_total
                >= min_share * 1600
            )


def disturbed(
    folder: Path, num_events: int, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> None:
    """Sequences of two tenants go on with the same tokens, whatever becomes of their engine.

    An engine is lost, and another one goes on with what clients have; or sequences are preempted.
    """
    monkeypatch.setattr(CpuDevice, "max_checkpoints", lambda *_: 6)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, **settings}
    engines = [make(folder, **settings) for _ in range(2)]
    source = random.Random(num_events)
    shared = random_tokens(source, 90)
    num_done = num_requests = 0
    while num_done < num_events:
        messages = [
            msgspec.structs.replace(
                request(
                    f"{num_requests + index}",
                    shared[: source.choice([0, 40, 90])]
                    + random_tokens(source, source.randrange(1, 80)),
                    40,
                    temperature=1.0,
                    seed=num_requests + index,
                ),
                tenant=f"tenant-{index % 2}",
                cache_namespace="ab"[index % 2],
            )
            for index in range(6)
        ]
        num_requests += len(messages)
        outputs: dict[str, list[int]] = {message.request_id: [] for message in messages}
        core = engines[0]
        for message in messages:
            core.add_request(message)
        while core.has_work:
            for delta in core.step():
                assert delta.error is None, delta.error
                outputs[delta.request_id] += delta.token_ids
            event = source.random()
            if event < 0.1 and core.scheduler.running:
                core.scheduler.preempt(source.choice(core.scheduler.running))
                num_done += 1
            elif event < 0.15:
                num_done += 1
                lost = [message for message in messages if message.request_id in core.requests]
                for message in lost:
                    core.abort(message.request_id)
                core.check_integrity()
                engines.reverse()
                core = engines[0]
                for message in lost:
                    so_far = outputs[message.request_id]
                    core.add_request(
                        msgspec.structs.replace(
                            message, resume_token_ids=[so_far] if so_far else []
                        )
                    )
        core.check_integrity()
        calm = make(folder, enable_prefix_caching=False)
        for message in messages:
            assert outputs[message.request_id] == output_of(calm, message)


@pytest.mark.parametrize("name", ["granite4", "lfm2"])
def test_kills_and_preemptions_change_no_text(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed(folders[name], 10, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite4", "lfm2"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_two_hundred_kills_and_preemptions_change_no_text(
    name: str, async_scheduling: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed(folders[name], 200, monkeypatch, async_scheduling=async_scheduling)
