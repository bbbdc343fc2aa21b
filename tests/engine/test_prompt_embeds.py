"""Prompts as embedding vectors: the model's own give the tokens that the ids give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.contract.messages import EngineRequest, PromptEmbeds
from tests.engine.models import Oracle
from tests.engine.test_token_equality import mixed_prompts

Folder = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = mixed_prompts(12)


def make(folder: Path, **changes: Any) -> LLM:
    settings = {"num_gpu_blocks_override": 400, "max_model_len": 256, **changes}
    return LLM(str(folder), dtype="float32", enable_prompt_embeds=True, **settings)


def as_embeds(oracle: Oracle, prompt: list[int]) -> dict[str, Tensor]:
    table = oracle.model.get_input_embeddings().weight
    return {"prompt_embeds": table[torch.tensor(prompt)]}


def run(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.core.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cpu_kernels": False, "block_size": 4},
        {"max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 30, "block_size": 4, "max_num_batched_tokens": 64},
        {"async_scheduling": True, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_the_models_own_vectors_give_the_same_tokens(
    model_folder: Folder, oracle: Callable[[str], Oracle], changes: dict[str, Any]
) -> None:
    llm = make(model_folder("llama"), **changes)
    expected = oracle("llama").greedy_all(PROMPTS, 12)
    embeds = [as_embeds(oracle("llama"), prompt) for prompt in PROMPTS]
    assert run(llm, embeds) == expected
    # Beside prompts of ids, and once more from the cache.
    mixed = [prompt_input for pair in zip(embeds, PROMPTS, strict=True) for prompt_input in pair]
    assert run(llm, mixed) == [tokens for tokens in expected for _ in range(2)]


def test_prefixes_are_shared_with_equal_vectors_alone(
    model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"))
    prompt = PROMPTS[6]
    other = [token - 1 for token in prompt]
    first, second = as_embeds(oracle("llama"), prompt), as_embeds(oracle("llama"), other)
    assert run(llm, [first]) != run(llm, [second])
    assert llm.core.scheduler.kv.num_hit_tokens == 0
    # Ids of zeros are what stands in a prompt of vectors.
    zeros = llm.generate([[0] * len(prompt)], GREEDY, use_tqdm=False)[0]
    assert zeros.num_cached_tokens == 0
    again = llm.generate([first], GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens >= 16
    assert again.prompt_token_ids == []


def test_prompts_share_the_blocks_before_their_vectors_part(
    model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"), block_size=4)
    prompt = [*range(20, 32), 40, 41]
    other = [*prompt[:9], *range(60, 65)]
    expected = [oracle("llama").greedy(text, 12) for text in (prompt, other)]
    first, second = (as_embeds(oracle("llama"), text) for text in (prompt, other))
    assert run(llm, [first]) == expected[:1]
    after = llm.generate([second], GREEDY, use_tqdm=False)[0]
    assert after.outputs[0].token_ids == expected[1]
    assert after.num_cached_tokens == 8


def test_sampling_sees_no_prompt_tokens(
    model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    """Penalties on a prompt of vectors touch no token, least of all the ids that stand for it."""
    llm = make(model_folder("llama"))
    params = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=1.9)
    prompt = PROMPTS[3]
    baseline_tokens = oracle("llama").greedy(prompt, 1)
    assert run(llm, [as_embeds(oracle("llama"), prompt)], params) == [baseline_tokens]


def test_the_last_vectors_are_kept_and_n_outputs_share_them(
    model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"))
    full_prompt, tail = PROMPTS[7], PROMPTS[7][-9:]
    cut = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, truncate_prompt_tokens=9)
    assert run(llm, [as_embeds(oracle("llama"), full_prompt)], cut) == [
        oracle("llama").greedy(tail, 12)
    ]
    several = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=8, ignore_eos=True)
    by_ids = llm.generate([full_prompt], several, use_tqdm=False)[0]
    by_vectors = llm.generate([as_embeds(oracle("llama"), full_prompt)], several, use_tqdm=False)[0]
    assert [o.token_ids for o in by_vectors.outputs] == [o.token_ids for o in by_ids.outputs]


@pytest.mark.parametrize(
    "invalid",
    [
        [[0.0] * 64],
        torch.zeros(64),
        torch.zeros(2, 3, 64),
        torch.zeros(3, 64, dtype=torch.int64),
        torch.zeros(3, 63),
        torch.full((3, 64), float("nan")),
        torch.full((3, 64), float("inf")),
    ],
    ids=["list", "flat", "batch", "ints", "width", "nan", "inf"],
)
def test_fault_10_vectors_of_a_wrong_form_are_refused(model_folder: Folder, invalid: Any) -> None:
    llm = make(model_folder("llama"))
    with pytest.raises(InvalidRequest) as caught:
        run(llm, [{"prompt_embeds": invalid}])
    assert caught.value.param == "prompt_embeds"
    assert not llm.core.has_work


def test_fault_02_no_vectors_are_an_empty_prompt(model_folder: Folder) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(make(model_folder("llama")), [{"prompt_embeds": torch.zeros(0, 64)}])
    assert caught.value.param == "prompt"


def test_they_must_be_allowed_and_have_no_prompt_logprobs(model_folder: Folder) -> None:
    vectors = {"prompt_embeds": torch.zeros(3, 64)}
    closed = LLM(str(model_folder("llama")), num_gpu_blocks_override=16)
    with pytest.raises(InvalidRequest, match="enable_prompt_embeds"):
        run(closed, [vectors])
    with pytest.raises(InvalidRequest) as caught:
        run(make(model_folder("llama")), [vectors], SamplingParams(prompt_logprobs=1))
    assert caught.value.param == "prompt_logprobs"


def test_the_bridge_takes_none(model_folder: Folder) -> None:
    llm = make(model_folder("llama"), model_impl="transformers", num_gpu_blocks_override=16)
    with pytest.raises(InvalidRequest, match=r"This model takes no prompt_embeds\."):
        run(llm, [{"prompt_embeds": torch.zeros(3, 64)}])


def message(name: str, embeds: Tensor, **more: Any) -> EngineRequest:
    """As a gateway sends it."""
    rows, size = embeds.shape
    prompt_embeds = PromptEmbeds("float32", rows, size, embeds.detach().numpy().tobytes())
    return EngineRequest(
        request_id=name,
        gateway_id="g",
        prompt_token_ids=[0] * rows,
        sampling=GREEDY,
        prompt_embeds=prompt_embeds,
        **more,
    )


def steps(llm: LLM) -> dict[str, list[int]]:
    """The tokens that come of all requests."""
    tokens_by_id: dict[str, list[int]] = {}
    while llm.core.has_work:
        for delta in llm.core.step():
            assert delta.error is None
            tokens_by_id.setdefault(delta.request_id, []).extend(delta.token_ids)
    llm.core.check_integrity()
    return tokens_by_id


def test_vectors_in_a_message_go_on_elsewhere(
    model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    llm, prompt = make(model_folder("llama")), PROMPTS[6]
    expected = oracle("llama").greedy(prompt, 12)
    embeds = as_embeds(oracle("llama"), prompt)["prompt_embeds"]
    llm.core.add_request(message("whole", embeds))
    llm.core.add_request(message("resumed", embeds, resume_token_ids=[expected[:5]]))
    outputs = steps(llm)
    assert outputs["whole"] == expected
    assert outputs["resumed"] == expected[5:]


def test_vectors_that_arent_whole_are_refused(model_folder: Folder) -> None:
    llm = make(model_folder("llama"))
    embeds = torch.zeros(5, llm.core.facts.hidden_size)
    for change in ({"rows": 6}, {"size": 1}, {"dtype": "float64"}, {"data": b""}, {"rows": 0}):
        asked = message("bad", embeds)
        for name, value in change.items():
            setattr(asked.prompt_embeds, name, value)
        with pytest.raises(InvalidRequest, match="prompt_embeds"):
            llm.core.add_request(asked)
    assert not llm.core.requests


@pytest.mark.parametrize("scale", [1e30, 3e38])
def test_vectors_out_of_all_bounds_hurt_no_neighbour(
    model_folder: Folder, oracle: Callable[[str], Oracle], scale: float
) -> None:
    llm, prompt = make(model_folder("llama"), max_num_batched_tokens=64), PROMPTS[6]
    embeds = torch.randn(20, llm.core.facts.hidden_size).sign() * scale
    asked = {"prompt_token_ids": prompt, "sampling": GREEDY, "gateway_id": "g"}
    for name in ("before", "after"):
        llm.core.add_request(EngineRequest(request_id=name, **asked))
        llm.core.add_request(message(f"wild {name}", embeds))
    outputs = steps(llm)
    assert outputs["before"] == outputs["after"] == oracle("llama").greedy(prompt, 12)
    assert len(outputs["wild before"]) == 12
