"""How many drafts a row gets follows what holds and what wider steps cost."""

from __future__ import annotations

import pytest

from engine.contract.speculative_config import SpeculativeConfig
from engine.scheduler import Sequence, SequenceStatus, StepPlan
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


def drafter(*costs: tuple[int, float], config: SpeculativeConfig = CONFIG) -> Drafter:
    made = Drafter(config, max_model_len=100)
    know(made.costs, *costs)
    return rich(made)


def rich(made: Drafter) -> Drafter:
    """What its drafts may cost is no bound."""
    made._losses.begin_step(made._acceptance.step, {"default": 1})
    made._losses.charge("default", -1000.0)
    return made


def know(costs: StepTimes, *steps: tuple[int, float]) -> None:
    """So many steps of each width that nothing about them is in doubt, and none is old."""
    for _ in range(1000):
        for width, seconds in steps:
            costs.record(width, seconds)


def test_where_a_wider_step_costs_nothing_a_row_gets_all_drafts() -> None:
    assert drafter((1, 1.0), (5, 1.0)).propose([repeating()], 100) == {0: [5, 6, 7, 8]}


def test_where_a_wider_step_costs_as_much_more_none_are_looked_for() -> None:
    made = drafter((1, 1.0), (128, 128.0))
    rows = [repeating(seq_id) for seq_id in range(16)]
    assert made.propose(rows, 400) == {}
    assert not made._proposer._lookups  # type: ignore[attr-defined]


def test_where_what_is_to_be_expected_cannot_pay_there_are_none_until_it_may() -> None:
    """Half of a tenant's first drafts would hold: too few for this step, and most do later."""
    made = drafter((1, 1.0), (4, 3.1), (8, 5.6))
    rows = [repeating(seq_id) for seq_id in range(4)]
    assert made.propose(rows, 400) == {}
    for _ in range(20):
        made.record_outcome(rows[2], 4, 4)
    assert list(made.propose(rows, 400)) == [2]


def test_a_step_in_which_no_row_decodes_has_no_drafts() -> None:
    assert drafter((1, 1.0)).propose([], 100) == {}


def test_the_step_is_as_wide_as_pays() -> None:
    """Half of the first drafts hold, a quarter of the second: these don't pay."""
    made = drafter((1, 1.0), (2, 1.3), (3, 1.7), (4, 2.1), (5, 2.5))
    assert made.propose([repeating()], 100) == {0: [5]}


def test_a_full_batch_tries_a_wider_step_with_few_drafts_and_not_at_all_where_it_knows() -> None:
    """What a try costs all wait for."""
    rows = [repeating(seq_id) for seq_id in range(8)]
    assert sum(map(len, drafter((8, 1.0)).propose(rows, 400).values())) == 4
    assert drafter((4, 0.5), (8, 1.0)).propose(rows, 400) == {}
    assert drafter((4, 1.0)).propose(rows, 400) == {}  # first their own step


def test_drafts_that_fail_become_fewer_and_are_tried_again_later() -> None:
    made = drafter((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8))
    own = repeating()
    assert len(made.propose([own], 100)[0]) >= 1
    for _ in range(30):
        made.record_outcome(own, 4, 0)
    assert made.propose([own], 100) == {}
    tries = next(count for count in range(9000) if made.propose([own], 100))
    assert 10 < tries < 5000


def test_drafts_that_hold_become_more() -> None:
    made = drafter((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8))
    own = repeating()
    before = len(made.propose([own], 100)[0])
    for _ in range(10):
        made.record_outcome(own, 4, 4)
    assert len(made.propose([own], 100)[0]) == 4 > before


def test_there_are_never_more_than_the_step_has_room_for_or_the_row_can_use() -> None:
    made, own = drafter((1, 1.0)), repeating()
    assert made.propose([own], 2) == {0: [5, 6]}
    own.max_output_tokens = 4  # it has 2, and the step gives one anyway
    assert made.propose([own], 100) == {0: [5]}
    own.max_output_tokens, own.request.remaining_tokens = 100, 1
    assert made.propose([own], 100) == {}


def test_the_context_ends_drafts() -> None:
    made = Drafter(CONFIG, max_model_len=14)
    assert made.propose([repeating()], 100) == {0: [5]}


