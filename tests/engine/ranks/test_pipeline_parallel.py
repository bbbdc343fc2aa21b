"""A model whose layers are in several processes says what one process says, to the bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, EngineFault
from engine.core.engine_core import EngineCore
from engine.distributed.parallel_state import stage_layers
from engine.distributed.pipeline import _HEADER
from kernels.errors import RankError
from tests.engine.models import make_model
from tests.engine.ranks.test_tensor_parallel import GREEDY, Outputs, outputs, running
from tests.engine.speculative.head_folders import medusa_parts, write

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five layers, whose embedding is its output layer."""
    return make_model(
        "llama", tmp_path_factory.mktemp("deep"), num_hidden_layers=5, tie_word_embeddings=True
    )


def expect(folder: Path, params: SamplingParams = GREEDY, **settings: Any) -> Outputs:
    with running(folder, 1, **settings) as llm:
        return outputs(llm, params)


def run_until_failure(llm: LLM) -> None:
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        outputs(llm)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {"pipeline_parallel_size": 2, "pipeline_layer_partition": "1,4"}),
        pytest.param(1, {"pipeline_parallel_size": 4, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        (2, {"pipeline_parallel_size": 2, "kv_cache_dtype": "int8", "quantization": "int8"}),
    ],
)
def test_any_split_of_layers_gives_the_bits_of_one(
    deep_folder: Path, size: int, options: dict[str, Any]
) -> None:
    isolated_values = {name: value for name, value in options.items() if "pipeline" not in name}
    expected = expect(deep_folder, **isolated_values)
    with running(deep_folder, size, **options) as llm:
        assert outputs(llm) == expected
        assert outputs(llm) == expected  # by cached prefixes


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"num_gpu_blocks_override": 6, "max_num_batched_tokens": 16}),  # preempted
        ("qwen2", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        pytest.param("mistral", {}, marks=pytest.mark.slow),  # windows
    ],
)
def test_two_stages_give_the_bits_of_one(
    model_folder: Folder, family: str, options: dict[str, Any]
) -> None:
    folder = model_folder(family)
    with running(folder, 1, pipeline_parallel_size=2, **options) as llm:
        assert outputs(llm) == expect(folder, **options)


def test_stages_verify_the_drafts_of_a_model(
    deep_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = {"model": str(deep_folder), "num_speculative_tokens": 3}
    with running(deep_folder, 1, pipeline_parallel_size=2, speculative_config=drafts) as llm:
        assert outputs(llm) == expect(deep_folder)
        assert llm.core.snapshot().spec_decode_num_accepted_tokens_total
    # Warming up aborts a sequence whose drafts are being verified.
    assert not [text for text in caplog.messages if " failed with " in text]


def test_stages_draw_the_same_tokens_under_a_grammar(model_folder: Folder) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{4,9}"),
        prompt_logprobs=1,
    )
    folder = model_folder("llama")
    with running(folder, 1, pipeline_parallel_size=2) as llm:
        assert outputs(llm, params) == expect(folder, params)


def test_stages_work_on_different_batches_at_once(model_folder: Folder) -> None:
    with running(model_folder("llama"), 1, pipeline_parallel_size=2) as llm:
        core, in_flight = llm.core, []
        schedule = core.scheduler.schedule

        def observe() -> Any:
            plan, scheduled = schedule()
            in_flight_ids = {sequence.seq_id for sequence in core.sequences_in_flight}
            assert not in_flight_ids & {sequence.seq_id for sequence in scheduled}
            in_flight.append(bool(in_flight_ids) and bool(scheduled))
            return plan, scheduled

        core.scheduler.schedule = observe
        assert outputs(llm)
    assert sum(in_flight) > len(in_flight) // 2


def test_a_stage_has_its_layers_and_its_share_of_the_kv_cache(deep_folder: Path) -> None:
    with running(deep_folder, 1, pipeline_parallel_size=2) as llm:
        model = llm.core.executor.worker.loaded.model
        assert len(model.weights) == len(model.kv_caches) == 3
        assert model.lm_head.nbytes == 0
        assert llm.collective_rpc("check_health") == [None, None]
        assert outputs(llm)
        assert [thread for thread in threading.enumerate() if thread.name == "stage"]
    assert not [thread for thread in threading.enumerate() if thread.name == "stage"]


@pytest.mark.slow
def test_stages_sleep_and_wake(model_folder: Folder) -> None:
    with running(model_folder("llama"), 1, pipeline_parallel_size=2, enable_sleep_mode=True) as llm:
        expected = outputs(llm)
        llm.sleep(2)
        llm.wake_up()
        assert outputs(llm) == expected


