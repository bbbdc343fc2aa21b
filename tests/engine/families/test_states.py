"""Families whose layers carry a state: it goes with its sequence, however that is run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from engine.devices import host_memory
from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata, StateStep
from engine.models.registry import decoder_spec
from tests.engine.families.conftest import OUTPUT, Case
from tests.engine.plain_paths import layer_by_layer
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint, prompts

NAMES = (
    "falcon_h1",
    "granite4",
    "jamba",
    "kimi_linear",
    "lfm2",
    "mamba2",
    "minimax",
    "nemotron_h",
    "qwen3_next",
    "recurrent_gemma",
    "zamba2",
)
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
Cases = Callable[[str], Case]


def make(folder: Path, **settings: Any) -> LLM:
    settings = {"num_gpu_blocks_override": 160, "max_model_len": 256, **settings}
    return LLM(str(folder), dtype="float32", num_threads=1, **settings)


def tokens(llm: LLM, mixed: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(mixed, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def native(llm: LLM) -> NativeDecoder:
    model = llm.core.executor.worker.loaded.model
    assert isinstance(model, NativeDecoder)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_sequences_that_are_preempted_go_on_with_the_same_tokens(name: str, case: Cases) -> None:
    expected = case(name)
    llm = make(expected.folder, num_gpu_blocks_override=40, block_size=4, max_num_batched_tokens=32)
    assert tokens(llm, expected.prompts) == expected.greedy
    assert llm.core.scheduler.num_preemptions > 0
    llm.core.check_integrity()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_sequences_that_ended_are_begun_anew(name: str, case: Cases) -> None:
    """More sequences than seats, in chunks, twice; without a cache there is a block a seat."""
    expected = case(name)
    llm = make(
        expected.folder, max_num_seqs=2, max_num_batched_tokens=24, enable_prefix_caching=False
    )
    for _ in range(2):
        assert tokens(llm, expected.prompts) == expected.greedy
    table = native(llm)._states
    assert table is not None
    assert all(len(layer.scan) == 2 for layer in table.layers.values())


def test_a_step_that_fails_leaves_no_state_half_way(
    case: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer has taken in the step's tokens, the last one hasn't."""
    expected = case("granite4")
    with layer_by_layer():
        llm = make(expected.folder)
    model, calls = native(llm), iter(range(1000))
    last = model.layers[-1]

    def failing(*args: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("a step that fails")
        return last(*args)

    monkeypatch.setattr(model, "layers", [*model.layers[:-1], failing])
    assert tokens(llm, expected.prompts) == expected.greedy
    assert next(calls) > 8


def test_a_state_that_is_elsewhere_is_refused(case: Cases) -> None:
    llm = make(case("granite4").folder)
    tokens(llm, [[5, 6, 7]])
    table = native(llm)._states
    assert table is not None
    context = AttentionMetadata(
        positions=torch.tensor([9]),
        slot_mapping=torch.tensor([0]),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        seq_lens=torch.tensor([10], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        states=StateStep(torch.tensor([1]), [], torch.empty((0, 2), dtype=torch.int64)),
    )
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"can't go on at positions \[9\]"),
    ):
        table.begin_step(context)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 2), ("int8", 1)])
@pytest.mark.parametrize("name", ["granite4", "qwen3_next"])
def test_states_in_few_bits_are_the_same_however_a_prompt_is_cut(
    name: str, dtype: str, num_bytes: int, case: Cases
) -> None:
    """In small chunks, preempted, or from checkpoints: rounding goes by tokens, not by steps."""
    expected = case(name)
    at_once = make(expected.folder, mamba_ssm_cache_dtype=dtype, enable_prefix_caching=False)
    settings = {"num_gpu_blocks_override": 40, "block_size": 4, "max_num_batched_tokens": 32}
    cut = make(expected.folder, mamba_ssm_cache_dtype=dtype, **settings)
    full_tokens = tokens(at_once, expected.prompts)
    assert tokens(cut, expected.prompts) == tokens(cut, expected.prompts) == full_tokens
    cut.core.check_integrity()
    table, states = native(cut)._states, native(cut).spec.states
    assert table is not None
    assert states is not None
    layers = list(table.layers.values())
    assert layers[0].scan.element_size() == num_bytes
    parts = [part for layer in layers for part in layer.parts]
    assert states.nbytes == sum(part[0].nbytes for part in parts)