def test_an_operators_bound_on_the_batch_holds() -> None:
    config = SpeculativeConfig(method="ngram", disable_by_batch_size=2)
    made = drafter((1, 1.0), config=config)
    assert made.propose([repeating()], 100)
    assert made.propose([repeating(), repeating(1)], 100) == {}


def test_a_new_sequence_begins_with_what_held_lately_of_drafts_like_its_first() -> None:
    """Short answers of which none repeats anything mustn't each pay for finding that out."""
    made = drafter((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8))
    for seq_id in range(40):
        own = repeating(seq_id)
        for _ in range(3):
            made.record_outcome(own, len(made.propose([own], 100).get(seq_id, [])), 0)
        own.status = SequenceStatus.FINISHED
    tried = 0
    for seq_id in range(100, 2100):
        own = repeating(seq_id)
        if drafts := made.propose([own], 100).get(seq_id):
            tried += 1
            made.record_outcome(own, len(drafts), 0)
        own.status = SequenceStatus.FINISHED
    assert 0 < tried < 40
    rich(made)
    shorter = sequence([1, 2, 9, 9, 5, 6], [1, 2], 5000)  # two tokens match instead of four
    assert made.propose([shorter], 100)


def test_what_held_for_one_tenant_changes_nothing_for_another() -> None:
    """How often drafts hold tells of texts: another tenant must neither see nor feel it."""
    prompt, said = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [3, 4]
    costs = (1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8)
    for num_accepted in (0, 4):
        made, untouched = drafter(*costs), drafter(*costs)
        for seq_id in range(60):
            own = sequence(prompt, said, seq_id, tenant="victim")
            made.propose([own], 100)
            made.record_outcome(own, 4, num_accepted)
            own.status = SequenceStatus.FINISHED
        other = sequence(prompt, said, 1000, tenant="attacker")
        assert made.propose([other], 100) == untouched.propose([other], 100)
        assert _next(made, other) == _next(untouched, other)
        own = sequence(prompt, said, 1001, tenant="victim")
        made.propose([own], 100)
        assert (_next(made, own) > _next(untouched, own)) == (num_accepted == 4)


def _next(made: Drafter, sequence: Sequence) -> float:
    """How likely a draft behind four equal tokens is to hold."""
    (chance,) = AcceptanceEstimate(made._acceptance, sequence.request.message.tenant).chances(4, 1)
    return chance


