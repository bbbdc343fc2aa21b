"""How many drafts a row gets follows what holds and what wider steps cost."""

from __future__ import annotations

import pytest

from engine.contract.speculative_config import SpeculativeConfig
from engine.scheduler import Sequence, SequenceStatus, StepPlan
from engine.scheduler.plan import EncodeTask
from engine.speculative import acceptance
from engine.speculative.acceptance import AcceptanceEstimate, TenantAcceptance
from engine.speculative.drafter import Drafter
from engine.speculative.ngram import Proposal
from engine.speculative.step_times import StepTimes
from tests.engine.speculative.simulation import Cost
from tests.engine.speculative.test_proposers import sequence

CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=4)


def repeating(seq_id: int = 0) -> Sequence:
    return sequence([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [3, 4], seq_id)


def make_drafter(*costs: tuple[int, float], config: SpeculativeConfig = CONFIG) -> Drafter:
    drafter = Drafter(config, max_model_len=100)
    know(drafter.costs, *costs)
    return rich(drafter)


def rich(drafter: Drafter) -> Drafter:
    """What its drafts may cost is no bound."""
    drafter._losses.begin_step(drafter._acceptance.step, {"default": 1})
    drafter._losses.charge("default", -1000.0)
    return drafter


def know(costs: StepTimes, *steps: tuple[int, float]) -> None:
    """So many steps of each width that nothing about them is in doubt, and none is old."""
    for _ in range(1000):
        for width, seconds in steps:
            costs.record(width, seconds)


def test_where_a_wider_step_costs_nothing_a_row_gets_all_drafts() -> None:
    assert make_drafter((1, 1.0), (5, 1.0)).propose([repeating()], 100) == {0: [5, 6, 7, 8]}


def test_where_a_wider_step_costs_as_much_more_none_are_looked_for() -> None:
    drafter = make_drafter((1, 1.0), (128, 128.0))
    rows = [repeating(seq_id) for seq_id in range(16)]
    assert drafter.propose(rows, 400) == {}
    assert not drafter._proposer._lookups  # type: ignore[attr-defined]


def test_where_what_is_to_be_expected_cannot_pay_there_are_none_until_it_may() -> None:
    """Half of a tenant's first drafts would hold: too few for this step, and most do later."""
    drafter = make_drafter((1, 1.0), (4, 3.1), (8, 5.6))
    rows = [repeating(seq_id) for seq_id in range(4)]
    assert drafter.propose(rows, 400) == {}
    for _ in range(20):
        drafter.record_outcome(rows[2], 4, 4)
    assert list(drafter.propose(rows, 400)) == [2]


def test_a_step_in_which_no_row_decodes_has_no_drafts() -> None:
    assert make_drafter((1, 1.0)).propose([], 100) == {}


def test_the_step_is_as_wide_as_pays() -> None:
    """Half of the first drafts hold, a quarter of the second: these don't pay."""
    drafter = make_drafter((1, 1.0), (2, 1.3), (3, 1.7), (4, 2.1), (5, 2.5))
    assert drafter.propose([repeating()], 100) == {0: [5]}


def test_a_full_batch_tries_a_wider_step_with_few_drafts_and_not_at_all_where_it_knows() -> None:
    """What a try costs all wait for."""
    rows = [repeating(seq_id) for seq_id in range(8)]
    assert sum(map(len, make_drafter((8, 1.0)).propose(rows, 400).values())) == 4
    assert make_drafter((4, 0.5), (8, 1.0)).propose(rows, 400) == {}
    assert make_drafter((4, 1.0)).propose(rows, 400) == {}  # first their own step


def test_drafts_that_fail_become_fewer_and_are_tried_again_later() -> None:
    drafter = make_drafter((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8))
    row = repeating()
    assert len(drafter.propose([row], 100)[0]) >= 1
    for _ in range(30):
        drafter.record_outcome(row, 4, 0)
    assert drafter.propose([row], 100) == {}
    tries = next(count for count in range(9000) if drafter.propose([row], 100))
    assert 10 < tries < 5000


def test_drafts_that_hold_become_more() -> None:
    drafter = make_drafter((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8))
    row = repeating()
    initial_count = len(drafter.propose([row], 100)[0])
    for _ in range(10):
        drafter.record_outcome(row, 4, 4)
    assert len(drafter.propose([row], 100)[0]) == 4 > initial_count


def test_there_are_never_more_than_the_step_has_room_for_or_the_row_can_use() -> None:
    drafter, row = make_drafter((1, 1.0)), repeating()
    assert drafter.propose([row], 2) == {0: [5, 6]}
    row.max_output_tokens = 4  # it has 2, and the step gives one anyway
    assert drafter.propose([row], 100) == {0: [5]}
    row.max_output_tokens, row.request.remaining_tokens = 100, 1
    assert drafter.propose([row], 100) == {}


def test_the_context_ends_drafts() -> None:
    drafter = Drafter(CONFIG, max_model_len=14)
    assert drafter.propose([repeating()], 100) == {0: [5]}


def test_an_operators_bound_on_the_batch_holds() -> None:
    config = SpeculativeConfig(method="ngram", disable_by_batch_size=2)
    drafter = make_drafter((1, 1.0), config=config)
    assert drafter.propose([repeating()], 100)
    assert drafter.propose([repeating(), repeating(1)], 100) == {}


def test_a_new_sequence_begins_with_what_held_lately_of_drafts_like_its_first() -> None:
    """Short answers of which none repeats anything mustn't each pay for finding that out."""
    drafter = make_drafter((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8))
    for seq_id in range(40):
        row = repeating(seq_id)
        for _ in range(3):
            drafter.record_outcome(row, len(drafter.propose([row], 100).get(seq_id, [])), 0)
        row.status = SequenceStatus.FINISHED
    tried = 0
    for seq_id in range(100, 2100):
        row = repeating(seq_id)
        if drafts := drafter.propose([row], 100).get(seq_id):
            tried += 1
            drafter.record_outcome(row, len(drafts), 0)
        row.status = SequenceStatus.FINISHED
    assert 0 < tried < 40
    rich(drafter)
    shorter = sequence([1, 2, 9, 9, 5, 6], [1, 2], 5000)  # two tokens match instead of four
    assert drafter.propose([shorter], 100)


def test_what_held_for_one_tenant_changes_nothing_for_another() -> None:
    """How often drafts hold tells of texts: another tenant must neither see nor feel it."""
    prompt, text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [3, 4]
    costs = (1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8)
    for num_accepted in (0, 4):
        drafter, untouched = make_drafter(*costs), make_drafter(*costs)
        for seq_id in range(60):
            row = sequence(prompt, text, seq_id, tenant="victim")
            drafter.propose([row], 100)
            drafter.record_outcome(row, 4, num_accepted)
            row.status = SequenceStatus.FINISHED
        other = sequence(prompt, text, 1000, tenant="attacker")
        assert drafter.propose([other], 100) == untouched.propose([other], 100)
        assert _next(drafter, other) == _next(untouched, other)
        row = sequence(prompt, text, 1001, tenant="victim")
        drafter.propose([row], 100)
        assert (_next(drafter, row) > _next(untouched, row)) == (num_accepted == 4)


def _next(drafter: Drafter, sequence: Sequence) -> float:
    """How likely a draft behind four equal tokens is to hold."""
    (chance,) = AcceptanceEstimate(drafter._acceptance, sequence.request.message.tenant).chances(
        4, 1
    )
    return chance


def test_tenants_that_are_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "MAX_TENANTS", 3)
    usual = TenantAcceptance(max_match=4)
    expected = usual.log_odds("anybody", 2)
    for tenant in ("a", "b", "a", "c", "d"):
        usual.update(tenant, 2, -0.5)
    updated = {tenant for tenant in "abcd" if usual.log_odds(tenant, 2) != expected}
    assert updated == {"a", "c", "d"}


