"""Heads change nothing but how many tokens a step gives, and read the states of what was kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError, ModelLoadError
from engine.scheduler import StepPlan, StepResult
from engine.speculative.drafter import Drafter
from engine.speculative.heads.base import DraftRounds, HeadSampler
from engine.speculative.interface import HeadPlan, HeadResult
from engine.worker.compiled_step import CompiledStepRunner
from engine.worker.hidden_states import LastHiddenStates
from tests.engine.speculative.head_folders import (
    Equation,
    medusa_equation,
    medusa_parts,
    mlp_equation,
    mlp_parts,
    write,
)
from tests.engine.speculative.test_equality import MIXED, make, prompts, run, texts
from tests.survey.tiny import Oracle

pytestmark = pytest.mark.usefixtures("free_drafts")

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Equation]]:
    """Method -> a random checkpoint, and what it should say."""
    folder = tmp_path_factory.mktemp("heads")
    mlp, medusa = mlp_parts(), medusa_parts()
    return {
        "mlp_speculator": (write(folder / "mlp", *mlp), mlp_equation(*mlp)),
        "medusa": (
            write(folder / "medusa", *medusa, "medusa_lm_head.safetensors"),
            medusa_equation(*medusa),
        ),
    }


def drafting(folder: Path, method: str, head_folder: Path, **settings: Any) -> LLM:
    config = {"method": method, "model": str(head_folder), "num_speculative_tokens": 3}
    return make(folder, speculative_config=config, **settings)


#: Both say what the bias wants, mostly: some drafts hold, some don't.
BIASED = SamplingParams(
    temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, logit_bias={5: 70.0, 6: 68.0}
)


#: Without the compiled kernels, of which these know nothing: heads behind plain layers.
FEW = ["greedy", "penalties", "logprobs", "several", "grammar"]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("method", ["mlp_speculator", "medusa"])
def test_every_way_of_choosing_gives_the_same(
    method: str, kernels: bool, model_folder: Folder, heads: dict[str, tuple[Path, Equation]]
) -> None:
    folder, kinds = model_folder("llama"), list(MIXED) if kernels else FEW
    asked = prompts(random.Random(5))[: len(kinds)]
    baseline = run(make(folder, cpu_kernels=kernels), asked, kinds)
    llm = drafting(folder, method, heads[method][0], cpu_kernels=kernels)
    for turn in range(2):
        drafted = run(llm, asked, kinds)
        assert texts(drafted) == texts(baseline), turn
        for was, now in zip(baseline, drafted, strict=True) if kernels else ():
            assert [completion.logprobs for completion in was.outputs] == [
                completion.logprobs for completion in now.outputs
            ]
    assert llm.core.stats.spec_decode_num_draft_tokens_total > 10 * len(kinds)


@pytest.mark.parametrize("one_call", [True, False])
@pytest.mark.parametrize("method", ["mlp_speculator", "medusa"])
def test_drafts_are_what_the_equations_say_of_transformers_hidden_states(
    method: str,
    one_call: bool,
    model_folder: Folder,
    heads: dict[str, tuple[Path, Equation]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the step before checked drafts or not, and however many of them held."""
    folder, (head_folder, equation) = model_folder("llama"), heads[method]
    calls: list[bool] = []
    full = CompiledStepRunner.run

    def step(self: CompiledStepRunner, plan: StepPlan) -> StepResult | None:
        result = full(self, plan) if one_call else None
        if plan.num_decodes == len(plan.seq_ids):
            calls.append(result is not None)
        return result

    monkeypatch.setattr(CompiledStepRunner, "run", step)
    llm = drafting(folder, method, head_folder)
    model, core = Oracle(folder).model, llm.core
    seen: list[int] = []
    inner = core.drafter.model._run

    def spy(plan: HeadPlan) -> HeadResult:
        result = inner(plan)
        texts = {sequence.seq_id: sequence.token_ids for sequence in core.scheduler.running}
        for seq_id, drafts in zip(plan.seq_ids, result.drafts, strict=True):
            tokens = texts[seq_id]
            with torch.no_grad():
                hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
            text = [tokens[-1]]
            for draft in drafts:
                logits = equation(hidden, text)
                if tokens[: len(biased)] == biased:
                    logits[5] += 70.0
                    logits[6] += 68.0
                    assert draft in (5, 6) or logits.max() == logits[draft]
                else:
                    assert draft == int(logits.argmax())
                text.append(draft)
            seen.append(len(drafts))
        return result

    monkeypatch.setattr(core.drafter.model, "_run", spy)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    biased = [8, 9]
    outputs = llm.generate(
        [[5, 6, 7], biased, list(range(4, 60))], [greedy, BIASED, scored], use_tqdm=False
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 40, 12]
    assert len(seen) > 30
    if core.executor.worker.kernels.name != "reference":
        assert set(calls) == {one_call}
    assert set(seen) <= {1, 2, 3}
    stats = core.stats
    accepted, drafted = (
        stats.spec_decode_num_accepted_tokens_total,
        stats.spec_decode_num_draft_tokens_total,
    )
    assert 5 < accepted < drafted