def test_tenants_that_are_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "MAX_TENANTS", 3)
    usual = TenantAcceptance(max_match=4)
    expected = usual.log_odds("anybody", 2)
    for tenant in ("a", "b", "a", "c", "d"):
        usual.update(tenant, 2, -0.5)
    known = {tenant for tenant in "abcd" if usual.log_odds(tenant, 2) != expected}
    assert known == {"a", "c", "d"}


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

    def propose(self, wanted: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        return {sequence.seq_id: list(range(count)) for sequence, count in wanted}


def test_what_a_draft_model_takes_counts() -> None:
    free = dict.fromkeys((1, 2, 3, 4, 5), 1.0)
    for seconds, drafts in ((0.0, 4), (0.05, 4), (0.3, 2), (0.6, 1), (0.9, 0)):
        model = _Counting((1, seconds))
        made = Drafter(CONFIG, 100, model=model)  # type: ignore[arg-type]
        know(rich(made).costs, *free.items())
        model.costs.record(1, seconds)  # it isn't old
        assert len(made.propose([repeating()], 100).get(0, [])) == drafts, seconds


def test_what_a_draft_model_has_to_read_must_pay_within_the_tokens_that_are_left() -> None:
    free = dict.fromkeys((1, 2, 3, 4, 5), 1.0)
    for unread, left, drafts in ((20.0, 90, 4), (20.0, 6, 0), (200.0, 90, 0)):
        model = _Counting((1, 0.01))
        model.unread = unread
        made = Drafter(CONFIG, 200, model=model)  # type: ignore[arg-type]
        know(rich(made).costs, *free.items())
        model.costs.record(1, 0.01)  # it isn't old
        row = repeating()
        row.max_output_tokens = row.num_output_tokens + left
        assert len(made.propose([row], 100).get(0, [])) == drafts, (unread, left)


def test_a_draft_model_is_tried_though_steps_are_hardly_known_and_left_alone_once_it_fails() -> (
    None
):
    made = Drafter(CONFIG, 100, model=_Counting((1, 0.2)))  # type: ignore[arg-type]
    for width in (1, 2, 3, 4, 5):
        for _ in range(3):
            made.costs.record(width, 1.0 + 0.02 * width)
    row = repeating()
    rich(made)
    assert len(made.propose([row], 100)[0]) >= 3
    for _ in range(40):
        made.record_outcome(row, 4, 0)
    assert made.propose([row], 100) == {}


def test_a_draft_models_time_is_none_of_the_steps() -> None:
    model = _Counting()
    made = Drafter(CONFIG, 100, model=model)  # type: ignore[arg-type]
    for _ in range(3):
        model.seconds = 0.5
        made.note_step(StepPlan(1, [0], [1], [1]), 0.7)
        assert model.seconds == 0.0
    assert made.costs.seconds(1) == pytest.approx(0.2)


class _Measured(_Counting):
    """Was measured to take as long as a step, and takes `really` so long."""

    def __init__(self, really: float) -> None:
        super().__init__((1, 0.9))
        self.really, self.spent = really, 0.0

    def propose(self, wanted: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        drafts = super().propose(wanted)
        self.seconds = self.really * max(map(len, drafts.values()))
        self.spent += self.seconds
        self.costs.record(len(wanted), self.really)
        return drafts


def _measured(really: float) -> tuple[Drafter, _Measured]:
    """A drafter of such a model, whose time is all that goes by."""
    model = _Measured(really)
    made = Drafter(CONFIG, 200, model=model)  # type: ignore[arg-type]
    made.clock = lambda: model.spent
    return rich(made), model


def _drafted(
    made: Drafter, rows: list[Sequence], most: int, cost: Cost = lambda width: 1.0
) -> list[int]:
    """The numbers of those of so many steps that have drafts, all of which hold."""
    found = []
    for count in range(most):
        drafts = made.propose(rows, 100)
        widths = [1 + len(drafts.get(row.seq_id, [])) for row in rows]
        seconds = (
            cost(sum(widths)) + made._planning_seconds + (made.model.seconds if made.model else 0.0)
        )
        seq_ids = [row.seq_id for row in rows]
        made.note_step(StepPlan(1, seq_ids, widths, widths, drafts), seconds)
        for row in rows:
            if own := drafts.get(row.seq_id):
                made.record_outcome(row, len(own), len(own))
        if drafts:
            found.append(count)
    return found


def _lasting(seq_id: int = 0) -> Sequence:
    row = repeating(seq_id)
    row.max_output_tokens = 10**6
    return row


def test_what_a_draft_model_takes_is_seen_though_it_was_measured_on_a_busy_machine() -> None:
    made, _ = _measured(0.01)
    know(made.costs, *dict.fromkeys((1, 2, 3, 4, 5), 1.0).items())
    made.model.costs.record(1, 0.9)  # type: ignore[union-attr]
    first, *others = _drafted(made, [_lasting()], 1000)
    assert 100 < first < 700
    assert len(others) > 0.9 * (1000 - first)


def test_a_draft_model_that_is_too_slow_is_asked_seldom() -> None:
    made, model = _measured(3.0)
    know(made.costs, *dict.fromkeys((1, 2, 3, 4, 5), 1.0).items())
    tried = _drafted(made, [_lasting()], 20_000)
    assert 3 < len(tried) < 12
    assert tried[-1] - tried[-2] > 4000
    assert 3.0 < model.spent < 0.003 * 20_000


def test_in_a_full_batch_a_draft_model_is_asked_seldom_for_one_row() -> None:
    made, model = _measured(0.01)
    know(made.costs, *[(width, float(width)) for width in (1, 8, 16, 64)])
    rows = [_lasting(seq_id) for seq_id in range(8)]
    assert 1 < len(_drafted(made, rows, 3000, cost=float)) < 8
    assert model.spent < 1.0


def test_drafts_go_on_after_a_look_in_which_the_machine_stood_still() -> None:
    made, now = drafter((1, 1.0), (2, 1.3), (3, 1.6), (5, 2.2)), [0.0]
    made.clock = lambda: now[0]
    look, frozen = made._proposer.propose, [1e6]  # type: ignore[union-attr]

    def stand_still(sequence: Sequence, count: int) -> Proposal:
        now[0] += frozen.pop() if frozen else 1e-4
        return look(sequence, count)

    made._proposer.propose = stand_still  # type: ignore[union-attr,method-assign]
    made.propose([_lasting()], 100)
    assert not frozen
    assert _drafted(made, [_lasting()], 3000)
