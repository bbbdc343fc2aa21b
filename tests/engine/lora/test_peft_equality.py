"""Greedy tokens are those of PEFT in float32, for every kind of adapter that is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, LoRARequest, SamplingParams
from engine.lora.check import check_adapter
from engine.models.decoder import NativeDecoder

from .peft_oracle import PeftOracle, checkpoint, make_adapter, prompts

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
COUNT = 16
FEW = 8

#: name -> (recipe of the model, PEFT's options).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-linear": ("llama", {"target_modules": ALL}),
    "attention-alone": ("qwen2", {"target_modules": ["q_proj", "v_proj"]}),
    "rank-stabilised": ("llama", {"target_modules": ALL, "use_rslora": True, "lora_alpha": 4}),
    "patterns": (
        "qwen3",
        {
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.down_proj": 20},
            "alpha_pattern": {"k_proj": 3, "layers.0.mlp.up_proj": 30},
        },
    ),
    "bias-of-b": ("llama", {"target_modules": ALL, "lora_bias": True}),
    "bias-of-the-base": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"}),
    "dora": ("llama", {"target_modules": ALL, "use_dora": True}),
    "dora-with-biases": ("qwen2", {"target_modules": ALL, "use_dora": True}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "grouped-rows": (
        "gpt_neox",
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
    ),
    "transposed": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "transposed-dora": (
        "gpt2",
        {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "parallel": ("falcon-new", {"target_modules": ["query_key_value", "dense", "dense_h_to_4h"]}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "head": ("llama", {"target_modules": ["down_proj", "lm_head"]}),
    "embedding-and-head": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "dora-of-embedding": ("llama", {"target_modules": [*ALL, "embed_tokens"], "use_dora": True}),
    "dora-of-scaled-embedding": ("gemma", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "scaled-embedding": ("gemma", {"target_modules": ["embed_tokens", "o_proj"]}),
    "whole-embedding-and-head": (
        "llama",
        {"target_modules": ALL, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "tokens-of-their-own": (
        "llama",
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {
                "embed_tokens": [9, 5, *range(20, 200)],
                "lm_head": [70, 6],
            },
        },
    ),
    "windows": ("gemma2", {"target_modules": ALL}),
    "layer-by-layer": ("stablelm", {"target_modules": ALL}),
    "states": ("granite4", {"target_modules": ["in_proj", "out_proj", "q_proj", "input_linear"]}),
    "scaled-gates": (
        "falcon_h1",
        {"target_modules": ["in_proj", "q_proj", "gate_proj", "up_proj", "down_proj"]},
    ),
    "selected-states": ("mamba", {"target_modules": ["in_proj", "x_proj"]}),
    "gated-attention": (
        "qwen3_next",
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]},
    ),
    "lightning-attention": (
        "minimax",
        {"target_modules": ["qkv_proj", "output_gate", "out_proj", "q_proj", "o_proj"]},
    ),
}


def serve(model: Path, **options: Any) -> LLM:
    return LLM(str(model), dtype="float32", skip_tokenizer_init=True, max_num_seqs=8, **options)


def generate(
    llm: LLM, prompt_requests: list[tuple[list[int], LoRARequest | None]], count: int = COUNT
) -> list[list[int]]:
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in prompt_requests],
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False),
        use_tqdm=False,
        lora_request=[adapter for _, adapter in prompt_requests],
    )
    return [result.outputs[0].token_ids for result in results]


MIXED = [(prompt, "a" if index % 3 else None) for index, prompt in enumerate(prompts(4))]


#: What PEFT said to `MIXED`, by model and adapter.
_expected_outputs: dict[tuple[Path, Path], list[list[int]]] = {}


def answers(model: Path, adapter: Path, ours: list[list[int]]) -> list[list[int]]:
    """What PEFT says to `MIXED`, where `ours` is likely."""
    if (model, adapter) in _expected_outputs:
        return _expected_outputs[model, adapter]
    pairs = [*MIXED, (MIXED[1][0], None)]
    oracle = PeftOracle(model, {"a": adapter})
    *expected, without = oracle.greedy_all(pairs, FEW, [*ours, []])
    assert expected[1] != without  # the adapter does something
    _expected_outputs[model, adapter] = expected
    return expected


def check(model: Path, adapter: Path, **options: Any) -> None:
    """Rows of the base and of the adapter in one batch, compiled and layer by layer."""
    request = LoRARequest("a", 1, str(adapter))
    asked = [(prompt, None if has_adapter is None else request) for prompt, has_adapter in MIXED]
    llm = serve(model, **options)
    ours = generate(llm, asked, FEW)
    expected = answers(model, adapter, ours)
    assert ours == expected
    assert generate(llm, asked[1:2], FEW) == expected[1:2]  # alone, and from the cache


#: Variants whose adapters change layers with states: all layers still run in one call.
STATES = ("states", "selected-states", "gated-attention", "lightning-attention")


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_peft(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, options = VARIANTS[variant]
    if variant in STATES:
        monkeypatch.delattr(NativeDecoder, "_run_layers")
    model = checkpoint(recipe, tmp_path / "model")
    check(model, make_adapter(model, tmp_path / "adapter", **options))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("full", [False, True])
def test_tied_tables_are_as_peft_has_them(tmp_path: Path, target: str, full: bool) -> None:
    model = checkpoint("llama", tmp_path / "model", tie_word_embeddings=True)
    targets = ["q_proj"] if full else ["q_proj", target]
    saved = [target] if full else None
    adapter = make_adapter(
        model, tmp_path / "adapter", target_modules=targets, modules_to_save=saved
    )
    check(model, adapter)


def test_tied_tokens_of_their_own_are_as_peft_has_them(tmp_path: Path) -> None:
    model = checkpoint("llama", tmp_path / "model", tie_word_embeddings=True)
    adapter = make_adapter(
        model,
        tmp_path / "adapter",
        target_modules=["q_proj"],
        trainable_token_indices=[9, 5, *range(20, 200)],
    )
    check(model, adapter)
    verdict = check_adapter(str(model), adapter, probe=True)
    assert verdict.error is None
    assert verdict.target_modules == ["embedding", "head", "q_proj"]


def test_layers_that_run_one_by_one_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("llama", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=ALL, use_dora=True)
    monkeypatch.setattr("engine.models.decoder.compile_decoder", lambda *args: None)
    check(model, adapter)
    check(model, adapter, cpu_kernels=False)
