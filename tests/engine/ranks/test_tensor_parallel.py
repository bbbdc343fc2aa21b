"""A model that two processes share says what one says, to the bit; it ends with either of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.checkpoints.safetensors import MappedFile, WeightReader
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, InvalidRequest
from engine.core.engine_core import EngineCore
from engine.executor.multiproc_executor import MultiprocExecutor
from engine.executor.rank_settings import rank_config
from engine.models.sharding import split_evenly
from kernels.cpu import CpuKernels
from tests.engine.families.conftest import checkpoint
from tests.engine.models import make_model

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]
PROMPTS = [[5, 6, 7, 8], list(range(3, 40)), [*range(3, 40), 9, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
Outputs = list[tuple[list[int], list[dict[int, float]]]]


@contextmanager
def running(folder: Path, size: int, **settings: Any) -> Iterator[LLM]:
    options = {"num_gpu_blocks_override": 64, "num_threads": 2, **settings}
    llm = LLM(model=str(folder), tensor_parallel_size=size, **options)
    try:
        yield llm
    finally:
        llm.core.shutdown()


def outputs(llm: LLM, params: SamplingParams = GREEDY) -> Outputs:
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
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


def both(folder: Path, params: SamplingParams = GREEDY, **settings: Any) -> tuple[Outputs, Outputs]:
    with running(folder, 1, **settings) as one:
        expected = outputs(one, params)
    with running(folder, 2, **settings) as two:
        return expected, outputs(two, params)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("mistral", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("qwen3", {"num_gpu_blocks_override": 6, "max_num_batched_tokens": 16}),
        ("qwen2", {"async_scheduling": True}),
        ("qwen2", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
)
def test_two_ranks_give_the_bits_of_one(
    model_folder: Folder, family: str, options: dict[str, Any]
) -> None:
    expected, output = both(model_folder(family), **options)
    assert output == expected


def test_two_ranks_draw_the_same_tokens_under_a_grammar(model_folder: Folder) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{4,9}"),
    )
    expected, output = both(model_folder("llama"), params)
    assert output == expected


def test_ranks_share_a_model_that_embeds(model_folder: Folder) -> None:
    vectors = []
    for size in (1, 2):
        options = {"runner": "pooling", "convert": "embed", "max_num_batched_tokens": 16}
        with running(model_folder("qwen3"), size, **options) as llm:
            results = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS])
            vectors.append([result.outputs.embedding for result in results])
    assert vectors[0] == vectors[1]


def test_more_ranks_than_kv_heads_have_a_copy_each(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, num_key_value_heads=1)
    expected, output = both(folder)
    assert output == expected


def test_a_rank_has_its_share_of_the_weights_and_of_the_kv_cache(model_folder: Folder) -> None:
    with running(model_folder("llama"), 1) as llm:
        full = llm.core.executor.worker.loaded.model
    with running(model_folder("llama"), 2) as llm:
        executor = llm.core.executor
        model = executor.worker.loaded.model
        assert model.weights[0].attention.nbytes * 2 == full.weights[0].attention.nbytes
        assert model.kv_caches[0][0].shape[1] * 2 == full.kv_caches[0][0].shape[1]
        assert len(executor.process_ids) == 1


def test_a_rank_has_its_heads_over_latents_and_all_latents(
    checkpoint: Callable[[str], Path],
) -> None:
    layers, caches = [], []
    for size in (1, 2):
        with running(checkpoint("deepseek_v3"), size, skip_tokenizer_init=True) as llm:
            model = llm.core.executor.worker.loaded.model
            layers.append(model.weights[0].attention)
            caches.append(model.kv_caches[0].keys.shape)
    full, half = layers
    assert len(half.into.layers) * 2 == len(full.into.layers)
    assert len(half.out_of.layers) * 2 == len(full.out_of.layers)
    assert half.queries.out_features * 2 == full.queries.out_features
    assert half.inputs.out_features == full.inputs.out_features
    assert caches[0] == caches[1]


@pytest.mark.parametrize("family", ["qwen3_next", "decilm", "olmo2"])
def test_a_rank_has_its_share_of_gated_of_repeated_and_of_jointly_normed_heads(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    heads = []
    for size in (1, 2):
        with running(checkpoint(family), size, skip_tokenizer_init=True) as llm:
            heads.append(llm.core.executor.worker.loaded.model.kv_caches[0].keys.shape[1])
    assert heads[0] == 2 * heads[1]


@pytest.mark.parametrize(
    ("family", "copies"),
    [("qwen3_next", 1), ("falcon_h1", 2)],  # two key heads; one, of which each rank has a copy
)
def test_a_rank_has_its_share_of_the_states_that_can_be_split(
    family: str, copies: int, checkpoint: Callable[[str], Path]
) -> None:
    sizes, total = [], []
    for size in (1, 2):
        with running(checkpoint(family), size, skip_tokenizer_init=True) as llm:
            worker = llm.core.executor.worker
            state = worker.loaded.model.states.layers[0]
            sizes.append(sum(part[0].nbytes for part in state.parts))
            total.append(worker._state_bytes())
    assert sizes[1] * 2 == sizes[0] * copies
    assert total[1] == total[0] * copies


def resident_bytes(path: Path) -> int:
    """Bytes of a file that this process has in memory because it read them from its mapping."""
    total, is_mapping = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_mapping = values[-1] == str(path)
        elif is_mapping and name == "Rss:":
            total += 1024 * int(values[0])
    return total


def test_a_rank_reads_its_share_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(
        "llama", tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=1,
    )  # fmt: skip
    file, read = tmp_path / "model.safetensors", list[int]()
    close = WeightReader.close

    def measure(reader: WeightReader) -> None:
        read.append(resident_bytes(file))
        close(reader)

    monkeypatch.setattr(MappedFile, "release", lambda mapped: None)
    monkeypatch.setattr(WeightReader, "close", measure)
    for size in (1, 2):
        with running(tmp_path, size, skip_tokenizer_init=True):
            pass
    full, share = read
    assert full >= 0.98 * file.stat().st_size  # all but what nobody needs
    assert share <= 1.05 * full / 2


def test_a_rank_has_its_experts_whole_and_none_of_the_others(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with running(
        checkpoint("mixtral"), 2, enable_expert_parallel=True, skip_tokenizer_init=True
    ) as llm:
        experts = llm.core.executor.worker.loaded.model.weights[0].experts.layers
    sizes = [layer.nbytes for layer in experts.gate_up]
    half = len(sizes) // 2
    assert all(sizes[:half])
    assert not any(sizes[half:])
    assert "weren't used" not in caplog.text  # the others' are no surprise


def test_a_model_that_sleeps_wakes_on_all_ranks(model_folder: Folder) -> None:
    with running(model_folder("llama"), 2, enable_sleep_mode=True) as llm:
        expected = outputs(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert outputs(llm) == expected


def test_each_rank_answers_a_remote_procedure_call(model_folder: Folder) -> None:
    with running(model_folder("llama"), 2) as llm:
        assert llm.collective_rpc("check_health") == [None, None]
        with pytest.raises(InvalidRequest, match="no method"):
            llm.collective_rpc("fly")
        with pytest.raises(InvalidRequest, match="can't reach the other ranks"):
            llm.collective_rpc(lambda worker: worker)
        assert outputs(llm)


def test_after_a_step_that_fails_on_all_ranks_others_go_on(model_folder: Folder) -> None:
    with running(model_folder("llama"), 2) as llm:
        expected = outputs(llm)
        runner = llm.core.executor.worker._runner
        execute, failures = runner.execute, [RuntimeError("one bad step")]

        def fail_once(plan: Any) -> Any:
            if failures:
                raise failures.pop()
            return execute(plan)

        runner.execute = fail_once
        assert outputs(llm) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel_size": 2, "cpu_kernels": False}, "needs the compiled CPU kernels"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "on CPUs alone"),
        ({"tensor_parallel_size": 65}, "in \\[1, 64\\]"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(
    model_folder: Folder, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineCore(EngineConfig(model=str(model_folder("llama")), **changes))


def test_ranks_share_the_threads_out() -> None:
    ops = CpuKernels()
    many = EngineConfig(model="m", tensor_parallel_size=2, num_threads=6)
    assert [rank_config(many, rank, 2, ops).num_threads for rank in (0, 1)] == [3, 3]
    few = EngineConfig(model="m", tensor_parallel_size=2, num_threads=1)
    assert rank_config(few, 1, 2, ops).num_threads == 1
    bound = EngineConfig(model="m", tensor_parallel_size=2, cpu_threads_bind="0-3")
    assert [rank_config(bound, rank, 2, ops).cpu_threads_bind for rank in (0, 1)] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="a CPU for each of 2 ranks"):
        rank_config(
            EngineConfig(model="m", tensor_parallel_size=2, cpu_threads_bind="0"), 0, 2, ops
        )


def test_rows_are_split_at_whole_groups_where_there_are_enough() -> None:
    assert split_evenly(128, 2) == (0, 64, 128)
    assert split_evenly(100, 2) == (0, 64, 100)
    assert split_evenly(7, 2) == (0, 3, 7)
    assert split_evenly(1000, 3) == (0, 320, 672, 1000)


def test_an_executor_of_one_rank_is_in_this_process(model_folder: Folder) -> None:
    with running(model_folder("llama"), 1) as llm:
        assert not isinstance(llm.core.executor, MultiprocExecutor)
