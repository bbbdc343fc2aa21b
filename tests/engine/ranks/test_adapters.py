"""Adapters of a model that ranks share say what they say with one rank, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import LLM, SamplingParams
from engine.contract.errors import EngineFault, InvalidRequest
from engine.contract.lora import LoRARequest
from tests.engine.families.conftest import checkpoint
from tests.engine.lora.adapters import write_adapter

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]
Outputs = list[tuple[list[int], list[dict[int, float]]]]
PROMPTS = [[5, 6, 7, 8], list(range(3, 60)), [*range(3, 40), 9, 9]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
LINEARS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)


def adapter(
    model: Path,
    folder: Path,
    seed: int,
    targets: tuple[str, ...] = LINEARS,
    rank: int = 3,
    **changes: Any,
) -> LoRARequest:
    """An adapter of all layers' `targets`; `changes` of its config."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or weight.dim() != 2:
            continue
        prefix, (rows, columns) = f"base_model.model.{module}", weight.shape
        for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            tensors[f"{prefix}.{part}.weight"] = torch.randn(shape, generator=generator) * 0.2
        if changes.get("use_dora"):
            tensors[f"{prefix}.lora_magnitude_vector"] = torch.ones(rows)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": list(targets),
        **changes,
    }
    write_adapter(folder, config, tensors)
    return LoRARequest(folder.name, seed + 1, str(folder))


