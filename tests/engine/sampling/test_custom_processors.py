"""The engine's own logits processors: what they are told of rows, and what becomes of logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    LLM,
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    SamplingParams,
    process_dict_updates,
)
from engine.contract.errors import EngineFault
from engine.sampling import RequestSamplingState, Sampler
from engine.sampling.custom_processors import LogitsProcessors


def state(**fields: Any) -> RequestSamplingState:
    return RequestSamplingState(SamplingParams(**fields), [7], [], 0)


def only(token: int, **fields: Any) -> RequestSamplingState:
    return state(extra_args={"only": token}, **fields)


class Only(LogitsProcessor):
    """Leaves the token that extra_args name."""

    invariant = False

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.tokens: dict[int, int] = {}
        self.updates: list[BatchUpdate | None] = []
        self.seen: list[torch.Tensor] = []

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        process_dict_updates(
            self.tokens, batch_update, lambda params, _, __: (params.extra_args or {}).get("only")
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(logits.clone())
        for row, token in self.tokens.items():
            retained_copy = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = retained_copy
        return logits


class Invariant(Only):
    invariant = True


def make_processor(kind: type[Only] = Only) -> Only:
    return kind(None, torch.device("cpu"), False)


def test_rows_go_with_their_sequences() -> None:
    processor = make_processor()
    sampler = Sampler(custom=LogitsProcessors([processor]))
    sequences = [only(5), state(), only(0), only(3)]
    greedy = [RequestSamplingState(s.params.clone(), [7], [], 0) for s in sequences]
    for item in greedy:
        item.params.temperature = 0.0
    a, b, c, d = greedy
    likeliest = torch.zeros(8)
    likeliest[6] = 1.0
    for rows in ([a, b], [a, b], [b, c], [c, d, b, a], [d], [b, a, d, c]):
        values = sampler.sample(likeliest.repeat(len(rows), 1), rows).token_ids.tolist()
        expected = {id(a): 5, id(b): 6, id(c): 0, id(d): 3}
        assert values == [expected[id(row)] for row in rows]
    assert processor.updates[1] is None


def test_an_update_says_who_came_left_and_moved() -> None:
    processor = make_processor()
    custom = LogitsProcessors([processor])
    a, b, c, d = (state() for _ in range(4))
    custom.update([a, b, c])
    custom.update([c, d])
    first, second = processor.updates
    assert first is not None
    assert [row for row, *_ in first.added] == [0, 1, 2]
    assert first.added[1][1:] == (b.params, [7], b.output_token_ids)
    assert first.added[1][3] is b.output_token_ids
    one_way = MoveDirectionality.UNIDIRECTIONAL
    assert second is not None
    assert [row for row, *_ in second.added] == [0]
    assert (second.batch_size, list(second.removed)) == (2, [1])
    # d took a's row; c comes to 0 from 2 and d goes to 2, from where it falls to 1.
    swap = MoveDirectionality.SWAP
    assert list(second.moved) == [(2, 0, swap), (2, 1, one_way)]


def test_states_follow_any_change_of_rows() -> None:
    """Against the plain truth, over many random steps."""
    chance, processor = random.Random(5), make_processor()
    custom = LogitsProcessors([processor])
    everybody = [only(number) if number % 3 else state() for number in range(12)]
    for _ in range(300):
        rows = chance.sample(everybody, chance.randint(0, len(everybody)))
        custom.update(rows)
        truth = {
            row: one_row.params.extra_args["only"]
            for row, one_row in enumerate(rows)
            if one_row.params.extra_args
        }
        assert processor.tokens == truth


def test_after_a_failure_all_is_told_anew() -> None:
    class Fails(Only):
        broken = True

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            if self.broken:
                self.broken = False
                raise RuntimeError("no")
            super().update_state(batch_update)

    early, late = make_processor(), make_processor(Fails)
    custom = LogitsProcessors([early, late])
    a, b = only(1), only(2)
    with pytest.raises(RuntimeError, match="no"):
        custom.update([a, b])
    custom.update([b])
    assert early.tokens == late.tokens == {0: 2}


def test_one_that_keeps_the_likeliest_sees_what_is_drawn_from() -> None:
    """Temperatures divide before it, and greedy steps pass it by."""
    processor = make_processor(Invariant)
    sampler = Sampler(custom=LogitsProcessors([processor]))
    logits = torch.tensor([[1.0, 2.0, 4.0]] * 2)
    hot, cold = only(1, temperature=2.0), state(temperature=0.0)
    assert sampler.sample(logits.clone(), [hot, cold]).token_ids.tolist() == [1, 2]
    assert processor.seen[0].tolist() == [[0.5, 1.0, 2.0], [1.0, 2.0, 4.0]]
    assert sampler.sample(logits.clone()[:1], [cold]).token_ids.tolist() == [2]
    assert len(processor.seen) == 1


def test_log_probabilities_stay_the_models_own() -> None:
    sampler = Sampler(custom=LogitsProcessors([make_processor()]))
    output = sampler.sample(torch.zeros(1, 4), [only(3, temperature=0.0, logprobs=0)])
    (entry,) = output.logprobs
    assert entry is not None
    assert entry.logprobs[0] == pytest.approx(-1.3863, abs=1e-3)
    assert output.token_ids.tolist() == [3]


def test_a_result_of_another_shape_is_no_result() -> None:
    class Short(Only):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits[:, :2]

    sampler = Sampler(custom=LogitsProcessors([make_processor(Short)]))
    with pytest.raises(ValueError, match="Short must return logits of the shape"):
        sampler.sample(torch.zeros(1, 4), [state()])


class NoRepeats(AdapterLogitsProcessor):
    """No token twice in an output."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return forbids if params.extra_args else None


