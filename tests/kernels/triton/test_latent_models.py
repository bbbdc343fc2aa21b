"""Models that attend over latents, on the Triton kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kernels
from engine import LLM, LoRARequest, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest
from engine.models.decoder import NativeDecoder
from engine.models.layers.moe import GroupedMoe
from engine.worker.gpu.graph_dispatcher import CUDAGraphMode, CUDAGraphRuntimeMode
from engine.worker.gpu.setup import device_forward
from kernels.triton import TritonKernels
from kernels.triton.quantized import GroupedExperts
from tests.engine.lora.peft_oracle import make_adapter
from tests.engine.speculative import test_mtp
from tests.engine.speculative.mtp_folders import with_drafts
from tests.kernels.triton import test_head_graphs, test_lora_models
from tests.kernels.triton.test_graphs import NotingRecorder, replayed
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint

#: Models with latents that GPUs run: those without states and without an index of tokens.
NAMES = [
    name
    for name, recipe in RECIPES.items()
    if "kv_lora_rank" in recipe and not {"linear_num_heads", "index_topk"} & recipe.keys()
]
PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 9, 8, 7], [60, 61]]
#: Two blocks of it are in the prefix cache then.
AGAIN = [*PROMPTS[0][:9], 70]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

recorded = test_head_graphs.recorded
by_slots = test_lora_models.by_slots


def tiny(name: str, folder: Path, **changes: Any) -> Path:
    """A plain layer and, in families that have them, one of experts; two heads."""
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    make_checkpoint({**RECIPES[name], **layers, **changes}, folder)
    return folder


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder), device="cpu", skip_tokenizer_init=True,
        **{"dtype": "float32", "num_gpu_blocks_override": 40, "max_model_len": 64, **settings},
    )  # fmt: skip


def model_of(llm: LLM) -> Any:
    executor: Any = llm.core.executor
    model = executor.worker.loaded.model
    assert isinstance(model, NativeDecoder)
    return model


def tokens(llm: LLM, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, PARAMS, use_tqdm=False, **more)
    llm.core.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(name: str, forced: None, tmp_path: Path) -> None:
    """In chunks, beside one another, and from the prefix cache."""
    folder = tiny(name, tmp_path)
    llm = make(folder, max_num_batched_tokens=8, block_size=4)
    model, oracle = model_of(llm), Oracle(folder)
    assert isinstance(model.ops, TritonKernels)
    width = RECIPES[name]["kv_lora_rank"] + RECIPES[name]["qk_rope_head_dim"]
    assert llm.core.capacity.kv_bytes_per_token == 2 * width * 4
    if RECIPES[name].get("n_routed_experts"):
        assert isinstance(model.weights[1].experts, GroupedMoe)
    assert tokens(llm, PROMPTS) == [oracle.greedy(prompt, 3) for prompt in PROMPTS]
    initial_prefix_cache_hits_total = llm.core.snapshot().prefix_cache_hits_total
    assert tokens(llm, [AGAIN]) == [oracle.greedy(AGAIN, 3)]
    assert llm.core.snapshot().prefix_cache_hits_total - initial_prefix_cache_hits_total == 8


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[LLM, Any]]:
    """An engine whose steps go through graphs of a mode, and its forward pass."""

    def model_of_mode(mode: CUDAGraphMode, folder: Path) -> tuple[LLM, Any]:
        monkeypatch.setenv(kernels.FORCED, "triton")
        ops = kernels.get("cpu")
        for name in ("paged_attention", "mla_attention"):
            monkeypatch.setitem(vars(ops), name, getattr(ops, name))
        monkeypatch.setattr(ops, "attention_backend", "TRITON_ATTN")
        llm = make(folder, max_num_seqs=4, max_num_batched_tokens=8)
        config = EngineConfig(
            model=str(folder), max_num_seqs=4, cudagraph_mode=mode.name,
            cudagraph_capture_sizes=[4, 8],
        )  # fmt: skip
        forward = device_forward(model_of(llm), config, 16, [4], NotingRecorder)
        assert forward.capture() > 0
        executor: Any = llm.core.executor
        executor.worker._runner.forward = forward
        return llm, forward

    return model_of_mode


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE], ids=lambda mode: mode.name
)
def test_graphs_give_the_tokens_of_transformers(
    mode: CUDAGraphMode, graphed: Callable[..., tuple[LLM, Any]], tmp_path: Path
) -> None:
    folder = tiny("deepseek_v3", tmp_path, num_hidden_layers=1, first_k_dense_replace=0)
    llm, forward = graphed(mode, folder)
    used = replayed(forward)
    oracle = Oracle(folder)
    assert tokens(llm, PROMPTS) == [oracle.greedy(prompt, 3) for prompt in PROMPTS]
    assert {key[0] for key in used} == {mode.decode, mode.mixed} - {CUDAGraphRuntimeMode.NONE}
    # One layer: two pieces around an attention, and what notes that they ran.
    chunks = [len(r.steps) for (kind, _), r in forward._recordings.items() if kind.name != "FULL"]
    assert all(count == 2 + 1 + 1 for count in chunks)


@pytest.mark.slow
def test_a_checkpoints_own_layer_drafts_beside_graphs(recorded: list[Any], tmp_path: Path) -> None:
    """Its latents are written by themselves; a step of a sequence with both drafts is a graph."""
    folder = with_drafts("deepseek_v3", tmp_path, tables=True)
    llm = test_head_graphs.drafting(folder, method="mtp")
    watch = test_mtp.watched(llm, folder)
    assert len(test_head_graphs.generate_text(llm, [*range(4, 14)])) == 8
    assert max(watch.depths) == 2
    assert not watch.mismatched_lengths
    assert recorded[0].count(test_head_graphs.CHECK) > 1


def test_adapters_have_the_tokens_of_the_cpu(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By slots, of all that makes latents and queries."""
    model = tiny("deepseek_v3", tmp_path / "model")
    modules = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=modules)
    expected = test_lora_models.tokens(model, adapter)
    request.getfixturevalue("by_slots")
    assert test_lora_models.tokens(model, adapter) == expected


def test_an_adapter_of_what_makes_keys_and_values_is_refused_by_slots(
    forced: None, by_slots: None, tmp_path: Path
) -> None:
    model = tiny("deepseek_v2", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "a", target_modules=["kv_b_proj"])
    with pytest.raises(InvalidRequest, match=r"Adapters of .*kv_b_proj aren't supported"):
        tokens(make(model), PROMPTS[1:], lora_request=LoRARequest("a", 1, str(adapter)))


def test_rounded_latents_and_experts_of_groups_in_few_bits(forced: None, tmp_path: Path) -> None:
    """A row is the same beside others."""
    sizes = {"hidden_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
    sizes |= {"intermediate_size": 96, "moe_intermediate_size": 64}
    folder = tiny("deepseek_v3", tmp_path, **sizes)
    llm = make(folder, quantization="int8", kv_cache_dtype="int8")
    assert isinstance(model_of(llm).weights[1].experts, GroupedExperts)
    together = tokens(llm, PROMPTS)
    assert together[1:] == tokens(llm, PROMPTS[1:])
    assert all(len(output) == 3 for output in together)