@contextmanager
def running(folder: Path, size: int, **settings: Any) -> Iterator[LLM]:
    llm = LLM(
        model=str(folder), tensor_parallel_size=size, num_threads=2, num_gpu_blocks_override=64,
        enable_lora=True, skip_tokenizer_init=True, **settings,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.core.shutdown()


def outputs(llm: LLM, adapters: list[LoRARequest | None]) -> Outputs:
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        PARAMS,
        use_tqdm=False,
        lora_request=adapters,
    )
    return [
        (
            list(result.outputs[0].token_ids),
            [
                {token: entry.logprob for token, entry in row.items()}
                for row in result.outputs[0].logprobs or []
            ],
        )
        for result in results
    ]


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("llama", 2, {"dtype": "bfloat16"}),
        ("llama", 3, {}),  # heads that 3 doesn't divide
        ("phi3", 2, {"async_scheduling": True}),  # fused weights
        ("olmo2", 2, {}),  # a norm over all heads
    ],
)
def test_adapters_over_ranks_give_the_bits_of_one(
    family: str, size: int, options: dict[str, Any], checkpoint: Folder, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    # The files of the third one are laid out as those of the second, so it's packed as that was.
    first, second, third = (
        adapter(folder, tmp_path / str(seed), seed, rank=rank)
        for seed, rank in enumerate((3, 11, 11))
    )
    mixed, other_requests = [first, None, second], [third, third, None]
    with running(folder, 1, max_loras=2, **options) as llm:
        expected, expected_other = outputs(llm, mixed), outputs(llm, other_requests)
        assert expected_other[0] != expected[0]
        assert expected != outputs(llm, [None] * 3)
    ways = [{"size": size}]
    if family == "phi3":
        ways.append({"size": 1, "pipeline_parallel_size": 2})
    for way in ways:
        with running(folder, max_loras=2, **way, **options) as llm:
            assert outputs(llm, mixed) == expected
            assert outputs(llm, other_requests) == expected_other
            assert outputs(llm, mixed) == expected


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",  # gated heads, and states that are split
        pytest.param("mamba2", marks=pytest.mark.slow),
        pytest.param("mamba", marks=pytest.mark.slow),  # states that each rank has
        pytest.param("bamba", marks=pytest.mark.slow),
    ],
)
def test_adapters_of_states_over_ranks_give_the_bits_of_one(
    family: str, checkpoint: Folder, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    attention, states = ("q_proj", "k_proj", "v_proj", "o_proj"), ("x_proj", "dt_proj", "out_proj")
    targets = (*attention, *states, "in_proj", "in_proj_qkvz", "in_proj_ba")
    request = adapter(folder, tmp_path / "a", 0, targets)
    with running(folder, 1) as llm:
        expected = outputs(llm, [request, None, request])
        assert expected != outputs(llm, [None] * 3)
    with running(folder, 2) as llm:
        assert outputs(llm, [request, None, request]) == expected


def test_adapters_of_layers_that_run_one_by_one_are_refused(
    checkpoint: Folder, tmp_path: Path
) -> None:
    folder = checkpoint("falcon_h1")
    request = adapter(folder, tmp_path / "a", 0, ("q_proj", "o_proj"))
    with (
        running(folder, 2) as llm,
        pytest.raises(InvalidRequest, match="tensor_parallel_size=2: serve them with one"),
    ):
        outputs(llm, [request] * 3)


def test_adapters_of_attention_go_with_experts_over_ranks(
    checkpoint: Folder, tmp_path: Path
) -> None:
    folder = checkpoint("mixtral")
    request = adapter(folder, tmp_path / "a", 0, ("q_proj", "v_proj", "o_proj"))
    with running(folder, 1) as llm:
        expected = outputs(llm, [request] * 3)
    with running(folder, 2) as llm:
        assert outputs(llm, [request] * 3) == expected
        experts = adapter(folder, tmp_path / "experts", 0, ("w1", "w2", "w3"))
        with pytest.raises(InvalidRequest, match="tensor_parallel_size=2: serve them with one"):
            outputs(llm, [experts] * 3)
        assert outputs(llm, [request] * 3) == expected


@pytest.mark.parametrize("implementation", ["quire", "transformers"])
def test_what_ranks_cannot_have_of_an_adapter_is_refused(
    implementation: str, checkpoint: Folder, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    with running(folder, 2, model_impl=implementation, max_model_len=256) as llm:
        dora = adapter(folder, tmp_path / "dora", 0, use_dora=True)
        with pytest.raises(InvalidRequest, match="Adapters with DoRA can't be used with tensor_"):
            outputs(llm, [dora] * 3)
        head = adapter(folder, tmp_path / "head", 0, ("q_proj", "lm_head"))
        with pytest.raises(InvalidRequest, match="that change the embedding or the output layer"):
            outputs(llm, [head] * 3)


def test_adapters_of_the_output_layer_are_refused_by_stages(
    checkpoint: Folder, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    head = adapter(folder, tmp_path / "head", 0, ("q_proj", "lm_head"))
    with (
        running(folder, 1, pipeline_parallel_size=2) as llm,
        pytest.raises(InvalidRequest, match="output layer can't be used with pipeline_parallel"),
    ):
        outputs(llm, [head] * 3)


def test_an_adapter_that_another_rank_cannot_read_is_refused(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    request = adapter(folder, tmp_path / "a", 0)
    with running(folder, 2) as llm:
        stage = llm.core.executor._ranks.stage_adapter

        def stage_after_removal(ref: Any) -> None:
            (tmp_path / "a").rename(tmp_path / "b")
            try:
                stage(ref)
            finally:
                (tmp_path / "b").rename(tmp_path / "a")

        monkeypatch.setattr(llm.core.executor._ranks, "stage_adapter", stage_after_removal)
        with pytest.raises((InvalidRequest, EngineFault), match="Rank 1"):
            outputs(llm, [request] * 3)
        monkeypatch.undo()
        assert outputs(llm, [request] * 3) != outputs(llm, [None] * 3)


def test_an_adapter_read_again_before_a_busy_rank_has_unloaded_it_is_there(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    request = adapter(folder, tmp_path / "a", 0)
    with running(folder, 2) as llm:
        expected = outputs(llm, [request] * 3)
        (ref,) = (entry.ref for entry in llm.core.adapters._entries.values())
        adapters, ranks = llm.core.executor.adapters, llm.core.executor._ranks
        broadcast, commands = ranks.broadcast, []
        with monkeypatch.context() as patch:
            # As if rank 1 were in the middle of a long step: it reads adapters, and nothing else.
            patch.setattr(ranks, "broadcast", lambda *command: commands.append(command))
            for _ in range(2):
                adapters.unload(ref.digest)
                adapters.load(ref)
        for command in commands:
            broadcast(*command)
        assert outputs(llm, [request] * 3) == expected