def forbids(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[output] = float("-inf")
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 7},  # preempts
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},  # leaves sequences out of steps
        {"enable_sleep_mode": True},
    ],
    ids=str,
)
def test_an_engine_gives_what_functions_of_requests_give(
    options: dict[str, Any], model_folder: Callable[[str], Path]
) -> None:
    size: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 96}
    prompts = [[5] * 20, [7, 8, 9], list(range(10, 40)), [60, 61]]
    fields = {"max_tokens": 12, "ignore_eos": True}
    kinds = [{"temperature": 0}, {"temperature": 0.9, "seed": 4}, {"temperature": 0}, {"seed": 1}]
    marked = [True, True, False, True]
    baseline_llm = LLM(str(model_folder("llama")), **size)
    expected_outputs = baseline_llm.generate(
        prompts,
        [
            SamplingParams(**fields, **kind, logits_processors=[forbids] if mark else None)
            for kind, mark in zip(kinds, marked, strict=True)
        ],
        use_tqdm=False,
    )
    llm = LLM(str(model_folder("llama")), logits_processors=[NoRepeats], **size | options)
    if "enable_sleep_mode" in options:
        llm.sleep()
        llm.wake_up()
    outputs = llm.generate(
        prompts,
        [
            SamplingParams(**fields, **kind, extra_args={"once": True} if mark else None)
            for kind, mark in zip(kinds, marked, strict=True)
        ],
        use_tqdm=False,
    )
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == [output.outputs[0].token_ids for output in expected_outputs]
    assert [len(set(token)) == len(token) for token in tokens][:2] == [True, True]
    llm.core.check_integrity()


def test_a_request_that_a_processor_cannot_bear_fails_alone(
    model_folder: Callable[[str], Path],
) -> None:
    class Fussy(NoRepeats):
        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            if params.extra_args == {"once": "bad"}:
                raise KeyError("bad")
            return super().new_req_logits_processor(params)

    size: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 96}
    engine = LLM(str(model_folder("llama")), logits_processors=[Fussy], **size).llm_engine
    for name, extra in (("a", {"once": True}), ("b", {"once": "bad"}), ("c", None)):
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, extra_args=extra)
        engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, params)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {request.request_id: request for request in engine.step() if request.finished}
    assert isinstance(finished["b"].error, EngineFault)
    assert "KeyError" in finished["b"].error.message
    assert [finished[name].error for name in "ac"] == [None, None]
    assert len(set(finished["a"].outputs[0].token_ids)) == 5


def test_a_function_for_each_request() -> None:
    class EveryRow(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            kind = (params.extra_args or {}).get("kind")
            if kind == "prompt":
                return lambda prompt, output, logits: logits.index_fill(0, torch.tensor(prompt), 9)
            if kind == "output":
                return lambda output, logits: logits.index_fill(0, torch.tensor([len(output)]), 9)
            return None

    sampler = Sampler(custom=LogitsProcessors([EveryRow(None, torch.device("cpu"), False)]))
    rows = [
        state(temperature=0, extra_args={"kind": kind} if kind else None)
        for kind in ("prompt", "output", "")
    ]
    logits = torch.zeros(3, 8)
    logits[:, 6] = 1.0
    assert sampler.sample(logits.clone(), rows).token_ids.tolist() == [7, 0, 6]
    rows[1].output_token_ids += [0, 0]
    assert sampler.sample(logits.clone(), rows).token_ids.tolist() == [7, 2, 6]
    vectors = RequestSamplingState(SamplingParams(extra_args={"kind": "prompt"}), (), [], 0)
    with pytest.raises(ValueError, match="this prompt has none"):
        sampler.sample(logits[:1].clone(), [vectors])