def test_states_are_put_where_their_rows_are_once_drafts_are_wanted(
    model_folder: Folder,
    heads: dict[str, tuple[Path, Equation]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or once others decode; and those that are then drawn from are each sequence's newest."""
    folder = model_folder("llama")
    llm = drafting(folder, "medusa", heads["medusa"][0], max_num_seqs=3)
    newest: dict[int, torch.Tensor] = {}
    steps, copies, changes, rounds = [0], [0], [0], list[int]()
    aside, store_states, begin = (
        LastHiddenStates._defer,
        LastHiddenStates._copy_last,
        LastHiddenStates.start_draft_rounds,
    )
    propose = Drafter.propose

    def record_call(
        self: LastHiddenStates,
        seq_ids: list[int],
        positions: list[int | None],
        hidden: torch.Tensor,
    ) -> None:
        steps[0] += 1
        changes[0] += self._last is not None and self._last.seq_ids != seq_ids
        aside(self, seq_ids, positions, hidden)
        for seq_id, position in zip(seq_ids, positions, strict=True):
            assert position is not None
            newest[self._batch.row_of[seq_id]] = hidden[position].clone()

    def count(self: LastHiddenStates) -> None:
        copies[0] += self._last is not None
        store_states(self)

    def compare(self: LastHiddenStates, rows: list[int]) -> DraftRounds:
        rounds.append(len(rows))
        assert torch.equal(self._states[rows], torch.stack([newest[row] for row in rows]))
        return begin(self, rows)

    monkeypatch.setattr(LastHiddenStates, "_defer", record_call)
    monkeypatch.setattr(LastHiddenStates, "_copy_last", count)
    monkeypatch.setattr(LastHiddenStates, "start_draft_rounds", compare)
    rng = random.Random(7)
    monkeypatch.setattr(
        Drafter, "propose", lambda *args: propose(*args) if rng.random() < 0.2 else {}
    )
    asked = prompts(random.Random(3))
    outputs = llm.generate(asked, BIASED, use_tqdm=False)
    assert texts(outputs) == texts(make(folder).generate(asked, BIASED, use_tqdm=False))
    assert len(rounds) > 5
    assert copies[0] <= len(rounds) + changes[0] < steps[0] // 2


def test_preempted_sequences_get_drafts_again(
    model_folder: Folder, heads: dict[str, tuple[Path, Equation]]
) -> None:
    folder, asked = model_folder("llama"), prompts(random.Random(3))
    baseline = run(make(folder), asked)
    few = {"num_gpu_blocks_override": 14, "max_model_len": 128}
    llm = drafting(folder, "medusa", heads["medusa"][0], **few)
    assert texts(run(llm, asked)) == texts(baseline)
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("level", [1, 2])
def test_they_sleep_with_the_model(
    level: int, model_folder: Folder, heads: dict[str, tuple[Path, Equation]]
) -> None:
    llm = drafting(
        model_folder("llama"), "mlp_speculator", heads["mlp_speculator"][0],
        enable_sleep_mode=True,
    )  # fmt: skip
    initial_outputs = llm.generate([[5, 6, 7]], BIASED, use_tqdm=False)
    llm.sleep(level)
    assert (llm.core.executor.drafts.of_heads._heads is None) == (level == 2)
    llm.wake_up()
    llm.core.reset_stats()
    assert texts(llm.generate([[5, 6, 7]], BIASED, use_tqdm=False)) == texts(initial_outputs)
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 0


def test_heads_that_fail_end_drafts_alone(
    model_folder: Folder,
    heads: dict[str, tuple[Path, Equation]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = model_folder("llama")
    llm = drafting(folder, "medusa", heads["medusa"][0])
    failed = []

    def fail(*_: Any) -> None:
        failed.append(1)
        raise MemoryError("none left")

    monkeypatch.setattr(HeadSampler, "draw", fail)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    drafted = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert texts(drafted) == texts(make(folder).generate([[5, 6, 7]], params, use_tqdm=False))
    assert len(failed) == 3


def test_more_likely_drafts_hold_under_typical_acceptance(
    model_folder: Folder, heads: dict[str, tuple[Path, Equation]]
) -> None:
    """And greedy text is as it was."""
    folder, method = model_folder("llama"), "mlp_speculator"
    config = {"method": method, "model": str(heads[method][0]), "num_speculative_tokens": 3}
    typical = {**config, "acceptance_method": "typical_acceptance_sampler", "posterior_alpha": 1.0}
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    shares, token_ids = [], []
    for speculative_config in (config, typical):
        llm = make(folder, speculative_config=speculative_config)
        outputs = llm.generate([[5, 6, 7], [8, 9]], [BIASED, greedy], use_tqdm=False)
        token_ids.append(outputs[1].outputs[0].token_ids)
        stats = llm.core.stats
        shares.append(
            stats.spec_decode_num_accepted_tokens_total / stats.spec_decode_num_draft_tokens_total
        )
        llm.core.check_integrity()
    assert token_ids[0] == token_ids[1]
    assert shares[1] > shares[0]


@pytest.mark.parametrize("method", ["mlp_speculator", "medusa"])
def test_a_model_alone_says_what_it_is(
    method: str, model_folder: Folder, heads: dict[str, tuple[Path, Equation]]
) -> None:
    llm = make(model_folder("llama"), speculative_config={"model": str(heads[method][0])})
    assert llm.core.executor.drafts.of_heads._settings.method == method
    llm.generate([[5, 6, 7]], BIASED, use_tqdm=False)
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 0


def test_heads_of_no_numbers_give_no_drafts(model_folder: Folder, tmp_path: Path) -> None:
    config, tensors = mlp_parts()
    tensors["speculator.head.1.weight"].fill_(torch.nan)
    folder = model_folder("llama")
    llm = drafting(folder, "mlp_speculator", write(tmp_path, config, tensors))
    params = [BIASED, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
    drafted = llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
    assert texts(drafted) == texts(
        make(folder).generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
    )
    by_index = llm.core.stats.spec_decode_num_accepted_tokens_per_pos_total
    assert by_index[0] > 0
    assert not any(by_index[1:])


@pytest.mark.parametrize(
    ("changes", "says", "kind"),
    [
        ({"model": "nowhere/at/all"}, "There is no folder", ModelLoadError),
        ({"method": "mlp_speculator"}, "lacks 'n_predict'", ModelLoadError),
        ({"quantization": "fp4"}, "quantization must be one of", ConfigError),
        ({"quantization": "awq"}, "quantization of heads must be one of", ConfigError),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    changes: dict[str, Any],
    says: str,
    kind: type[Exception],
    model_folder: Folder,
    heads: dict[str, tuple[Path, Equation]],
) -> None:
    config = {"method": "medusa", "model": str(heads["medusa"][0]), **changes}
    with pytest.raises(kind, match=says) as caught:
        make(model_folder("llama"), speculative_config=config)
    assert caught.value.param == "speculative_config"  # type: ignore[attr-defined]
