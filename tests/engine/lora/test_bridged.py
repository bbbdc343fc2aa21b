"""Adapters of models that run through the Transformers bridge: PEFT's tokens, rows mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.lora.check import check_adapter
from engine.models.lora import NO_ADAPTERS
from engine.transformers_backend.lora import LoraForwardState
from engine.transformers_backend.model import TransformersModel
from tests.engine.multimodal.models import IMAGE_TOKEN, expected, llava_next, picture
from tests.survey.bridged import BRIDGED, STATEFUL
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

from .peft_oracle import PeftOracle, make_adapter, prompts, save
from .test_peft_equality import FEW, generate
from .test_peft_equality import serve as serve_any

#: recipe -> PEFT's options of two adapters.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arcee": (
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "r": 4},
    ),
    "gpt2-by-layer": (
        {"target_modules": "all-linear", "fan_in_fan_out": True},
        {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "deepseek_v2": (  # native without model_impl
        {
            "target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
            "use_rslora": True,
        },
        {"target_modules": ["kv_a_proj_with_mqa", "o_proj"], "use_dora": True, "r": 3},
    ),
    "opt-350m": (
        {"target_modules": "all-linear", "lora_bias": True},
        {"target_modules": ["q_proj"], "bias": "lora_only"},
    ),
    "falcon_h1": (
        {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj"]},
        {"target_modules": ["k_proj", "down_proj", "in_proj"], "use_dora": True},
    ),
}


def bridge(recipe: str, folder: Path) -> Path:
    make_checkpoint({**BRIDGED, **STATEFUL, **RECIPES}[recipe], folder)
    return folder


def serve(model: Path, **settings: Any) -> LLM:
    return serve_any(model, model_impl="transformers", **settings)


@pytest.mark.parametrize("recipe", FAMILIES)
def test_tokens_are_those_of_peft(tmp_path: Path, recipe: str) -> None:
    model = bridge(recipe, tmp_path / "model")
    folders = {
        name: make_adapter(model, tmp_path / name, seed=seed, **options)
        for seed, (name, options) in enumerate(zip("ab", FAMILIES[recipe], strict=True))
    }
    names = [None, "a", "b", None, "a"]
    named_prompts = list(zip(prompts(len(names)), names, strict=True))
    asked = [
        (prompt, None if name is None else LoRARequest(name, 1, str(folders[name])))
        for prompt, name in named_prompts
    ]
    llm = serve(model)
    assert isinstance(llm.core.executor.worker.loaded.model, TransformersModel)  # type: ignore[attr-defined]
    ours = generate(llm, asked, FEW)
    expected = PeftOracle(model, folders).greedy_all(named_prompts, FEW, ours)
    assert ours == expected
    assert generate(llm, asked[1:2], FEW) == expected[1:2]
    base = PeftOracle(model, {}).greedy_all(
        [(prompt, None) for prompt, _ in named_prompts[1:3]], FEW
    )
    assert all(one != other for one, other in zip(expected[1:3], base, strict=True))
    verdict = check_adapter(str(model), folders["b"], probe=True)
    assert (verdict.error, verdict.ok) == (None, True)
    assert verdict.probe is not None
    assert verdict.probe.max_difference < 1e-4


def test_all_kinds_of_tables(tmp_path: Path) -> None:
    """Whole ones, and single rows that a tied output layer has too."""
    model = bridge("arcee", tmp_path / "model")
    folders = {
        "a": make_adapter(
            model,
            tmp_path / "a",
            target_modules=["up_proj"],
            modules_to_save=["embed_tokens", "lm_head"],
        ),
        "b": make_adapter(
            model,
            tmp_path / "b",
            target_modules=["up_proj"],
            trainable_token_indices=[9, 5, *range(20, 200)],
        ),
    }
    named_prompts = list(zip(prompts(3), ["a", "b", "a"], strict=True))
    asked = [(prompt, LoRARequest(name, 1, str(folders[name]))) for prompt, name in named_prompts]
    ours = generate(serve(model), asked, FEW)
    assert ours == PeftOracle(model, folders).greedy_all(named_prompts, FEW, ours)
    for folder in folders.values():
        assert check_adapter(str(model), folder, probe=True).error is None


def test_an_adapter_that_brings_tokens_is_refused(tmp_path: Path) -> None:
    model = bridge("arcee", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "a", more_tokens=4, target_modules=["q_proj"])
    with pytest.raises(InvalidRequest, match="tokens of their own aren't supported for this model"):
        generate(serve(model), [([5], LoRARequest("a", 1, str(adapter)))], 1)


def test_other_kernels_and_rounded_weights(tmp_path: Path) -> None:
    model = bridge("arcee", tmp_path / "model")
    options = {"target_modules": ["q_proj", "lm_head"], "use_dora": True}
    adapter = make_adapter(model, tmp_path / "a", **options)
    request = LoRARequest("a", 1, str(adapter))
    named_prompts = list(zip(prompts(3), ["a", None, "a"], strict=True))
    asked = [(prompt, None if name is None else request) for prompt, name in named_prompts]
    baseline = serve(model, cpu_kernels=False)
    ours = generate(baseline, asked, FEW)
    assert ours == PeftOracle(model, {"a": adapter}).greedy_all(named_prompts, FEW, ours)
    rounded = serve(model, quantization="int8")
    mixed = generate(rounded, asked, FEW)
    assert mixed == [generate(rounded, [one], FEW)[0] for one in asked]
    assert mixed[0] != generate(rounded, [(named_prompts[0][0], None)], FEW)[0]
    executor: Any = baseline.core.executor
    executor.worker.loaded.model.to_device(executor.worker.kernels)
    assert executor.adapters.refusal.endswith("the Transformers bridge run on CPUs alone.")


def test_what_is_no_adapter_of_its_is_refused(tmp_path: Path) -> None:
    llm = serve(bridge("deepseek_v2", tmp_path / "model"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidRequest, match="GGUF adapters are for models that run on Quire's"):
        generate(llm, [([5], LoRARequest("a", 1, str(tmp_path / "a.gguf")))], 1)
    experts = make_adapter(
        tmp_path / "model", tmp_path / "b", target_parameters=["mlp.experts.gate_up_proj"],
        target_modules=["q_a_proj"],
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match=r"experts\.lora_A.* belongs to no module"):
        generate(llm, [([5], LoRARequest("b", 1, str(experts)))], 1)


def test_rows_of_drafts_go_through_their_own(tmp_path: Path) -> None:
    model = bridge("arcee", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "a", target_modules=["q_proj", "lm_head"])
    prompt = [5, 9, 17, 5, 9, 17, 5, 9]
    asked = [(prompt, LoRARequest("a", 1, str(adapter))), (prompt, None)]
    llm = serve(model, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert generate(llm, asked, 24) == generate(serve(model), asked, 24)


def test_modules_that_are_given_other_rows_than_tokens_refuse(tmp_path: Path) -> None:
    llm = serve(bridge("arcee", tmp_path / "model"))
    adapted = llm.core.executor.worker.loaded.model.adapted  # type: ignore[attr-defined]
    step = LoraForwardState()
    step.begin((2, 3), NO_ADAPTERS, torch.tensor([0, 5]))
    for shape, strange in {
        (2, 3): False, (6,): False, (2, 1, 3): False, (3, 2): True, (4,): True, (2, 3, 4): True
    }.items():  # fmt: skip
        step.observe(str(shape), shape, output=False)
        assert (str(shape) in step.strange) == strange
    step.observe("head", (2,), output=True)
    assert "head" in step.strange  # of two sequences the output layer is given all tokens
    assert "model/layers/0/mlp/up_proj" in adapted.linears
    missing = {name for name in adapted.linears if name.startswith("model/layers/0/mlp")}
    for name in missing:
        del adapted.linears[name]
    folder = make_adapter(tmp_path / "model", tmp_path / "a", target_modules=["up_proj"])
    with pytest.raises(InvalidRequest, match=r"layers\.0\.mlp\.up_proj.* belongs to no module"):
        generate(llm, [([5], LoRARequest("a", 1, str(folder)))], 1)


def test_a_picture_takes_no_adapter_of_the_embedding_from_its_batch(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model, processor = llava_next(tmp_path / "model")
    torch.manual_seed(0)
    options = LoraConfig(lora_alpha=64, init_lora_weights=False, target_modules=["embed_tokens"])
    adapted = get_peft_model(model, options).eval()
    save(adapted, tmp_path / "a")
    llm = LLM(
        str(tmp_path / "model"),
        dtype="float32",
        model_impl="transformers",
        num_gpu_blocks_override=256,
        enable_lora=True,
    )
    image = picture(1, 60, 40)
    prompts: list[Any] = [
        {"prompt": "Words alone"},
        {"prompt": f"See {IMAGE_TOKEN} here.", "multi_modal_data": {"image": [image]}},
    ]
    results = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=FEW, ignore_eos=True),
        lora_request=[LoRARequest("a", 1, str(tmp_path / "a"))] * 2,
    )
    assert [list(result.outputs[0].token_ids) for result in results] == [
        expected(adapted.base_model.model, processor, prompt["prompt"], images, FEW)
        for prompt, images in zip(prompts, ([], [image]), strict=True)
    ]