def test_after_a_step_that_fails_on_a_stage_others_go_on(model_folder: Folder) -> None:
    with running(model_folder("llama"), 1, pipeline_parallel_size=2) as llm:
        expected = outputs(llm)
        runner = llm.core.executor.worker._runner
        choose_tokens, failures = runner._choose_tokens, [RuntimeError("one bad step")]

        def fail_once(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return choose_tokens(*arguments)

        runner._choose_tokens = fail_once
        assert outputs(llm) == expected
        assert not failures


def test_a_request_is_not_blamed_for_the_failure_of_a_later_step(model_folder: Folder) -> None:
    with running(model_folder("llama"), 1, pipeline_parallel_size=2) as llm:
        expected = outputs(llm)
        stage, failures = llm.core.executor.worker.stage, [RankError("Another rank has failed.")]
        receive = stage.receive_logits

        def fail_once(num_rows: int, vocab_size: int) -> Any:
            if failures and num_rows == 1 and len(set(llm.core.sequences_in_flight)) == 3:
                raise failures.pop()
            return receive(num_rows, vocab_size)

        stage.receive_logits = fail_once
        assert outputs(llm) == expected
        assert not failures


def test_an_interrupt_while_logits_come_loses_nothing(model_folder: Folder) -> None:
    with running(model_folder("llama"), 1, pipeline_parallel_size=2) as llm:
        expected, interrupted = outputs(llm), threading.Event()
        (connection,) = llm.core.executor.worker.stage._logits
        fill = connection._fill

        def interrupt(buffer: memoryview) -> None:
            if len(buffer) != _HEADER.size and not interrupted.is_set():
                interrupted.set()
                signal.raise_signal(signal.SIGINT)  # the main thread gets it
            fill(buffer)

        connection._fill = interrupt
        # A run in the background ignores interrupts.
        previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                outputs(llm)
        finally:
            signal.signal(signal.SIGINT, previous_handler)
        assert outputs(llm) == expected


@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_lost_stage_ends_the_engine(model_folder: Folder, blow: int) -> None:
    with running(model_folder("llama"), 1, pipeline_parallel_size=2) as llm:
        assert outputs(llm)
        os.kill(llm.core.executor.process_ids[0], blow)
        with pytest.raises(EngineFault, match="Rank 1"):
            run_until_failure(llm)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param(
            {"pipeline_parallel_size": 4},
            "pipeline_parallel_size=4 .* the model has 3 layers",
            marks=pytest.mark.slow,
        ),
        ({"pipeline_layer_partition": "1,3"}, "pipeline_layer_partition=1,3 .* has 3 layers"),
        pytest.param(
            {"pipeline_layer_partition": "2"},
            "must be 2 numbers of layers",
            marks=pytest.mark.slow,
        ),
        ({"pipeline_layer_partition": f"1,{'9' * 5000}"}, "must be 2 numbers of layers"),
        ({"device": "cuda"}, "on CPUs alone"),
        pytest.param(
            {"model_impl": "transformers"}, "the Transformers bridge", marks=pytest.mark.slow
        ),
        ({"tensor_parallel_size": 64}, r"in \[1, 64\]; got 128"),
        ({"runner": "pooling", "convert": "embed"}, "can't be used for a pooling model"),
    ],
)
def test_what_stages_cannot_run_is_refused_by_name(
    model_folder: Folder, changes: dict[str, Any], reason: str
) -> None:
    settings = {"pipeline_parallel_size": 2, **changes}
    with pytest.raises(ConfigError, match=reason):
        EngineCore(EngineConfig(model=str(model_folder("llama")), **settings))


def test_drafts_by_heads_are_refused(model_folder: Folder, tmp_path: Path) -> None:
    heads = write(tmp_path, *medusa_parts(), "medusa_lm_head.safetensors")
    drafts = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="drafts by heads can't be used with pipeline_parallel"):
        EngineCore(
            EngineConfig(
                model=str(model_folder("llama")),
                pipeline_parallel_size=2,
                speculative_config=drafts,
            )
        )


def test_layers_are_split_evenly_and_the_last_stage_has_no_more_than_others() -> None:
    assert stage_layers(8, 2) == [range(4), range(4, 8)]
    assert stage_layers(10, 4) == [range(2), range(2, 5), range(5, 8), range(8, 10)]
    assert stage_layers(5, 2, (1, 4)) == [range(1), range(1, 5)]
