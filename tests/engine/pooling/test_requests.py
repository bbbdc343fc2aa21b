"""Bad pooling requests are refused before they run; good ones share the engine's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine import LLM, AsyncLLM, PoolingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import (
    ContextLengthExceeded,
    EngineFault,
    InvalidRequest,
    ModelLoadError,
)
from engine.contract.messages import EngineRequest
from engine.contract.pooling_params import from_bytes, score_pairs, similarity
from engine.devices.registry import make_device
from engine.executor.lora_worker import LoraWorker
from engine.pooling.load import pooled_spec
from engine.pooling.pooling_config import PoolingModelConfig
from tests.engine.pooling.models import TEXTS

Maker = Callable[..., Path]


@pytest.fixture
def llm(pooling_model: Maker) -> LLM:
    return LLM(str(pooling_model("bert")), max_num_batched_tokens=64, max_model_len=64)


def submit(llm: LLM, request_id: str, prompt: list[int], **fields: Any) -> None:
    llm.core.add_request(
        EngineRequest(
            request_id=request_id,
            gateway_id="",
            prompt_token_ids=prompt,
            **{"pooling": PoolingParams(task="embed"), **fields},
        )
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"task": "generate"},
        {"task": "classify"},
        {"task": ""},
        {"task": "embed", "dimensions": 8},
        {"task": "embed", "second_segment": 3},
    ],
)
def test_fault_05_parameters_out_of_range(llm: LLM, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        submit(llm, "a", [5, 6, 7], pooling=PoolingParams(**fields))
    assert not llm.core.has_work


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dimensions", 0),
        ("dimensions", True),
        ("dimensions", 2**63),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("use_activation", 1),
        ("second_segment", -1),
    ],
)
def test_fault_05_values_of_the_wrong_kind(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PoolingParams(task="embed", **{name: value})
    assert caught.value.param == name


def test_fault_02_and_03_empty_and_foreign_tokens(llm: LLM) -> None:
    for prompt in ([], [-1], [10_000]):
        with pytest.raises(InvalidRequest):
            submit(llm, "a", prompt)


def test_fault_06_a_prompt_over_the_context_names_both_numbers(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"65 tokens.* at most 64"):
        submit(llm, "a", [5] * 65)
    submit(llm, "b", [5] * 64)


def test_many_prompts_share_steps_within_the_budget(llm: LLM) -> None:
    prompts = [[4 + index % 150] * (1 + index * 7 % 60) for index in range(20)]
    for position, prompt in enumerate(prompts):
        submit(llm, str(position), prompt, tenant=f"t{position % 3}")
    steps = num_finished = 0
    while llm.core.has_work:
        deltas = llm.core.step()
        assert sum(delta.num_prompt_tokens for delta in deltas) <= 64
        assert all(delta.finish_reason == "stop" and delta.pooled for delta in deltas)
        steps, num_finished = steps + 1, num_finished + len(deltas)
    assert num_finished == 20
    assert steps < 20
    llm.core.check_integrity()


def test_an_aborted_prompt_never_runs(llm: LLM) -> None:
    submit(llm, "a", [5] * 40)
    submit(llm, "b", [5] * 40)
    (gone,) = llm.core.abort("b")
    assert gone.finish_reason == "abort"
    assert [delta.request_id for delta in llm.core.step()] == ["a"]
    assert not llm.core.requests


def test_prompts_of_the_default_context_run_whole(pooling_model: Maker) -> None:
    # 300 positions, but a budget of 32 tokens a step: it is raised to what a prompt may need.
    llm = LLM(str(pooling_model("bert")), max_num_batched_tokens=32)
    (output,) = llm.embed([[7] * 300], use_tqdm=False)
    assert output.outputs.hidden_size == 32


def test_weights_that_are_no_numbers_fail_the_request_alone(llm: LLM) -> None:
    llm.core.executor.worker.loaded.model.embedding[9] = float("nan")  # type: ignore[attr-defined]
    submit(llm, "bad", [9, 5])
    submit(llm, "good", [5, 6])
    deltas = {delta.request_id: delta for delta in llm.core.step()}
    assert deltas["bad"].finish_reason == "error"
    assert np.isfinite(from_bytes(deltas["good"].pooled or b"")).all()


BAD = [9, 5]


@pytest.fixture
def spoiled(llm: LLM) -> LLM:
    """One whose token 9 has an embedding that is no number."""
    llm.core.executor.worker.loaded.model.embedding[9] = float("nan")  # type: ignore[attr-defined]
    return llm


@pytest.mark.parametrize("ask", ["embed", "encode"])
def test_fault_64_of_a_batch_the_others_vectors_come(spoiled: LLM, ask: str) -> None:
    call = getattr(spoiled, ask)
    first, bad, last = call([[5, 6], BAD, [6, 7, 8]], use_tqdm=False)
    for prompt, result in (([5, 6], first), ([6, 7, 8], last)):
        (isolated_output,) = call([prompt], use_tqdm=False)
        np.testing.assert_allclose(
            result.outputs.embedding, isolated_output.outputs.embedding, atol=1e-6
        )
        assert result.error is None
    assert isinstance(bad.error, EngineFault)
    assert "isn't finite" in bad.error.message
    assert bad.outputs is None
    assert not spoiled.core.requests
    with pytest.raises(EngineFault, match="isn't finite"):
        call([BAD, BAD], use_tqdm=False)
    assert not spoiled.core.requests


def test_fault_64_of_several_pairs_one_fails(spoiled: LLM) -> None:
    bad_word = spoiled.get_tokenizer().decode([9])
    outputs = spoiled.score(TEXTS[0], [TEXTS[3], bad_word, TEXTS[0]], use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[2].outputs.score == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(EngineFault):
        spoiled.score(bad_word, [TEXTS[0], TEXTS[3]], use_tqdm=False)


@pytest.mark.parametrize(("ask", "num_labels"), [("classify", 2), ("score", 1)])
def test_fault_64_heads_answer_the_others(pooling_model: Maker, ask: str, num_labels: int) -> None:
    folder = pooling_model("bert", "ForSequenceClassification", num_labels=num_labels)
    llm = LLM(str(folder), max_model_len=64)
    llm.core.executor.worker.loaded.model.embedding[9] = float("nan")  # type: ignore[attr-defined]
    bad_word = llm.get_tokenizer().decode([9])
    if ask == "score":
        outputs = llm.score(TEXTS[0], [TEXTS[3], bad_word, TEXTS[2]], use_tqdm=False)
    else:
        outputs = llm.classify([TEXTS[3], bad_word, TEXTS[2]], use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert [output.outputs is None for output in outputs] == [False, True, False]


def test_fault_64_a_step_hands_over_the_others_vectors(spoiled: LLM) -> None:
    engine = spoiled.llm_engine
    for name, prompt in (("bad", BAD), ("good", [5, 6])):
        engine.add_request(name, prompt, PoolingParams())
    outputs_by_id = {request.request_id: request for request in engine.step()}
    assert isinstance(outputs_by_id["bad"].error, EngineFault)
    assert np.isfinite(outputs_by_id["good"].outputs.embedding).all()
    assert not engine.has_unfinished_requests()


@pytest.mark.asyncio
async def test_fault_64_an_engine_for_coroutines_lives_on(pooling_model: Maker) -> None:
    engine = AsyncLLM(EngineConfig(model=str(pooling_model("bert")), max_model_len=64))
    model = engine.engine.core.executor.worker.loaded.model  # type: ignore[attr-defined]
    model.embedding[9] = float("nan")

    async def encode(prompt: list[int]) -> Any:
        return [result async for result in engine.encode(prompt)]

    try:
        for _ in range(2):
            good, bad, other = await asyncio.gather(
                encode([5, 6]), encode(BAD), encode([6, 7]), return_exceptions=True
            )
            assert isinstance(bad, EngineFault)
            for (result,) in (good, other):
                assert np.isfinite(result.outputs.embedding).all()
        await engine.check_health()
    finally:
        engine.shutdown()


def test_scores_need_fitting_counts(llm: LLM) -> None:
    for first, second in ([["a", "b"], ["c"]], [[], ["c"]], ["a", []]):
        with pytest.raises(InvalidRequest):
            llm.score(first, second, use_tqdm=False)
    assert score_pairs(1, 3) == [(0, 0), (0, 1), (0, 2)]
    assert score_pairs(2, 2) == [(0, 0), (1, 1)]


def test_scores_are_cosines(llm: LLM) -> None:
    (score,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    a, b = (np.array(out.outputs.embedding) for out in llm.embed(TEXTS[:2], use_tqdm=False))
    assert score.outputs.score == pytest.approx(float(a @ b), abs=1e-5)
    (same,) = llm.score(TEXTS[0], TEXTS[0], use_tqdm=False)
    assert same.outputs.score == pytest.approx(1.0, abs=1e-5)


def test_similarities() -> None:
    a, b = np.array([3.0, 4.0], dtype=np.float32), np.array([0.0, 1.0], dtype=np.float32)
    similarities = {
        kind: similarity(kind, a, b) for kind in ("cosine", "dot", "euclidean", "manhattan")
    }
    assert similarities == pytest.approx(
        {"cosine": 0.8, "dot": 4.0, "euclidean": -(18**0.5), "manhattan": -6.0}
    )
    assert similarity("cosine", a, 0 * a) == 0.0
    with pytest.raises(InvalidRequest):
        similarity("other", a, b)


def test_params_may_differ_by_prompt(llm: LLM) -> None:
    params = [PoolingParams(use_activation=False), PoolingParams()]
    raw, unit = llm.embed([TEXTS[0], TEXTS[0]], params, use_tqdm=False)
    norm = float(np.linalg.norm(raw.outputs.embedding))
    assert abs(norm - 1.0) > 0.1
    np.testing.assert_allclose(
        np.array(raw.outputs.embedding) / norm, unit.outputs.embedding, atol=1e-6
    )
    for listed in (params, []):
        with pytest.raises(InvalidRequest, match="as many pooling_params"):
            llm.embed(TEXTS, listed, use_tqdm=False)


@pytest.mark.parametrize(
    ("kind", "settings_"),
    [("bert", {}), ("llama", {}), ("llama", {"pooler_config": {"pooling_type": "MEAN"}})],
)
def test_a_step_ahead_changes_nothing(
    kind: str, settings_: dict[str, Any], pooling_model: Maker
) -> None:
    prompts = [[4 + index % 150] * (1 + index * 7 % 60) for index in range(12)]
    embeddings = []
    for ahead in (False, True):
        llm = LLM(
            str(pooling_model(kind)),
            async_scheduling=ahead,
            max_num_batched_tokens=48,
            max_model_len=64,
            num_gpu_blocks_override=32,
            **settings_,
        )
        embeddings.append([out.outputs.embedding for out in llm.embed(prompts, use_tqdm=False)])
        for position in range(3):
            submit(llm, f"x{position}", prompts[-1])
        deltas = [*llm.core.step(), *llm.core.abort("x0")]
        while llm.core.has_work:
            deltas += llm.core.step()
        assert {delta.request_id for delta in deltas} == {"x0", "x1", "x2"}
        assert len(deltas) == 3
        llm.core.check_integrity()
        assert llm.core.snapshot().num_free_blocks == 32
    np.testing.assert_allclose(embeddings[0], embeddings[1], atol=1e-6)


def test_a_tenants_kv_quota_does_not_bind_a_model_without_a_kv_cache(llm: LLM) -> None:
    submit(llm, "a", [5] * 64, tenant="small", kv_max_fraction=0.001)
    (delta,) = llm.core.step()
    assert delta.finish_reason == "stop"


def test_a_model_that_is_not_pooled_is_told_why() -> None:
    """It may well be served, as a model of text."""
    settings = PoolingModelConfig(
        architecture="FalconMambaForCausalLM",
        encoder=False,
        tasks=("embed",),
        pooling_type="LAST",
        activation="normalize",
    )
    with pytest.raises(
        ModelLoadError, match=r"isn't supported for pooling: .* bridge only generates text"
    ):
        pooled_spec(settings, {"architectures": ["FalconMambaForCausalLM"]})


def test_adapters_of_a_model_from_outside_are_told_why() -> None:
    config = EngineConfig(model="", device="cpu")
    adapters = LoraWorker(config, make_device(config), {})
    spec = SimpleNamespace(architecture="LlamaForCausalLM")
    adapters.prepare(cast(Any, SimpleNamespace(model=object(), spec=spec, ranks=None)))
    assert adapters.refusal == (
        "Adapters are for models that run on Quire's own decoders and encoders or on the "
        "Transformers bridge; this LlamaForCausalLM doesn't."
    )
