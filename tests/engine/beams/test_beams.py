"""Beams in the engine: blocks that they share, ends, aborts, limits, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest
from engine.contract.messages import EngineRequest, TokenDelta, TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.core.engine_core import EngineCore
from engine.offline.beam_search import BeamSearchParams
from engine.offline.llm import LLM
from engine.sampling.beam_search import BeamSearch, BeamStep
from engine.scheduler import StepPlan, StepResult
from tests.engine.helpers import block_ids

Folder = Callable[[str], Path]
PROMPT = list(range(10, 43))


def make(model_folder: Folder, **settings: Any) -> EngineCore:
    settings = {"num_gpu_blocks_override": 200, "block_size": 4, "max_model_len": 128, **settings}
    return EngineCore(EngineConfig(model=str(model_folder("llama")), **settings))


def request(request_id: str = "r", *, token_cap: int | None = None, **fields: Any) -> EngineRequest:
    sampling = {"use_beam_search": True, "n": 4, "max_tokens": 10, "ignore_eos": True, **fields}
    return EngineRequest(
        request_id=request_id,
        gateway_id="g",
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(**sampling),
        token_cap=token_cap,
    )


def finish(core: EngineCore) -> list[TokenDelta]:
    deltas: list[TokenDelta] = []
    while core.has_work:
        deltas += core.step()
        core.check_integrity()
    assert not core.requests
    assert core.scheduler.kv.pool.num_free_blocks == core.capacity.num_blocks
    return deltas


def used(core: EngineCore) -> int:
    return core.capacity.num_blocks - core.scheduler.kv.pool.num_free_blocks


def test_beams_share_the_blocks_of_the_prompt_and_of_what_they_have_in_common(
    model_folder: Folder,
) -> None:
    core = make(model_folder)
    core.add_request(request(n=6))
    full_count = len(PROMPT) // 4
    for _ in range(60):
        if not core.requests:
            break
        core.step()
        running = core.scheduler.running
        tables = [block_ids(core.scheduler, sequence) for sequence in running]
        assert all(table[:full_count] == tables[0][:full_count] for table in tables)
        # Each block of a table beyond what is shared is counted once.
        assert used(core) == len({block for table in tables for block in table})
        assert used(core) <= full_count + 6 * 4
        assert len(running) <= 6
        core.check_integrity()
    assert not core.requests


def test_a_beam_that_goes_on_with_one_token_keeps_its_blocks_and_computes_that_token(
    model_folder: Folder,
) -> None:
    core = make(model_folder)
    core.add_request(request(n=1))
    core.step()
    initial_block_ids = block_ids(core.scheduler, core.scheduler.running[0])
    for _ in range(5):
        plan_size = core.scheduler.running[0].num_computed_tokens
        core.step()
        assert core.scheduler.running[0].num_computed_tokens == plan_size + 1
    assert (
        block_ids(core.scheduler, core.scheduler.running[0])[: len(initial_block_ids)]
        == initial_block_ids
    )
    finish(core)


def test_each_output_comes_whole_in_one_delta_best_first(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request(n=2, best_of=5, logprobs=2, prompt_logprobs=1))
    deltas = finish(core)
    assert [(delta.index, delta.start, delta.finish_reason) for delta in deltas] == [
        (0, 0, "length"),
        (1, 0, "length"),
    ]
    scores = [delta.cumulative_logprob or 0.0 for delta in deltas]
    assert scores == sorted(scores, reverse=True)
    for delta, score in zip(deltas, scores, strict=True):
        assert len(delta.token_ids) == len(delta.logprobs or []) == 10
        for token, entry in zip(delta.token_ids, delta.logprobs or [], strict=True):
            assert entry.token_ids[0] == token
            assert len(entry.token_ids) == 3
        assert sum(e.logprobs[0] for e in delta.logprobs or []) == pytest.approx(score, abs=1e-3)
    assert len(deltas[0].prompt_logprobs or []) == len(PROMPT)
    stats = core.snapshot()
    assert stats.requests_finished_total == {"length": 2}
    assert stats.generation_tokens_total == 20
    assert stats.prompt_tokens_total == len(PROMPT)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_fault_25_an_abort_ends_all_beams(model_folder: Folder, steps: int) -> None:
    core = make(model_folder)
    core.add_request(request(n=2, best_of=4))
    for _ in range(steps):
        core.step()
    assert core.abort("r", 1, "stop") == []
    deltas = core.abort("r")
    assert [(d.index, d.start, d.token_ids, d.finish_reason) for d in deltas] == [
        (0, 0, [], "abort"),
        (1, 0, [], "abort"),
    ]
    assert used(core) == 0
    assert finish(core) == []


def test_fault_27_a_search_whose_steps_fail_ends_with_an_error_for_each_output(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(model_folder)
    core.add_request(request(n=2, best_of=4))
    core.step()
    core.step()

    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(core.executor.worker._runner, "forward", fail)
    deltas = finish(core)
    assert [(d.index, d.finish_reason) for d in deltas] == [(0, "error"), (1, "error")]


def test_a_search_that_loses_a_step_finds_the_same(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(model_folder)
    core.add_request(request())
    expected = [delta.token_ids for delta in finish(core)]
    execute, calls = core.executor.execute, []

    def fail_once(plan: Any) -> Any:
        calls.append(len(plan.seq_ids))
        if len(calls) == 7:
            raise MemoryError("no memory")
        return execute(plan)

    monkeypatch.setattr(core.executor, "execute", fail_once)
    core.add_request(request())
    assert [delta.token_ids for delta in finish(core)] == expected
    assert calls[6] > 1


def test_a_token_cap_counts_every_beam(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request(n=2, best_of=4, token_cap=23))
    deltas = finish(core)
    assert [(len(d.token_ids), d.finish_reason) for d in deltas] == [(5, "budget")] * 2


def test_stop_token_ids_end_outputs_and_are_named(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request())
    stop = finish(core)[0].token_ids[2]
    core.add_request(request(stop_token_ids=[stop]))
    finished = [d for d in finish(core) if d.finish_reason == "stop"]
    assert finished
    assert all((d.token_ids[-1], d.stop_reason) == (stop, stop) for d in finished)
    assert all(stop not in d.token_ids[:-1] for d in finished)


def test_constraints_hold_for_beams(model_folder: Folder) -> None:
    core = make(model_folder)
    allowed = [50, 60, 70]
    core.add_request(request(allowed_token_ids=allowed, bad_words_token_ids=[[60, 60]]))
    for delta in finish(core):
        assert set(delta.token_ids) <= set(allowed)
        assert (60, 60) not in zip(delta.token_ids, delta.token_ids[1:], strict=False)


def test_where_one_token_is_allowed_there_is_one_output(model_folder: Folder) -> None:
    core = make(model_folder)
    core.add_request(request(n=3, allowed_token_ids=[50], max_tokens=4))
    assert [delta.token_ids for delta in finish(core)] == [[50] * 4, [], []]


def test_fault_10_a_search_of_nan_ends_with_an_error(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(model_folder)
    model = core.executor.worker._runner.model
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: logits(hidden) * float("nan"))
    core.add_request(request(n=2))
    assert [delta.finish_reason for delta in finish(core)] == ["error", "error"]


def test_a_temperature_flattens_what_is_searched(model_folder: Folder) -> None:
    core = make(model_folder)
    scores = []
    for temperature in (0.0, 1.0, 5.0):
        core.add_request(request(n=1, best_of=3, temperature=temperature, max_tokens=3))
        (delta,) = finish(core)
        scores.append(delta.cumulative_logprob)
    assert scores[0] == pytest.approx(scores[1])
    assert scores[2] < scores[0]


def test_structured_output_cannot_be_searched() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(use_beam_search=True, structured_outputs=StructuredOutputsParams(regex="a"))
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 10**9}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"length_penalty": 1e308}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
    ],
)
def test_faults_04_05_10_beam_search_params_out_of_range(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
    assert caught.value.param == param


def test_the_offline_class_returns_prompt_and_output(model_folder: Folder) -> None:
    llm = LLM(str(model_folder("llama")), num_gpu_blocks_override=200, max_model_len=128)
    (result,) = llm.beam_search("the quick", BeamSearchParams(3, 5, ignore_eos=True))
    prompt = llm.get_tokenizer().encode("the quick")
    assert len(result.sequences) == 3
    for beam in result.sequences:
        assert beam.tokens[: len(prompt)] == prompt
        assert len(beam.tokens) == len(prompt) + 5
        assert beam.text == llm.get_tokenizer().decode(beam.tokens)
        assert beam.score == pytest.approx(beam.cum_logprob / 5)
        assert len(beam.logprobs) == 5


def test_a_beam_that_brings_its_candidates_twice_moves_once(model_folder: Folder) -> None:
    """As after a preemption while it waited for the others."""
    core = make(model_folder)
    core.add_request(request(n=1))
    core.step()
    (beam,) = core.scheduler.running
    initial_num_tokens = beam.num_tokens
    plan = StepPlan(core.scheduler.num_steps + 1, num_samples=[1, 1])
    candidates = scores(t40=-0.5, t41=-0.7)
    core._outputs.process_outputs(
        plan, [beam, beam], StepResult([[], []], candidates={beam.seq_id: candidates})
    )
    assert beam.num_tokens == initial_num_tokens + 1
    core.abort("r")


def test_steps_planned_before_the_beams_moved_tell_nothing_of_them(model_folder: Folder) -> None:
    core = make(model_folder)
    added = core.add_request(request(n=1))
    core.step()
    (beam,), group = core.scheduler.running, added.beams
    assert group is not None
    candidates = scores(t40=-0.5, t41=-0.7)
    old, new = StepPlan(core.scheduler.num_steps), StepPlan(core.scheduler.num_steps + 1)
    assert not group.process_candidates(beam, candidates, old, core.scheduler)
    assert group.process_candidates(beam, candidates, new, core.scheduler)
    core.abort("r")


def scores(**by_token: float) -> TokenLogprobs:
    """Candidates t1=..., best first."""
    ids = [int(name[1:]) for name in by_token]
    return TokenLogprobs(ids, list(by_token.values()), list(range(1, len(ids) + 1)))


def test_a_search_by_hand() -> None:
    search = BeamSearch(2, {9}, max_tokens=3, length_penalty=0.0)
    first = scores(t1=-0.5, t9=-0.9, t2=-1.0, t3=-4.0)
    assert search.advance([first]) == [BeamStep(0, 1), BeamStep(0, 2)]
    # EOS was the second best: an output. The next step ends another, which is the better one.
    assert [(h.token_ids, h.score) for h in search.finished] == [([9], -0.9)]
    moves = search.advance([scores(t9=-0.1, t1=-2.0, t2=-3.0), scores(t1=-0.2, t2=-5.0)])
    assert moves == []
    assert search.done
    assert [h.token_ids for h in search.finished] == [[1, 9], [9]]


@pytest.mark.parametrize(("stopping", "done"), [(True, True), (False, True), ("never", False)])
def test_early_stopping_by_hand(stopping: bool | str, done: bool) -> None:
    search = BeamSearch(1, {9}, 50, length_penalty=1.0, early_stopping=stopping)
    search.advance([scores(t1=-3.0, t9=-4.0)])
    search.advance([scores(t9=-0.1, t1=-0.2)])
    # Finished at -3.1 / 2. A beam at -3.2 could still reach -3.2 / 50.
    assert search.finished[0].score == pytest.approx(-1.55)
    assert search.done is done
