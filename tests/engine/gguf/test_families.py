"""Every architecture that is read from GGUF says what `transformers` says to the checkpoint.

Tensors get the names of gguf-py's own tables, and are changed as llama.cpp's converter does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import LLM, SamplingParams
from engine.checkpoints.gguf.names import FAMILIES
from engine.contract.errors import ModelLoadError
from tests.engine.gguf.files import quantized
from tests.engine.greedy import greedy_all
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 30, 31] * 20, [11]]
_TESTED_ELSEWHERE = {"llama", "qwen2", "qwen3", "gemma2", "phi3", "qwen2moe", "qwen3moe"}
Config = dict[str, Any]
Add = Callable[[gguf.GGUFWriter, Config], None]
Tensors = Iterator[tuple[str, Tensor]]


def as_they_are(name: str, tensor: Tensor, config: Config) -> Tensors:
    yield name, tensor


def turned(name: str, tensor: Tensor, config: Config) -> Tensors:
    """Llama's `permute`."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    kind = heads.get(name.split(".")[-2])
    if kind is not None:
        halves = tensor.reshape(config[kind], 2, -1, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def offset(name: str, tensor: Tensor, config: Config) -> Tensors:
    """Gemma's norms are kept as what is multiplied with."""
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def gpt_oss(name: str, tensor: Tensor, config: Config) -> Tensors:
    """Gate and up apart, [experts, outputs, inputs]; sinks are called a weight."""
    name = f"{name}.weight" if name.endswith("sinks") else name
    text = name.removesuffix("_bias")
    if ".experts." not in name:
        yield name, tensor
        return
    kind = "bias" if text != name else "weight"
    full_tensor = tensor if kind == "bias" else tensor.transpose(1, 2)
    if text.endswith("down_proj"):
        yield f"{text}.{kind}", full_tensor
        return
    for turn, part in enumerate(("gate_proj", "up_proj")):
        yield f"{text.replace('gate_up_proj', part)}.{kind}", full_tensor[:, turn::2]


def glm4_moe(name: str, tensor: Tensor, config: Config) -> Tensors:
    """Biases of the choice are a bias by name."""
    if name.endswith("e_score_correction_bias"):
        name = name.replace("_bias", ".bias")
    yield name, tensor


def glm4_moe_sizes(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def granite_moe(name: str, tensor: Tensor, config: Config) -> Tensors:
    """Gate and up apart, of the experts and of the MLP beside them."""
    shared = "_shexp" if config.get("num_local_experts") else ""
    prefix = f"blk.{name.split('.')[2]}.ffn" if name.startswith("model.layers.") else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{prefix}_{part}{shared}.weight", half
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"{prefix}_down{shared}.weight", tensor
    elif name.endswith("block_sparse_moe.input_linear.weight"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield f"{prefix}_{part}_exps.weight", half
    elif name.endswith("block_sparse_moe.output_linear.weight"):
        yield f"{prefix}_down_exps.weight", tensor
    else:
        yield from turned(name, tensor, config)


def granite_hybrid(name: str, tensor: Tensor, config: Config) -> Tensors:
    """Decays as they are, in columns; norms in groups; a convolution's channels in rows."""
    if name.endswith("A_log"):
        yield name, -tensor.exp().unsqueeze(1)
    elif name.endswith("mamba.D"):
        yield name, tensor.unsqueeze(1)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    elif name.endswith("conv1d.weight"):
        yield name, tensor.squeeze(1)
    elif name.endswith("mamba.norm.weight"):
        yield name, tensor.view(config["mamba_n_groups"], -1)
    else:
        yield from granite_moe(name, tensor, config)


def qwen3_next(name: str, tensor: Tensor, config: Config) -> Tensors:
    """All queries, keys and values behind each other, gates apart; norms as what multiplies."""
    if name.endswith("A_log"):
        yield name, -tensor.exp()
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    elif name.endswith("conv1d.weight"):
        yield name, tensor.squeeze(1)
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, tensor + 1
    elif name.endswith("in_proj_qkvz.weight"):
        heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
        wide = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
        by_head = tensor.view(heads, -1, tensor.shape[1])
        q, k, v, z = by_head.split((key, key, wide, wide), dim=1)
        prefix = f"blk.{name.split('.')[2]}"
        yield f"{prefix}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        yield f"{prefix}.attn_gate.weight", z.flatten(0, 1)
    elif ".experts." in name and tensor.dim() == 3:
        prefix = f"blk.{name.split('.')[2]}.ffn"
        if name.endswith("down_proj"):
            yield f"{prefix}_down_exps.weight", tensor
        else:
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield f"{prefix}_{part}_exps.weight", half
    else:
        yield name, tensor[0] if name.endswith("shared_expert_gate.weight") else tensor


def states(writer: gguf.GGUFWriter, config: Config) -> None:
    scales(writer, config)
    heads = config["mamba_n_heads"]
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_rope_scaling_finetuned(False)
    kinds, kv_heads = config["layer_types"], config["num_key_value_heads"]
    key = f"{writer.arch}.attention.head_count_kv"
    del writer.kv_data[0][key]  # told by layer
    attends = ("attention", "full_attention")
    writer.add_head_count_kv([kv_heads if kind in attends else 0 for kind in kinds])


def delta(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def no_more(writer: gguf.GGUFWriter, config: Config) -> None:
    pass


def windows(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])


def windows_by_layer(writer: gguf.GGUFWriter, config: Config) -> None:
    windows(writer, config)
    writer.add_sliding_window_pattern([kind != "full_attention" for kind in config["layer_types"]])
    yarn(writer, config["rope_parameters"]["full_attention"])


def linear(writer: gguf.GGUFWriter, config: Config) -> None:
    windows(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"]["full_attention"]["factor"])


def yarn(writer: gguf.GGUFWriter, rope: Config) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def gpt_oss_sizes(writer: gguf.GGUFWriter, config: Config) -> None:
    windows(writer, config)
    yarn(writer, config["rope_parameters"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def scales(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def minicpm(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def logit_scale(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def cohere2(writer: gguf.GGUFWriter, config: Config) -> None:
    windows(writer, config)
    logit_scale(writer, config)


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe of the survey as a file."""

    recipe: str
    architecture: str
    changes: Config = field(default_factory=dict)
    changed: Callable[[str, Tensor, Config], Tensors] = as_they_are
    more: Add = no_more


def types(layers: int, pattern: int) -> list[str]:
    """Which layers have a window, where llama.cpp knows it by the architecture."""
    kinds = ["sliding_attention"] * (pattern - 1) + ["full_attention"]
    return (kinds * layers)[:layers]


_OLMO3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "full_attention": RECIPES["olmo3"]["rope_parameters"]["full_attention"],
}
_GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
}
CASES = {
    "gemma": Case("gemma", "gemma", changed=offset),
    "olmo2": Case("olmo2", "olmo2"),
    "gemma3": Case(
        "gemma3",
        "gemma3",
        {"num_hidden_layers": 7, "layer_types": types(7, 6), "query_pre_attn_scalar": 32,
         "rope_parameters": _GEMMA3},
        offset,
        linear,
    ),
    "olmo3": Case("olmo3", "olmo2", {"rope_parameters": _OLMO3}, more=windows_by_layer),
    "olmoe": Case("olmoe", "olmoe", {"clip_qkv": None, "norm_topk_prob": False}),
    "smollm3": Case(
        "smollm3",
        "smollm3",
        {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1], "use_sliding_window": False,
         "sliding_window": None},
        turned,
    ),
    "granite": Case("granite", "granite", changed=turned, more=scales),
    "granitemoe": Case("granitemoe", "granitemoe", changed=granite_moe, more=scales),
    "granitehybrid": Case("granite4", "granitehybrid", changed=granite_hybrid, more=states),
    "granitehybrid-dense": Case(
        "granite4-groups", "granitehybrid", {"mamba_conv_bias": True}, granite_hybrid, states
    ),
    "qwen3next": Case("qwen3_next", "qwen3next", changed=qwen3_next, more=delta),
    "internlm2": Case("llama", "internlm2", changed=turned),
    "xverse": Case("llama", "xverse", changed=turned),
    "minicpm": Case("granite", "minicpm", {"attention_multiplier": 0.25}, turned, minicpm),
    "glm4": Case("glm4", "glm4"),
    "glm4moe": Case("glm4_moe", "glm4moe", changed=glm4_moe, more=glm4_moe_sizes),
    "command-r": Case("cohere", "command-r", {"attention_bias": False}, more=logit_scale),
    "cohere2": Case(
        "cohere2", "cohere2", {"num_hidden_layers": 5, "layer_types": types(5, 4)}, more=cohere2
    ),
    "stablelm": Case("stablelm", "stablelm"),
    "stablelm-parallel": Case(
        "stablelm", "stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}
    ),
    "starcoder2": Case("starcoder2", "starcoder2", {"sliding_window": None}),
    "phi2": Case("phi", "phi2"),
    "gpt-oss": Case("gpt_oss", "gpt-oss", {"swiglu_limit": 7.0}, gpt_oss, gpt_oss_sizes),
}  # fmt: skip


@pytest.fixture(autouse=True)
def gguf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.checkpoints.gguf.folder.cache_dir", lambda: tmp_path / "cache")


def write(case: Case, folder: Path, path: Path, kind_of: Callable[[str], Kind]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, case.architecture)
    _add_sizes(writer, config)
    case.more(writer, config)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = load_file(folder / "model.safetensors")
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    for name, value in _with_experts_together(
        part for item in tensors.items() for part in case.changed(*item, config)
    ):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        assert stored.startswith(("blk.", "token_embd.", "output")), name
        small = value.dim() == 1 or name.endswith(".bias") or ".ssm_" in stored.replace("_in", "")
        kind = Kind.F32 if small and "ssm_out" not in stored else kind_of(stored)
        array = value.float().contiguous().numpy()
        if value.dim() == 3 and kind != Kind.F32:
            flat = quantized(array.reshape(-1, array.shape[-1]), kind)
            writer.add_tensor(stored, flat.reshape(*array.shape[:2], -1), raw_dtype=kind)
        elif value.dim() == 1:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, quantized(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * partial))
    writer.add_rope_freq_base(rope["rope_theta"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_epsilon"])
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    if count := next((config[name] for name in counts if config.get(name)), None):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _with_experts_together(tensors: Tensors) -> Tensors:
    """[experts, outputs, inputs], as the converter stacks those that are one by one."""
    apart: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if match is None:
            yield name, tensor
        else:
            apart.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    for name, parts in apart.items():
        yield name, torch.stack([parts[expert] for expert in sorted(parts)])


def make(model: Path, **settings: Any) -> LLM:
    return LLM(
        str(model), skip_tokenizer_init=True, num_gpu_blocks_override=100, max_model_len=128,
        **settings,
    )  # fmt: skip


def checkpoint(name: str, folder: Path) -> Path:
    case = CASES[name]
    make_checkpoint({**RECIPES[case.recipe], **case.changes}, folder)
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(3)
    for key in [key for key in tensors if key.endswith("e_score_correction_bias")]:
        tensors[key] = torch.randn(tensors[key].shape, generator=draw)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_every_architecture_is_tested() -> None:
    assert {case.architecture for case in CASES.values()} | _TESTED_ELSEWHERE == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_a_file_says_what_transformers_says_to_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = checkpoint(name, tmp_path / "checkpoint")
    file = write(CASES[name], folder, tmp_path / "model.gguf", lambda _: Kind.F32)
    outputs = make(file).generate(PROMPTS, GREEDY, use_tqdm=False)
    token_ids = [list(result.outputs[0].token_ids) for result in outputs]
    assert token_ids == greedy_all(Oracle(folder).model, PROMPTS, 10, token_ids)


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.Q8_0])
def test_experts_of_gpt_oss_stay_in_few_bits(kind: Kind, tmp_path: Path, compiler: None) -> None:
    """As they are published; the reference kernels make floats of the same blocks."""
    folder = checkpoint("gpt-oss", tmp_path / "checkpoint")
    file = write(
        CASES["gpt-oss"],
        folder,
        tmp_path / "model.gguf",
        lambda name: kind if "exps" in name else Kind.F32,
    )
    llm, baseline_llm = make(file), make(file, cpu_kernels=False)
    experts = [report for report in llm.load_report() if ".experts." in report.layer]
    assert len(experts) == 2 * 4 * 2
    assert {report.format for report in experts} == {kind.name}
    assert all(report.error < 1e-3 for report in experts)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scores = [
        llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].prompt_logprobs
        for llm in (llm, baseline_llm)
    ]
    # Activations are rounded for each group; of random weights that shows in single tokens.
    apart = [
        abs(scores[0][position][token].logprob - scores[1][position][token].logprob)
        for position, token in enumerate(PROMPTS[1][1:], 1)
    ]
    assert sum(apart) / len(apart) < 0.3


def test_what_a_file_of_an_architecture_lacks_is_named(tmp_path: Path) -> None:
    folder = checkpoint("cohere2", tmp_path / "checkpoint")
    case = Case("cohere2", "cohere2", more=windows)
    file = write(case, folder, tmp_path / "scale.gguf", lambda _: Kind.F32)
    with pytest.raises(ModelLoadError, match=r"lacks cohere2\.logit_scale"):
        make(file)
    folder = checkpoint("olmo3", tmp_path / "olmo3")

    def short(writer: gguf.GGUFWriter, config: Config) -> None:
        windows(writer, config)
        writer.add_sliding_window_pattern([True])

    file = write(
        Case("olmo3", "olmo2", more=short), folder, tmp_path / "o.gguf", lambda _: Kind.F32
    )
    with pytest.raises(ModelLoadError, match=r"olmo2\.attention\.sliding_window_pattern must be"):
        make(file)


@pytest.mark.parametrize(("length", "served"), [(1 << 20, 1 << 17), (1 << 19, 1 << 19)])
def test_a_context_of_any_length_is_that_of_the_family(
    length: int, served: int, tmp_path: Path
) -> None:
    """Converters write 2^20 for a Granite 4 that rotates nothing; other numbers are meant."""

    def more(writer: gguf.GGUFWriter, config: Config) -> None:
        states(writer, config)
        writer.kv_data[0].pop("granitehybrid.context_length")
        writer.add_context_length(length)

    case = Case("granite4", "granitehybrid", changed=granite_hybrid, more=more)
    folder = checkpoint("granitehybrid", tmp_path / "checkpoint")
    file = write(case, folder, tmp_path / "model.gguf", lambda _: Kind.F32)
    llm = LLM(str(file), skip_tokenizer_init=True, num_gpu_blocks_override=20)
    assert llm.core.facts.max_model_len == served


def test_what_a_file_says_of_states_must_be_possible(tmp_path: Path) -> None:
    folder = checkpoint("granitehybrid", tmp_path / "checkpoint")

    def growing(name: str, tensor: Tensor, config: Config) -> Tensors:
        for stored, value in granite_hybrid(name, tensor, config):
            yield stored, value.abs() if stored.endswith("A_log") else value

    def by_layer(counts: list[int]) -> Add:
        def add(writer: gguf.GGUFWriter, config: Config) -> None:
            states(writer, config)
            del writer.kv_data[0]["granitehybrid.attention.head_count_kv"]
            writer.add_head_count_kv(counts)

        return add

    for number, (changed, more, message) in enumerate(
        [
            (growing, states, r"ssm_a' has values that aren't below zero"),
            (granite_hybrid, by_layer([0, 2]), r"head_count_kv must be a list of 3 counts"),
            (granite_hybrid, by_layer([1, 2, 0]), r"layers of different numbers"),
        ]
    ):
        case = Case("granite4", "granitehybrid", changed=changed, more=more)
        file = write(case, folder, tmp_path / f"{number}.gguf", lambda _: Kind.F32)
        with pytest.raises(ModelLoadError, match=message):
            make(file)


@pytest.mark.parametrize(
    ("name", "part"), [("granitehybrid", "input_linear"), ("qwen3next", "qkvz")]
)
def test_what_lies_in_two_tensors_or_with_all_experts_stays_in_few_bits(
    name: str, part: str, tmp_path: Path, compiler: None
) -> None:
    folder = checkpoint(name, tmp_path / "checkpoint")
    wide = ("ffn_gate", "ffn_up", "attn_qkv", "attn_gate")  # rows of whole blocks
    file = write(
        CASES[name],
        folder,
        tmp_path / "model.gguf",
        lambda stored: Kind.Q8_0 if any(part in stored for part in wide) else Kind.F32,
    )
    reports = {report.layer: report for report in make(file).load_report()}
    rounded_reports = [
        report
        for layer, report in reports.items()
        if part in layer or (".experts." in layer and "gate_proj" in layer)
    ]
    assert rounded_reports
    assert {(report.format, report.level) for report in rounded_reports} == {("Q8_0", "kept")}


def test_a_minicpm_without_its_scales_is_refused_by_name(tmp_path: Path) -> None:
    case = Case("granite", "minicpm", changed=turned)
    folder = checkpoint("granite", tmp_path / "checkpoint")
    path = write(case, folder, tmp_path / "model.gguf", lambda name: Kind.F32)
    with pytest.raises(ModelLoadError, match=r"minicpm\.embedding_scale"):
        LLM(str(path), skip_tokenizer_init=True)


def test_a_stablelm_with_normed_queries_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoint("stablelm", tmp_path / "checkpoint")
    case = Case(
        "stablelm",
        "stablelm",
        changed=lambda name, tensor, config: iter(
            [(name, tensor)]
            if "input_layernorm.weight" not in name
            else [
                (name, tensor),
                (name.replace("input_layernorm", "self_attn.q_layernorm"), tensor),
            ]
        ),
    )
    file = write(case, folder, tmp_path / "model.gguf", lambda _: Kind.F32)
    with pytest.raises(ModelLoadError, match="whose queries are normed"):
        make(file)
