"""Experts, heads, pooling and bridged models whose checkpoints were quantized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from tests.engine.checkpoints import writers
from tests.engine.checkpoints.folders import FILE, is_linear, make_mxfp4, make_pair
from tests.engine.checkpoints.test_formats import GREEDY, PROMPT
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


def load(folder: Path, **settings: Any) -> LLM:
    options = {"dtype": "float32", "num_gpu_blocks_override": 40, "max_model_len": 128, **settings}
    return LLM(str(folder), **options)


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_experts_stay_as_they_are(tmp_path: Path, compiler: None) -> None:
    source = tmp_path / "source"
    make_checkpoint({**RECIPES["mixtral"], "intermediate_size": 64}, source)
    split_experts(source)

    def chosen(name: str) -> bool:
        return is_linear(name) or (".experts." in name and name.endswith(".weight"))

    pair = make_pair(source, tmp_path, GPTQ, writers.gptq(symmetric=False), chosen)
    oracle = Oracle(pair.dense)
    assert tokens(load(pair.packed, cpu_kernels=False)) == oracle.greedy(PROMPT, 6)
    reports = load(pair.packed).load_report()
    experts = [report for report in reports if ".experts." in report.layer]
    assert experts
    assert {report.level for report in experts} == {"kept"}


@pytest.mark.parametrize(
    ("recipe", "changes", "products"),
    [
        ("granite4", {"mamba_n_heads": 8, "mamba_d_head": 16}, ("in_proj", "out_proj")),
        ("qwen3_next", {}, ("qkvz", "out_proj")),
    ],
)
def test_products_around_a_state_stay_as_they_are(
    recipe: str,
    changes: dict[str, Any],
    products: tuple[str, ...],
    tmp_path: Path,
    compiler: None,
) -> None:
    """The hub's checkpoints leave routers and the small product of rates as they were."""
    source = tmp_path / "source"
    make_checkpoint({**RECIPES[recipe], **changes}, source)

    def chosen(name: str) -> bool:
        return name.endswith(tuple(f"{product}.weight" for product in products))

    pair = make_pair(source, tmp_path, GPTQ, writers.gptq(symmetric=False), chosen)
    oracle = Oracle(pair.dense)
    assert tokens(load(pair.packed, cpu_kernels=False)) == oracle.greedy(PROMPT, 6)
    reports = [one for one in load(pair.packed).load_report() if one.layer.endswith(products)]
    assert {report.format.split(" ")[0] for report in reports} == {"gptq"}
    assert {report.level for report in reports} == {"kept"}


def split_experts(folder: Path) -> None:
    """As the hub's Mixtral has them: a tensor for each expert and projection."""
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        if ".experts." not in name:
            continue
        prefix, _, kind = name.rpartition(".")
        for expert, full in enumerate(tensors.pop(name)):
            parts = (
                {"w2": full}
                if kind == "down_proj"
                else dict(zip(("w1", "w3"), full.chunk(2), strict=True))
            )
            tensors |= {f"{prefix}.{expert}.{k}.weight": t.clone() for k, t in parts.items()}
    tensors = {name.replace(".mlp.", ".block_sparse_moe."): t for name, t in tensors.items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def test_the_experts_of_gpt_oss_are_read_exactly(tmp_path: Path, compiler: None) -> None:
    folder = tmp_path / "made"
    make_checkpoint(RECIPES["gpt_oss"], folder)
    pair = make_mxfp4(folder, tmp_path)
    assert tokens(load(pair.packed, cpu_kernels=False)) == Oracle(pair.dense).greedy(PROMPT, 6)
    reports = load(pair.packed).load_report()
    experts = [report for report in reports if report.format == "mxfp4"]
    assert experts
    assert all(report.error == 0.0 for report in experts)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_was_quantized_by_itself(
    tied: bool, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also where config.json ties it to the embedding, which stays as it is."""

    def chosen(name: str) -> bool:
        return is_linear(name) or name == "lm_head.weight"

    pair = make_pair(model_folder("llama"), tmp_path, AWQ, writers.awq(), chosen)
    if tied:
        path = pair.packed / "config.json"
        raw = json.loads(path.read_text())
        path.write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    assert tokens(load(pair.packed, cpu_kernels=False)) == Oracle(pair.dense).greedy(PROMPT, 6)


def test_fused_projections_of_which_one_was_left_out(
    model_folder: Callable[[str], Path], tmp_path: Path, compiler: None
) -> None:
    """The whole of them is read, and what was left out isn't rounded."""

    def chosen(name: str) -> bool:
        return is_linear(name) and "v_proj" not in name and "layers.1.mlp.up" not in name

    pair = make_pair(model_folder("llama"), tmp_path, GPTQ, writers.gptq(), chosen)
    llm = load(pair.packed)
    by_name = {report.layer: report for report in llm.load_report()}
    assert by_name["model.layers.0.self_attn.q_proj+k_proj+v_proj"].level == "read"
    assert by_name["model.layers.0.self_attn.q_proj+k_proj+v_proj"].error < 1e-6
    assert by_name["model.layers.0.mlp.gate_proj+up_proj"].level == "kept"
    assert by_name["model.layers.1.mlp.gate_proj+up_proj"].level == "read"
    assert tokens(load(pair.packed, cpu_kernels=False)) == Oracle(pair.dense).greedy(PROMPT, 6)


@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_the_bridge_says_what_the_native_decoder_says(
    impl: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pair = make_pair(model_folder("llama"), tmp_path, GPTQ, writers.gptq(symmetric=False))
    llm = load(pair.packed, model_impl=impl, cpu_kernels=False)
    assert tokens(llm) == Oracle(pair.dense).greedy(PROMPT, 6)


def test_a_pooling_model(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    pair = make_pair(model_folder("llama"), tmp_path, AWQ, writers.awq())
    tensors = [
        torch.tensor(
            load(folder, runner="pooling", cpu_kernels=False)
            .embed([{"prompt_token_ids": PROMPT}], use_tqdm=False)[0].outputs.embedding
        )
        for folder in (pair.packed, pair.dense)
    ]  # fmt: skip
    torch.testing.assert_close(tensors[0], tensors[1], atol=1e-4, rtol=1e-4)


def test_sorted_inputs_and_groups_of_one_file_with_rules_by_name(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """GPTQModel's `dynamic`: layers of other bits are seen by their shapes."""
    four, eight = writers.gptq(), writers.gptq(bits=8, group=16)

    def write(weight: torch.Tensor) -> writers.Written:
        return eight(weight) if weight.shape[1] == 96 else four(weight)

    config = {**GPTQ, "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": 16}}}
    pair = make_pair(model_folder("llama"), tmp_path, config, write)
    assert tokens(load(pair.packed, cpu_kernels=False)) == Oracle(pair.dense).greedy(PROMPT, 6)
