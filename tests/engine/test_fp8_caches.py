"""fp8 KV caches on a CPU against `transformers` whose attention rounds keys and values likewise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from engine.models.decoder import NativeDecoder
from engine.models.forward_context import KVScales
from tests.engine.models import make_model
from tests.engine.speech.models import make_whisper
from tests.engine.test_token_equality import make, mixed_prompts, run
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

PROMPTS = mixed_prompts(12)
DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def native(llm: LLM) -> NativeDecoder:
    model = llm.core.executor.worker.loaded.model
    assert isinstance(model, NativeDecoder)
    return model


def rounded_model(folder: Path, dtype: torch.dtype, scales: list[KVScales | None]) -> Any:
    """`transformers`' model, whose attention sees keys and values as the cache holds them."""
    limit = torch.finfo(dtype).max

    def rounded(x: Tensor, scale: Tensor | None) -> Tensor:
        by_head = torch.ones(1) if scale is None else scale
        by_head = by_head[:, None, None]
        return (x / by_head).clamp(-limit, limit).to(dtype).float() * by_head

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
    ) -> Any:
        scale = scales[module.layer_idx] if scales else None
        key = rounded(key, None if scale is None else scale.keys)
        value = rounded(value, None if scale is None else scale.values)
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register("rounded", attention)
    AttentionMaskInterface.register("rounded", eager_mask)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.set_attn_implementation("rounded")
    return model


def agreement(model: Any, prompts: list[list[int]], outputs: list[list[int]]) -> float:
    """Share of the tokens that the model would have said too, of the same text."""
    same = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            likeliest = model(torch.tensor([prompt + tokens])).logits[0].argmax(-1).tolist()
        same += [a == b for a, b in zip(likeliest[len(prompt) - 1 :], tokens)]
    return sum(same) / len(same)


def write_scales(folder: Path, layers: int) -> None:
    """As llm-compressor writes them, one for all of a layer's heads."""
    weights = load_file(folder / "model.safetensors")
    for layer in range(layers):
        prefix = f"model.layers.{layer}.self_attn."
        weights[prefix + "k_scale"] = torch.tensor([0.01 * (layer + 1)])
        weights[prefix + "v_scale"] = torch.tensor([0.02])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "source", "family"),
    [
        ("fp8", "none", "llama"),
        ("fp8", "checkpoint", "qwen3"),
        ("fp8_e4m3", "measured", "qwen2-window"),
        ("fp8_e5m2", "measured", "llama"),
        ("fp8_e5m2", "none", "mistral"),
    ],
)
def test_tokens_are_those_of_keys_and_values_rounded_alike(
    name: str, source: str, family: str, tmp_path: Path
) -> None:
    folder = make_model(family, tmp_path)
    if source == "checkpoint":
        write_scales(folder, 3)
    llm = make(folder, kv_cache_dtype=name, calculate_kv_scales=source == "measured")
    model = native(llm)
    assert model.compiled
    assert all((scales is None) == (source == "none") for scales in model.kv_scales)
    outputs = run(llm, PROMPTS)
    assert agreement(rounded_model(folder, DTYPES[name], model.kv_scales), PROMPTS, outputs) > 0.97
    # The rounding shows: without it the model says other tokens.
    assert agreement(rounded_model(folder, torch.float32, []), PROMPTS, outputs) < 0.97
    llm.core.reset_prefix_cache()
    assert [run(llm, [prompt])[0] for prompt in PROMPTS[:4]] == outputs[:4]


class RoundingCache(DynamicCache):
    """Latents and rotated keys as an fp8 cache holds them, by the scale of each layer."""

    def __init__(self, dtype: torch.dtype, scales: list[KVScales | None]) -> None:
        super().__init__()
        self._dtype, self._scales = dtype, scales

    def update(self, key: Tensor, value: Tensor, layer: int, *rest: Any, **options: Any) -> Any:
        scales = self._scales[layer] if self._scales else None
        scale = torch.ones(1) if scales is None else scales.keys
        limit = torch.finfo(self._dtype).max
        key, value = (
            (part / scale).clamp(-limit, limit).to(self._dtype).float() * scale
            for part in (key, value)
        )
        return super().update(key, value, layer, *rest, **options)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("name", "measured"), [("fp8", False), ("fp8_e5m2", True)])
