"""How many drafts a row gets follows what holds and what wider steps cost."""

from __future__ import annotations

from engine.contract.speculative import SpeculativeConfig
from engine.scheduler import Sequence
from engine.speculative.drafter import Drafter
from tests.engine.speculative.test_proposers import sequence

CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=4)


def repeating(seq_id: int = 0) -> Sequence:
    return sequence([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [3, 4], seq_id)


def drafter(*costs: tuple[int, float], config: SpeculativeConfig = CONFIG) -> Drafter:
    made = Drafter(config, max_model_len=100)
    for width, seconds in costs:
        made.costs.note(width, seconds)
    return made


def test_where_a_wider_step_costs_nothing_a_row_gets_all_drafts() -> None:
    assert drafter((1, 1.0), (5, 1.0)).propose([repeating()], 100) == {0: [5, 6, 7, 8]}


def test_where_a_wider_step_costs_as_much_more_none_are_looked_for() -> None:
    made = drafter((1, 1.0), (128, 128.0))
    rows = [repeating(seq_id) for seq_id in range(16)]
    assert made.propose(rows, 400) == {}
    assert not made._proposer._lookups  # type: ignore[attr-defined]


def test_the_step_is_as_wide_as_pays() -> None:
    """Half of the first drafts hold, a quarter of the second: these don't pay."""
    made = drafter((1, 1.0), (2, 1.3), (3, 1.7), (4, 2.1), (5, 2.5))
    assert made.propose([repeating()], 100) == {0: [5]}


def test_drafts_that_fail_become_fewer_and_are_tried_again_later() -> None:
    made = drafter((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8))
    own = repeating()
    assert len(made.propose([own], 100)[0]) >= 1
    for _ in range(30):
        made.note(own, 4, 0)
    assert made.propose([own], 100) == {}
    tries = next(count for count in range(1000) if made.propose([own], 100))
    assert 10 < tries < 500


def test_drafts_that_hold_become_more() -> None:
    made = drafter((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8))
    own = repeating()
    before = len(made.propose([own], 100)[0])
    for _ in range(10):
        made.note(own, 4, 4)
    assert len(made.propose([own], 100)[0]) == 4 > before


def test_there_are_never_more_than_the_step_has_room_for_or_the_row_can_use() -> None:
    made, own = drafter((1, 1.0)), repeating()
    assert made.propose([own], 2) == {0: [5, 6]}
    own.max_output_tokens = 4  # it has 2, and the step gives one anyway
    assert made.propose([own], 100) == {0: [5]}
    own.max_output_tokens, own.request.tokens_left = 100, 1
    assert made.propose([own], 100) == {}


def test_the_context_ends_drafts() -> None:
    made = Drafter(CONFIG, max_model_len=14)
    assert made.propose([repeating()], 100) == {0: [5]}


def test_an_operators_bound_on_the_batch_holds() -> None:
    config = SpeculativeConfig(method="ngram", disable_by_batch_size=2)
    made = drafter((1, 1.0), config=config)
    assert made.propose([repeating()], 100)
    assert made.propose([repeating(), repeating(1)], 100) == {}