class _Counting:
    """Stands for a draft model."""

    is_healthy, seconds, reading, unread, following = True, 0.0, 0.0, 0.0, None

    def __init__(self, *costs: tuple[int, float]) -> None:
        self.costs = StepTimes(is_draft=True)
        know(self.costs, *costs)

    def supports(self, sequence: Sequence) -> bool:
        return True

    def max_drafts(self, sequence: Sequence) -> int:
        return 100

    def num_unread_tokens(self, sequence: Sequence) -> float:
        return self.unread

    def propose(self, requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        return {sequence.seq_id: list(range(count)) for sequence, count in requests}


def test_what_a_draft_model_takes_counts() -> None:
    free = dict.fromkeys((1, 2, 3, 4, 5), 1.0)
    for seconds, drafts in ((0.0, 4), (0.05, 4), (0.3, 2), (0.6, 1), (0.9, 0)):
        model = _Counting((1, seconds))
        drafter = Drafter(CONFIG, 100, model=model)  # type: ignore[arg-type]
        know(rich(drafter).costs, *free.items())
        model.costs.record(1, seconds)  # it isn't old
        assert len(drafter.propose([repeating()], 100).get(0, [])) == drafts, seconds


def test_what_a_draft_model_has_to_read_must_pay_within_the_tokens_that_are_left() -> None:
    free = dict.fromkeys((1, 2, 3, 4, 5), 1.0)
    for unread, num_remaining, drafts in ((20.0, 90, 4), (20.0, 6, 0), (200.0, 90, 0)):
        model = _Counting((1, 0.01))
        model.unread = unread
        drafter = Drafter(CONFIG, 200, model=model)  # type: ignore[arg-type]
        know(rich(drafter).costs, *free.items())
        model.costs.record(1, 0.01)  # it isn't old
        row = repeating()
        row.max_output_tokens = row.num_output_tokens + num_remaining
        assert len(drafter.propose([row], 100).get(0, [])) == drafts, (unread, num_remaining)


def test_a_draft_model_is_tried_though_steps_are_hardly_known_and_left_alone_once_it_fails() -> (
    None
):
    drafter = Drafter(CONFIG, 100, model=_Counting((1, 0.2)))  # type: ignore[arg-type]
    for width in (1, 2, 3, 4, 5):
        for _ in range(3):
            drafter.costs.record(width, 1.0 + 0.02 * width)
    row = repeating()
    rich(drafter)
    assert len(drafter.propose([row], 100)[0]) >= 3
    for _ in range(40):
        drafter.record_outcome(row, 4, 0)
    assert drafter.propose([row], 100) == {}


def test_a_draft_models_time_is_none_of_the_steps() -> None:
    model = _Counting()
    drafter = Drafter(CONFIG, 100, model=model)  # type: ignore[arg-type]
    for _ in range(3):
        model.seconds = 0.5
        drafter.note_step(StepPlan(1, [0], [1], [1]), 0.7)
        assert model.seconds == 0.0
    assert drafter.costs.seconds(1) == pytest.approx(0.2)


def test_a_step_in_which_an_encoder_ran_is_no_measure_and_leaves_no_time_to_the_next() -> None:
    model = _Counting()
    drafter = Drafter(CONFIG, 100, model=model)  # type: ignore[arg-type]
    know(drafter.costs, (1, 0.2))
    model.seconds = drafter._planning_seconds = 0.5
    encode = [EncodeTask(b"key", "audio", 0)]
    drafter.note_step(StepPlan(1, [0], [1], [1], encode=encode), 90.0)
    assert model.seconds == drafter._planning_seconds == 0.0
    assert drafter.costs.seconds(1) == pytest.approx(0.2)


class _Measured(_Counting):
    """Was measured to take as long as a step, and takes `really` so long."""

    def __init__(self, really: float) -> None:
        super().__init__((1, 0.9))
        self.really, self.spent = really, 0.0

    def propose(self, requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        drafts = super().propose(requests)
        self.seconds = self.really * max(map(len, drafts.values()))
        self.spent += self.seconds
        self.costs.record(len(requests), self.really)
        return drafts


def _measured(really: float) -> tuple[Drafter, _Measured]:
    """A drafter of such a model, whose time is all that goes by."""
    model = _Measured(really)
    drafter = Drafter(CONFIG, 200, model=model)  # type: ignore[arg-type]
    drafter.clock = lambda: model.spent
    return rich(drafter), model


def _drafted(
    drafter: Drafter, rows: list[Sequence], num_steps: int, cost: Cost = lambda width: 1.0
) -> list[int]:
    """The numbers of those of so many steps that have drafts, all of which hold."""
    counts = []
    for count in range(num_steps):
        drafts = drafter.propose(rows, 100)
        widths = [1 + len(drafts.get(row.seq_id, [])) for row in rows]
        seconds = (
            cost(sum(widths))
            + drafter._planning_seconds
            + (drafter.model.seconds if drafter.model else 0.0)
        )
        seq_ids = [row.seq_id for row in rows]
        drafter.note_step(StepPlan(1, seq_ids, widths, widths, drafts), seconds)
        for row in rows:
            if row_drafts := drafts.get(row.seq_id):
                drafter.record_outcome(row, len(row_drafts), len(row_drafts))
        if drafts:
            counts.append(count)
    return counts


def _lasting(seq_id: int = 0) -> Sequence:
    row = repeating(seq_id)
    row.max_output_tokens = 10**6
    return row


def test_what_a_draft_model_takes_is_seen_though_it_was_measured_on_a_busy_machine() -> None:
    drafter, _ = _measured(0.01)
    know(drafter.costs, *dict.fromkeys((1, 2, 3, 4, 5), 1.0).items())
    drafter.model.costs.record(1, 0.9)  # type: ignore[union-attr]
    first, *later_counts = _drafted(drafter, [_lasting()], 1000)
    assert 100 < first < 700
    assert len(later_counts) > 0.9 * (1000 - first)


def test_a_draft_model_that_is_too_slow_is_asked_seldom() -> None:
    drafter, model = _measured(3.0)
    know(drafter.costs, *dict.fromkeys((1, 2, 3, 4, 5), 1.0).items())
    tried = _drafted(drafter, [_lasting()], 20_000)
    assert 3 < len(tried) < 12
    assert tried[-1] - tried[-2] > 4000
    assert 3.0 < model.spent < 0.003 * 20_000


def test_in_a_full_batch_a_draft_model_is_asked_seldom_for_one_row() -> None:
    drafter, model = _measured(0.01)
    know(drafter.costs, *[(width, float(width)) for width in (1, 8, 16, 64)])
    rows = [_lasting(seq_id) for seq_id in range(8)]
    assert 1 < len(_drafted(drafter, rows, 3000, cost=float)) < 8
    assert model.spent < 1.0


def test_drafts_go_on_after_a_look_in_which_the_machine_stood_still() -> None:
    drafter, now = make_drafter((1, 1.0), (2, 1.3), (3, 1.6), (5, 2.2)), [0.0]
    drafter.clock = lambda: now[0]
    propose, frozen = drafter._proposer.propose, [1e6]  # type: ignore[union-attr]

    def stand_still(sequence: Sequence, count: int) -> Proposal:
        now[0] += frozen.pop() if frozen else 1e-4
        return propose(sequence, count)

    drafter._proposer.propose = stand_still  # type: ignore[union-attr,method-assign]
    drafter.propose([_lasting()], 100)
    assert not frozen
    assert _drafted(drafter, [_lasting()], 3000)
