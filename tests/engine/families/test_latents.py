"""Families that attend over latents: what they keep, how they run, what's left to the bridge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import BadModelConfig, InvalidRequest, ModelLoadError
from engine.models.decoder import NativeDecoder
from engine.models.registry import decoder_spec, read_config
from tests.engine.checkpoints.folders import make_pair
from tests.engine.checkpoints.writers import fp8
from tests.engine.families.conftest import OUTPUT, Case
from tests.engine.lora.peft_oracle import PeftOracle, make_adapter, prompts
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint

NAMES = [name for name, recipe in RECIPES.items() if "kv_lora_rank" in recipe]
DEEPSEEK = ["deepseek_v2-lite", "deepseek_v2", "deepseek_v3"]
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 200, 31, 77, 300, 12, 13, 9, 45]
Cases = Callable[[str], Case]


def make(folder: Path, **settings: Any) -> LLM:
    settings = {"num_gpu_blocks_override": 160, "max_model_len": 256, **settings}
    return LLM(str(folder), **{"dtype": "float32", "num_threads": 1, **settings})


def tokens(llm: LLM, mixed: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(mixed, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def model_of(llm: LLM) -> Any:
    executor: Any = llm.core.executor
    return executor.worker.loaded.model


@pytest.mark.parametrize("name", DEEPSEEK)
def test_a_token_keeps_one_latent_a_layer(name: str, case: Cases) -> None:
    folder, recipe = case(name).folder, RECIPES[name]
    llm, width = make(folder), recipe["kv_lora_rank"] + recipe["qk_rope_head_dim"]
    model = model_of(llm)
    assert isinstance(model, NativeDecoder)
    layers = recipe["num_hidden_layers"]
    assert llm.core.capacity.kv_bytes_per_token == layers * width * 4
    retained_nbytes = {
        id(part): part.nbytes for cache in model.kv_caches for part in cache if part is not None
    }
    assert sum(retained_nbytes.values()) == 160 * 16 * layers * width * 4
    bridged = make(folder, model_impl="transformers").core.capacity.kv_bytes_per_token
    # Keys and values of every head, as long as the longer of both.
    longer = recipe["qk_nope_head_dim"] + recipe["qk_rope_head_dim"]
    assert bridged == layers * recipe["num_attention_heads"] * 2 * longer * 4


def test_a_backend_attends_over_latents_as_over_whole_values(case: Cases) -> None:
    expected = case("deepseek_v3")
    llm = make(expected.folder, attention_backend="TORCH_SDPA", max_num_batched_tokens=32)
    assert isinstance(model_of(llm), NativeDecoder)
    assert tokens(llm, expected.prompts) == expected.greedy


def test_rounded_latents_have_a_scale_a_token_and_layer(case: Cases) -> None:
    llm = make(case("deepseek_v3").folder, kv_cache_dtype="int8")
    assert llm.core.capacity.kv_bytes_per_token == 3 * (24 + 4)
    caches = model_of(llm).kv_caches
    retained_nbytes = {
        id(part): part.nbytes for cache in caches for part in cache if part is not None
    }
    assert sum(retained_nbytes.values()) == 160 * 16 * 3 * (24 + 4)


@pytest.mark.parametrize(("dtype", "value_bytes"), [("int8", 28 + 16), ("fp8", 24 + 16)])
def test_chosen_latents_are_rounded_and_reused(dtype: str, value_bytes: int, case: Cases) -> None:
    """Three layers of latents and of keys of the index."""
    mixed = case("deepseek_v32").prompts
    llm = make(case("deepseek_v32").folder, kv_cache_dtype=dtype)
    assert llm.core.capacity.kv_bytes_per_token == 3 * value_bytes
    cold = tokens(llm, mixed)
    hits = llm.core.snapshot().prefix_cache_hits_total
    assert tokens(llm, mixed) == cold
    assert llm.core.snapshot().prefix_cache_hits_total > hits
    assert tokens(make(case("deepseek_v32").folder, kv_cache_dtype=dtype), mixed[-1:]) == cold[-1:]


def test_deepseek_v2_lite_as_published_keeps_less_than_a_tenth_of_the_bridge() -> None:
    spec = decoder_spec(
        {
            "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048,
            "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": False,
            "moe_layer_freq": 1, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
            "topk_method": "greedy", "n_group": 1, "topk_group": 1, "rope_theta": 10000,
            "max_position_embeddings": 163840,
            "rope_scaling": {
                "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn",
            },
        }
    )  # fmt: skip
    assert spec.kv_bytes_per_token(2) == 27 * 576 * 2
    assert 10 * spec.kv_bytes_per_token(2) < 27 * 16 * 2 * 192 * 2
    # YaRN's magnitude, squared, of queries and keys.
    assert spec.attention_scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)
    assert spec.num_parameters == pytest.approx(15.7e9, rel=0.01)


@pytest.mark.parametrize(
    ("architecture", "more", "values"),
    [
        ("DeepseekV3ForCausalLM", {}, 576),
        # And the index's key.
        (
            "DeepseekV32ForCausalLM",
            {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
            576 + 128,
        ),
    ],
)
def test_deepseek_v3_as_published_keeps_576_values_a_token_and_layer(
    architecture: str, more: dict[str, int], values: int
) -> None:
    spec = decoder_spec(
        {
            "architectures": [architecture], "vocab_size": 129280, "hidden_size": 7168,
            "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "norm_topk_prob": True,
            "moe_layer_freq": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
            "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "rope_theta": 10000,
            "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, **more,
        }
    )  # fmt: skip
    assert spec.kv_bytes_per_token(2) == 61 * values * 2


@pytest.mark.parametrize("name", DEEPSEEK)
def test_with_so_few_blocks_that_sequences_are_preempted(name: str, case: Cases) -> None:
    expected = case(name)
    llm = make(expected.folder, num_gpu_blocks_override=40, block_size=4, max_num_batched_tokens=32)
    assert tokens(llm, expected.prompts) == expected.greedy
    assert llm.core.scheduler.num_preemptions > 0
    llm.core.check_integrity()


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("compiled", [True, False])
def test_experts_and_groups_are_chosen_by_their_biases_too(
    name: str, compiled: bool, tmp_path: Path
) -> None:
    make_checkpoint(RECIPES[name], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    unbiased = Oracle(tmp_path).greedy(PROMPT, 8)
    for seed, key in enumerate(sorted(tensors)):
        if key.endswith("e_score_correction_bias"):
            generator = torch.Generator().manual_seed(seed)
            tensors[key] = torch.randn(tensors[key].shape, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
    expected = Oracle(tmp_path).greedy(PROMPT, 8)
    assert expected != unbiased
    llm = make(tmp_path, cpu_kernels=compiled)
    assert isinstance(model_of(llm), NativeDecoder)
    assert tokens(llm, [PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)) == [
        expected
    ]


@pytest.mark.parametrize("name", DEEPSEEK)
def test_bfloat16_is_near_float32(name: str, case: Cases) -> None:
    expected = case(name)
    llm = make(expected.folder, dtype="bfloat16")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = expected.longest
    scores: Any = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    errors = [
        abs(entry[prompt[index]].logprob - expected.logprobs[index - 1, prompt[index]].item())
        for index, entry in enumerate(scores)
        if entry is not None
    ]
    spread = float(expected.logprobs.std())
    assert sum(errors) / len(errors) < 0.1 * spread


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_rows_are_the_same_beside_others(quantization: str, tmp_path: Path) -> None:
    # Sizes of whole groups.
    sizes = {"hidden_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
    sizes |= {"intermediate_size": 96, "moe_intermediate_size": 64}
    make_checkpoint({**RECIPES["deepseek_v3"], **sizes}, tmp_path)
    llm, baseline_llm = make(tmp_path, quantization=quantization), make(tmp_path)
    mixed = prompts(4)
    together = tokens(llm, mixed)
    assert together == [tokens(llm, [prompt])[0] for prompt in mixed]
    rounded = {
        report.layer.rpartition(".")[2]
        for report in model_of(llm).load_report
        if report.level == "read"
    }
    assert "kv_b_proj" not in rounded
    assert {"q_a_proj+kv_a_proj_with_mqa", "q_b_proj", "o_proj"} <= rounded
    assert model_of(llm).decode_bytes < model_of(baseline_llm).decode_bytes


def test_a_checkpoint_in_fp8_is_what_its_plain_weights_say(tmp_path: Path) -> None:
    """By blocks, as DeepSeek V3 is published: each head's keys and values are read, others kept."""
    make_checkpoint(RECIPES["deepseek_v3"], tmp_path / "made")

    def chosen(name: str) -> bool:
        return name.endswith(".weight") and "_proj" in name

    pair = make_pair(
        tmp_path / "made",
        tmp_path,
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        fp8("block", "weight_scale_inv", 16),
        chosen,
    )
    assert any("kv_b_proj" in name for name in pair.weights)
    oracle = Oracle(pair.dense)
    assert tokens(make(pair.packed), [PROMPT]) == [oracle.greedy(PROMPT, OUTPUT)]
    report = {one.layer: one.level for one in model_of(make(pair.packed)).load_report}
    prefix = "model.layers.1.self_attn."
    assert report[f"{prefix}kv_b_proj"] == "read"
    assert report[f"{prefix}q_a_proj+kv_a_proj_with_mqa"] == report[f"{prefix}q_b_proj"] == "kept"


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("deepseek_v2-lite", ["q_proj", "kv_a_proj_with_mqa", "o_proj"]),
        ("deepseek_v2", ["kv_b_proj"]),
        ("deepseek_v3", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
        ("deepseek_v32", ["wq_b", "wk", "weights_proj"]),
        (
            "deepseek_v32",
            [
                *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
                *("wq_b", "wk", "weights_proj", "gate_proj", "up_proj", "down_proj"),
            ],
        ),
        ("kimi_linear", ["q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"]),
    ],
)
def test_adapters_change_the_layers_around_attention(
    name: str, modules: list[str], tmp_path: Path
) -> None:
    make_checkpoint(RECIPES[name], tmp_path / "model")
    folder = make_adapter(tmp_path / "model", tmp_path / "a", target_modules=modules)
    # Longer than the 20 tokens that an index selects.
    pairs = list(zip([prompt * 5 for prompt in prompts(3)], ["a", None, "a"], strict=True))
    expected = PeftOracle(tmp_path / "model", {"a": folder}).greedy_all(pairs, OUTPUT)
    llm, request = make(tmp_path / "model"), LoRARequest("a", 1, str(folder))
    outputs = llm.generate(
        [prompt for prompt, _ in pairs],
        GREEDY,
        use_tqdm=False,
        lora_request=[None if name is None else request for _, name in pairs],
    )
    assert isinstance(model_of(llm), NativeDecoder)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize("setting", [{"use_dora": True}, {"lora_bias": True}])