IN_ONE_CALL = {
    "mamba2": ["float32", "int8"],
    "falcon_h1": ["float32", "int8"],
    "falcon_h1-norm": ["float32"],
    "nemotron_h": ["bfloat16"],
    "jamba": ["float32", "int8"],
    "mamba-biases": ["float32"],
    "lfm2-biases": ["float32"],
    "qwen3_next": ["float32", "int8"],
    "minimax": ["float32", "int8"],
    "kimi_linear": ["float32", "int8"],
    "recurrent_gemma": ["float32"],
    "zamba2": ["float32", "int8"],
    "zamba2-plain": ["float32"],
    "deepseek_v2-lite": ["float32"],
    "deepseek_v3": ["float32"],
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, dtypes in IN_ONE_CALL.items() for dtype in dtypes]
)
def test_layers_in_one_call_give_the_same_bits(
    name: str, dtype: str, case: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layer by layer: prompts in chunks, steps that keep checkpoints, and decode steps."""
    expected = case(name)
    settings = {"mamba_ssm_cache_dtype": dtype, "block_size": 4, "max_num_batched_tokens": 48}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    passes = []
    run_layers = NativeDecoder._run_layers

    def counted(model: NativeDecoder, residual: torch.Tensor, *args: Any) -> torch.Tensor:
        passes.append(len(residual))
        return run_layers(model, residual, *args)

    monkeypatch.setattr(NativeDecoder, "_run_layers", counted)
    scores = []
    for path in (contextlib.nullcontext, layer_by_layer):
        with path():
            llm = make(expected.folder, **settings)
        passes.clear()
        outputs = llm.generate(expected.prompts, params, use_tqdm=False)
        scores.append([output.outputs[0].logprobs for output in outputs])
        assert bool(passes) == (path is layer_by_layer)
    assert scores[0] == scores[1]


def test_a_format_of_states_is_refused_where_they_are_float32(case: Cases) -> None:
    with pytest.raises(ConfigError, match="mamba_ssm_cache_dtype=int8 is not supported for Recurr"):
        make(case("recurrent_gemma").folder, mamba_ssm_cache_dtype="int8")
    with pytest.raises(ConfigError, match="for a model of the Transformers bridge") as refused:
        make(case("granite4").folder, model_impl="transformers", mamba_ssm_cache_dtype="bfloat16")
    assert refused.value.param == "mamba_ssm_cache_dtype"


def test_states_of_convolutions_alone_stay_float32(case: Cases) -> None:
    """Scales of int8 would only take memory."""
    states = native(make(case("lfm2").folder, mamba_ssm_cache_dtype="int8")).spec.states
    assert states is not None
    assert states.dtype == "float32"


def test_a_model_without_attention_has_no_keys_and_values(tmp_path: Path) -> None:
    recipe = {**RECIPES["granite4-groups"], "layer_types": ["mamba"] * 2}
    make_checkpoint(recipe, tmp_path)
    mixed, oracle = prompts((1, 40, 23)), Oracle(tmp_path)
    oracle.model.config.use_cache = False  # its cache asks for a layer that attends
    expected = []
    for prompt in mixed:
        text = list(prompt)
        for _ in range(OUTPUT):
            text.append(int(oracle.logprobs(text)[-1].argmax()))
        expected.append(text[len(prompt) :])
    llm = make(tmp_path, max_num_batched_tokens=16)
    assert native(llm).kv_caches == []
    assert llm.core.capacity.kv_bytes_per_token == 0
    assert tokens(llm, mixed) == expected


@pytest.mark.parametrize(("name", "quantization"), [("granite4", "int4"), ("qwen3_next", "int8")])
def test_products_around_a_state_are_rounded(name: str, quantization: str, case: Cases) -> None:
    expected = case(name)
    baseline_llm, rounded = make(expected.folder), make(expected.folder, quantization=quantization)
    weight_bytes = []
    for llm in (baseline_llm, rounded):
        products = (layer.attention for layer in native(llm).weights if layer.attention)
        weight_bytes.append(sum(weights.nbytes for weights in products))
    assert weight_bytes[1] < weight_bytes[0] / 2
    together = tokens(rounded, expected.prompts)
    assert together == [tokens(rounded, [prompt])[0] for prompt in expected.prompts]


def test_steps_that_are_planned_ahead_say_the_same(case: Cases) -> None:
    expected = case("qwen3_next")
    llm = make(expected.folder, async_scheduling=True, max_num_seqs=2)
    assert tokens(llm, expected.prompts * 2) == expected.greedy * 2


def test_vectors_of_prompts_in_chunks(case: Cases) -> None:
    expected = case("granite4")
    llm = make(expected.folder, runner="pooling", max_num_batched_tokens=32)
    outputs = llm.embed([{"prompt_token_ids": one} for one in expected.prompts], use_tqdm=False)
    model: Any = Oracle(expected.folder).model
    for prompt, output in zip(expected.prompts, outputs, strict=True):
        with torch.no_grad():
            last = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        normalized = torch.nn.functional.normalize(last, dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), normalized)


def test_only_layers_that_attend_take_part_in_the_kv_cache(case: Cases) -> None:
    llm = make(case("granite4").folder)
    spec = native(llm).spec
    assert spec.attention_layers == (1,)
    assert llm.core.capacity.kv_bytes_per_token == 2 * spec.kv_size * 4
    groups = llm.core.capacity.layout.groups
    assert [(group.kind, group.layers) for group in groups] == [("full", (0,)), ("state", ())]


def test_so_many_sequences_run_as_the_memory_holds_states_of(
    case: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = case("granite4")
    spec = decoder_spec({**RECIPES["granite4"], "architectures": ["GraniteMoeHybridForCausalLM"]})
    assert spec.states is not None
    # Two layers of 4 heads of 32 x 8, and a convolution over 3 tokens of 128 + 16 channels.
    assert spec.state_bytes == 2 * 4 * (4 * 32 * 8 + 3 * 144)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 4 * 2 * spec.state_bytes + 9)
    llm = make(expected.folder)
    assert llm.core.capacity.max_stateful_sequences == 2
    assert llm.core.scheduler.max_num_seqs == 2
    assert tokens(llm, expected.prompts) == expected.greedy
