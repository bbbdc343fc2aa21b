"""The server's cap ends a request at exactly that token; repetition ends an output that circles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import BudgetExhausted
from engine.contract.messages import EngineRequest, TokenDelta
from engine.contract.sampling_params import RepetitionDetectionParams, SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.core.engine_core import EngineCore

Folder = Callable[[str], Path]
DeltasByIndex = dict[int, list[TokenDelta]]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def core(model_folder: Folder, request: pytest.FixtureRequest) -> EngineCore:
    folder = str(model_folder("llama"))
    return EngineCore(
        EngineConfig(
            model=folder,
            num_gpu_blocks_override=128,
            max_model_len=256,
            async_scheduling=request.param,
        )
    )


def run(core: EngineCore, cap: int | None, resume: Any = (), **sampling: Any) -> DeltasByIndex:
    sampling = {"temperature": 1.0, "seed": 4, "max_tokens": 30, "ignore_eos": True, **sampling}
    core.add_request(
        EngineRequest(
            request_id="r",
            gateway_id="g",
            prompt_token_ids=[5, 6, 7],
            sampling=SamplingParams(**sampling),
            token_cap=cap,
            resume_token_ids=list(resume),
        )
    )
    deltas: DeltasByIndex = {}
    while core.has_work:
        for delta in core.step():
            deltas.setdefault(delta.index, []).append(delta)
    core.check_integrity()
    assert not core.requests
    assert core.scheduler.kv.pool.num_free_blocks == core.capacity.num_blocks
    return deltas


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def ends(deltas_by_index: DeltasByIndex) -> list[str | None]:
    return [deltas_by_index[index][-1].finish_reason for index in sorted(deltas_by_index)]


@pytest.mark.parametrize("cap", [1, 2, 17, 29])
def test_fault_22_an_output_ends_at_the_cap(core: EngineCore, cap: int) -> None:
    free = tokens(run(core, None)[0])
    deltas_by_index = run(core, cap)
    assert tokens(deltas_by_index[0]) == free[:cap]
    assert ends(deltas_by_index) == ["budget"]
    assert core.snapshot().requests_finished_total == {"length": 1, "budget": 1}


def test_a_cap_that_is_not_reached_changes_nothing(core: EngineCore) -> None:
    assert ends(run(core, 31)) == ["length"]
    # The last allowed token is also the last by length, which is the client's own wish.
    assert ends(run(core, 30)) == ["length"]


@pytest.mark.parametrize("cap", [3, 7, 10, 11])
def test_all_outputs_share_the_cap_and_end_together(core: EngineCore, cap: int) -> None:
    free = run(core, None, n=3)
    deltas_by_index = run(core, cap, n=3)
    assert sum(len(tokens(deltas)) for deltas in deltas_by_index.values()) == cap
    assert ends(deltas_by_index) == ["budget"] * 3
    for index, deltas in deltas_by_index.items():
        local_tokens = tokens(deltas)
        assert local_tokens == tokens(free[index])[: len(local_tokens)]
        assert abs(len(local_tokens) - cap / 3) < 1


def test_outputs_that_ended_leave_the_cap_to_the_others(core: EngineCore) -> None:
    free = run(core, None, n=2)
    stop = tokens(free[0])[2]
    length = tokens(free[0]).index(stop) + 1
    assert stop not in tokens(free[1])
    deltas_by_index = run(core, 20, n=2, stop_token_ids=[stop])
    assert ends(deltas_by_index) == ["stop", "budget"]
    assert len(tokens(deltas_by_index[1])) == 20 - length


def test_what_a_client_already_has_counts(core: EngineCore) -> None:
    free = [tokens(deltas) for deltas in run(core, None, n=2).values()]
    have = [free[0][:4], free[1][:3]]
    deltas_by_index = run(core, 12, have, n=2)
    assert sum(len(tokens(deltas)) for deltas in deltas_by_index.values()) == 5
    assert ends(deltas_by_index) == ["budget", "budget"]


@pytest.mark.parametrize(("cap", "resume"), [(0, []), (-5, []), (4, [[5, 6, 7, 8]])])
def test_without_any_token_left_a_request_is_refused(
    core: EngineCore, cap: int, resume: list[list[int]]
) -> None:
    with pytest.raises(BudgetExhausted) as caught:
        run(core, cap, resume)
    assert (caught.value.status, caught.value.error_type) == (429, "insufficient_quota")
    assert not core.requests
    assert not core.has_work


def test_the_eos_that_a_grammar_adds_counts(core: EngineCore) -> None:
    form = StructuredOutputsParams(regex="[ab]{3}")
    full_tokens = tokens(run(core, None, structured_outputs=form)[0])
    deltas_by_index = run(core, len(full_tokens) - 1, structured_outputs=form)
    assert tokens(deltas_by_index[0]) == full_tokens[:-1]
    assert ends(deltas_by_index) == ["budget"]


def test_an_output_that_goes_round_in_circles_ends(core: EngineCore) -> None:
    circles = RepetitionDetectionParams(max_pattern_size=3, min_count=4)
    deltas_by_index = run(
        core, None, temperature=0, logit_bias={9: 100.0}, repetition_detection=circles
    )
    assert tokens(deltas_by_index[0]) == [9] * 4
    assert ends(deltas_by_index) == ["repetition"]
    deltas_by_index = run(core, None, temperature=0, logit_bias={9: 100.0})
    assert len(tokens(deltas_by_index[0])) == 30


def test_repetition_waits_for_min_tokens(core: EngineCore) -> None:
    circles = RepetitionDetectionParams(max_pattern_size=3, min_count=4)
    deltas_by_index = run(
        core,
        None,
        temperature=0,
        logit_bias={9: 100.0},
        repetition_detection=circles,
        min_tokens=9,
    )
    assert tokens(deltas_by_index[0]) == [9] * 9