def test_more_than_matrices_of_what_makes_keys_and_values_is_refused(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(RECIPES["deepseek_v2"], tmp_path / "model")
    adapter = make_adapter(
        tmp_path / "model", tmp_path / "a", target_modules=["kv_b_proj"], **setting
    )
    llm = make(tmp_path / "model")
    with pytest.raises(InvalidRequest, match=r"DoRA and biases .*kv_b_proj aren't supported"):
        llm.generate(
            [PROMPT], GREEDY, use_tqdm=False, lora_request=LoRARequest("a", 1, str(adapter))
        )


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("deepseek_v2-lite", {"attention_bias": True}, "attention_bias isn't supported where"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True isn't supported"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias = True isn't supported"),
    ],
)
def test_what_isnt_done_natively_is_left_to_the_bridge(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make_checkpoint({**RECIPES[name], **changes}, tmp_path)
    llm = make(tmp_path)
    assert not isinstance(model_of(llm), NativeDecoder)
    assert tokens(llm, [PROMPT]) == [Oracle(tmp_path).greedy(PROMPT, OUTPUT)]
    with pytest.raises(ModelLoadError, match=says):
        make(tmp_path, model_impl="quire")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"q_lora_rank": -3}, "q_lora_rank"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"qk_nope_head_dim": 1 << 40}, "qk_nope_head_dim"),
        ({"v_head_dim": "12"}, "v_head_dim"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 9}, "n_group"),
        ({"n_group": 8, "topk_group": 8}, "n_group"),
        ({"num_experts_per_tok": 5}, "n_group"),
    ],
)
def test_sizes_that_cant_be_are_refused_by_name(
    changes: dict[str, Any], param: str, checkpoint: Callable[[str], Path]
) -> None:
    config = read_config(checkpoint("deepseek_v3"))
    with pytest.raises(BadModelConfig) as refused:
        decoder_spec({**config, **changes})
    assert refused.value.param == param
