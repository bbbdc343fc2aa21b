"""A step is data: plans, masks and results cross a process as they are."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import msgspec
import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.contract.messages import TokenLogprobs
from engine.scheduler.plan import (
    EncoderInput,
    GrammarOutput,
    NewSequence,
    StepPlan,
    StepResult,
    is_decode,
)
from tests.engine.wire import WireWorker, sent

NEW = NewSequence(
    seq_id=3,
    token_ids=[1, 2, 3],
    num_prompt_tokens=2,
    num_computed_tokens=0,
    block_ids=[[7], [9]],
    sampling=SamplingParams(temperature=0.5, logit_bias={5: -1.5}, stop_token_ids=[4]),
    seed=2**64 - 1,
    prompt_logprobs_from=0,
    adapter="a" * 64,
    encoder_inputs=[EncoderInput(start=1, count=1, handle=0)],
    logits_processors=4,
)
SCORES = TokenLogprobs([5, 6], [-0.5, float("-inf")], [1, 2])


@pytest.mark.parametrize(
    "message",
    [
        StepPlan(
            step=9,
            seq_ids=[3, 4],
            num_scheduled=[3, 2],
            num_samples=[1, 2],
            drafts={4: [8]},
            new=[NEW],
            new_blocks=[(4, [[1, 2], [3, 4]])],
            removed=[1],
            appended=[(4, 5)],
            untracked=[3],
            awaits_bitmask=True,
            kv_meta=b"meta",
        ),
        GrammarOutput(9, [3], np.arange(4, dtype="<i4").tobytes(), [0], {3: "too complex"}),
        StepResult(
            [[5], []],
            logprobs=[[SCORES], None],
            prompt_logprobs={4: [SCORES]},
            pooled={4: b"\x00\x01"},
            candidates={3: SCORES},
            errors={4: "NaN"},
            tracking_seconds=0.5,
            forward_seconds=0.25,
            execute_seconds=0.5,
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_field_survives_the_way_there_and_back(message: msgspec.Struct) -> None:
    assert sent(message) == message
    at_default = {
        field.name
        for field in msgspec.structs.fields(message)
        if field.default == getattr(message, field.name)
    }
    assert at_default <= {"failure"}, "what is at its default would survive anyway"


def test_nothing_in_a_plan_is_tied_to_a_process() -> None:
    seen: set[type] = set()

    def check(kind: object) -> None:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            assert not dataclasses.is_dataclass(kind)
            if kind not in seen:
                seen.add(kind)
                for type_hint in get_type_hints(kind).values():
                    check(type_hint)
        for inner in getattr(kind, "__args__", ()):
            check(inner)
        assert getattr(kind, "__module__", "builtins").split(".")[0] not in ("torch", "concurrent")

    for message in (StepPlan, GrammarOutput, StepResult):
        check(message)
    assert NewSequence in seen


def test_a_row_decodes_when_it_computes_its_newest_token_and_its_drafts() -> None:
    assert is_decode(1)
    assert not is_decode(2)
    assert is_decode(4, num_drafts=3)
    assert is_decode(np.array([1, 5, 1])).tolist() == [True, False, True]
    plan = StepPlan(1, [1, 2, 3], [1, 3, 64], [1, 3, 0], drafts={2: [5, 6]})
    assert (plan.num_decodes, plan.num_prompt_tokens, plan.num_tokens) == (2, 64, 68)


def test_the_engines_of_these_tests_run_over_the_wire(model_folder) -> None:
    llm = LLM(str(model_folder("llama")), dtype="float32", num_gpu_blocks_override=60)
    assert isinstance(llm.core.executor.worker, WireWorker)


def test_what_goes_by_handle_is_let_go_with_its_request(model_folder) -> None:
    llm = LLM(str(model_folder("llama")), dtype="float32", num_gpu_blocks_override=60)
    allocated_attachments = llm.core.executor.worker._attachments
    calls = []

    def record_call(output_ids, logits):
        calls.append(len(allocated_attachments))
        return logits

    params = SamplingParams(temperature=0, max_tokens=3, logits_processors=[record_call])
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)
    assert calls == [1, 1, 1]
    assert len(allocated_attachments) == 0
    with pytest.raises(InvalidRequest):
        llm.generate([{"prompt_token_ids": [10**6]}], params)
    assert len(allocated_attachments) == 0