def test_tokens_are_those_of_latents_rounded_alike(
    name: str, measured: bool, tmp_path: Path
) -> None:
    make_checkpoint(RECIPES["deepseek_v3"], tmp_path)
    llm = make(tmp_path, kv_cache_dtype=name, calculate_kv_scales=measured)
    model, oracle = native(llm), AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    width = RECIPES["deepseek_v3"]["kv_lora_rank"] + RECIPES["deepseek_v3"]["qk_rope_head_dim"]
    assert llm.core.capacity.kv_bytes_per_token == 3 * width
    assert all((scales is not None) == measured for scales in model.kv_scales)
    outputs = run(llm, PROMPTS)

    def same_tokens(dtype: torch.dtype, scales: list[KVScales | None]) -> float:
        def rounded(ids: Tensor) -> Any:
            cache = RoundingCache(dtype, scales)
            return oracle(ids, past_key_values=cache, use_cache=True)

        return agreement(rounded, PROMPTS, outputs)

    assert same_tokens(DTYPES[name], model.kv_scales) > 0.97
    assert same_tokens(torch.float32, []) < 0.97
    llm.core.reset_prefix_cache()
    assert [run(llm, [prompt])[0] for prompt in PROMPTS[:4]] == outputs[:4]


def test_latents_are_divided_by_the_keys_scale_in_one_call_and_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(RECIPES["deepseek_v3"], tmp_path)
    write_scales(tmp_path, 3)  # another one for values
    llm = make(tmp_path, kv_cache_dtype="fp8")
    assert native(llm).compiled
    outputs = run(llm, PROMPTS[:4])
    monkeypatch.setattr("engine.models.decoder.compile_decoder", lambda *args: None)
    assert run(make(tmp_path, kv_cache_dtype="fp8"), PROMPTS[:4]) == outputs


def test_measured_scales_are_what_makes_large_keys_fit(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        weights[prefix + "k_proj.weight"] *= 3000
        weights[prefix + "q_proj.weight"] /= 3000
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    exact = run(make(folder), PROMPTS)

    def same_tokens(**settings: Any) -> float:
        outputs = run(make(folder, kv_cache_dtype="fp8", **settings), PROMPTS)
        pairs = [pair for rows in zip(exact, outputs, strict=True) for pair in zip(*rows)]
        return sum(a == b for a, b in pairs) / len(pairs)

    assert same_tokens() < 0.3 < same_tokens(calculate_kv_scales=True)


def test_an_fp8_cache_holds_four_times_the_tokens_of_float32(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    sizes = [
        make(folder, kv_cache_dtype=name).core.capacity.kv_bytes_per_token
        for name in ("float32", "fp8", "fp8_e5m2")
    ]
    assert sizes == [4 * 192, 192, 192]


def test_the_torch_kernels_read_the_same_caches(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    logprobs = []
    for compiled in (True, False):
        llm = make(folder, cpu_kernels=compiled, **settings)
        result = llm.generate([PROMPTS[9]], params, use_tqdm=False)[0]
        assert result.prompt_logprobs is not None
        logprobs.append(
            [
                position[token].logprob
                for token, position in zip(PROMPTS[9], result.prompt_logprobs)
                if position
            ]
        )
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.2)


def test_scales_of_a_model_that_carries_states_are_not_measured(tmp_path: Path) -> None:
    make_checkpoint(RECIPES["lfm2"], tmp_path / "lfm2")
    make_whisper(tmp_path / "whisper")
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True, "dtype": "float32"}
    for name in ("lfm2", "whisper"):
        with pytest.raises(ConfigError, match="carries states") as refused:
            LLM(str(tmp_path / name), num_gpu_blocks_override=40, **settings)
        assert refused.value.param == "calculate_kv_scales"
