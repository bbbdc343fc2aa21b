"""LoRA adapters of cross attention give PEFT's tokens, and states are shared only where an adapter
doesn't change their keys and values.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.lora.check import check_adapter
from tests.engine.lora.peft_oracle import save
from tests.engine.speech.models import START, expected, make_whisper, sound

NUM_TOKENS = 16
CLIPS = [sound(1), sound(2, 0.4)]
#: Which modules of the decoder the adapters change.
TARGETS = {
    "queries": r".*decoder.*encoder_attn\.(q_proj|out_proj)",
    "keys": r".*decoder.*encoder_attn\.(k_proj|v_proj)",
    "all": r".*decoder.*(q_proj|k_proj|v_proj|out_proj|fc1)",
}


def _adapted(base: Any, folder: Path, targets: str, seed: int) -> Any:
    """The model with a random adapter, which is saved."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    adapted: Any = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    save(adapted, folder)
    return adapted.base_model.model


def _run(llm: LLM, names: list[str | None], root: Path) -> list[list[list[int]]]:
    """For each adapter the tokens of all clips, in one batch."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [START], "multi_modal_data": {"audio": clip}}
        for _ in names
        for clip in CLIPS
    ]
    requests = [
        None if name is None else LoRARequest(name, 1 + number, str(root / name))
        for number, name in enumerate(names)
        for _ in CLIPS
    ]
    results = [
        list(result.outputs[0].token_ids)
        for result in llm.generate(prompts, params, lora_request=requests)
    ]
    return [results[first : first + len(CLIPS)] for first in range(0, len(results), len(CLIPS))]


def _llm(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enable_lora=True,
        block_size=16,
        **{"num_gpu_blocks_override": 256} | settings,
    )


def test_adapters_of_cross_attention_give_pefts_tokens_together_and_in_a_small_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_whisper(tmp_path / "model")
    models = {
        name: _adapted(base, tmp_path / name, targets, seed)
        for seed, (name, targets) in enumerate(TARGETS.items())
    }
    names: list[str | None] = [None, *models]
    expected_tokens = [
        [
            expected(base if name is None else models[name], clip, [START], NUM_TOKENS)
            for clip in CLIPS
        ]
        for name in names
    ]
    assert len({str(rows) for rows in expected_tokens}) == len(
        names
    )  # each adapter says something else

    llm = _llm(tmp_path / "model")
    core, encoded = llm.llm_engine.core, _count_encodings(llm, monkeypatch)
    assert _run(llm, names, tmp_path) == expected_tokens
    # "queries" reads the states of the base.
    assert sorted(encoded) == [False] * 2 + [True] * 4
    assert _run(llm, names, tmp_path) == expected_tokens
    assert len(encoded) == 6
    core.check_integrity()

    llm = _llm(tmp_path / "model", num_gpu_blocks_override=18, max_num_batched_tokens=8)
    assert _run(llm, names, tmp_path) == expected_tokens
    llm.llm_engine.core.check_integrity()


def test_two_tenants_with_adapters_of_one_name_share_no_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_whisper(tmp_path / "model")
    owners = {"first": "first", "second": "second", "third": "first"}
    models = {
        owner: _adapted(base, tmp_path / owner / "keys", TARGETS["keys"], seed)
        for seed, owner in enumerate(("first", "second"))
    }
    expected_tokens = {
        owner: expected(model, CLIPS[0], [START], NUM_TOKENS) for owner, model in models.items()
    }
    assert expected_tokens["first"] != expected_tokens["second"]
    llm = _llm(tmp_path / "model")
    encoded = _count_encodings(llm, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    sound_of_all = {"prompt_token_ids": [START], "multi_modal_data": {"audio": CLIPS[0]}}
    prompts = [sound_of_all | {"cache_salt": tenant} for tenant in owners]
    requests = [
        LoRARequest("keys", 1 + number, str(tmp_path / owner / "keys"))
        for number, owner in enumerate(owners.values())
    ]
    for _ in range(2):
        results = llm.generate(prompts, params, lora_request=requests)
        tokens = [list(result.outputs[0].token_ids) for result in results]
        assert tokens == [expected_tokens[owner] for owner in owners.values()]
    # The third has the first's adapter, and isn't told so by the time that it takes.
    assert encoded == [True] * 3


def _count_encodings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each encoding from now on, whether an adapter changes it."""
    model = llm.llm_engine.core.executor.worker.loaded.model
    encode, encoded = model.encode_to_cache, list[bool]()

    def counted(tensors: Any, block_ids: list[int], adapter: Any) -> None:
        encoded.append(adapter is not None)
        encode(tensors, block_ids, adapter)

    monkeypatch.setattr(model, "encode_to_cache", counted)
    return encoded


def test_an_adapter_passes_the_check_of_an_upload(tmp_path: Path) -> None:
    base = make_whisper(tmp_path / "model")
    _adapted(base, tmp_path / "all", TARGETS["all"], 0)
    verdict = check_adapter(str(tmp_path / "model"), tmp_path / "all", probe=True)
    assert verdict.ok, verdict.error


def test_an_adapter_of_the_encoder_is_refused_by_name(tmp_path: Path) -> None:
    base = make_whisper(tmp_path / "model")
    _adapted(base, tmp_path / "encoder", r".*encoder\.layers.*q_proj", 0)
    with pytest.raises(InvalidRequest, match="encoder"):
        _run(_llm(tmp_path / "model"), ["encoder"], tmp_path)
