"""States in blocks: where they're kept, and what a prompt that shares a prefix goes on from."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from engine.kv_cache import BlockHashes, KVCacheCoordinator, make_coordinator
from engine.kv_cache.kv_cache_config import single_group_config
from engine.kv_cache.state_manager import (
    CHECKPOINT_INTERVAL,
    MIN_SHARED_TOKENS,
    StateManager,
    checkpoint_positions,
    spaced_positions,
)

BLOCK_SIZE = 16


@dataclass
class Tokens:
    seq_id: int
    token_ids: list[int]
    block_hashes: BlockHashes = field(default_factory=BlockHashes)
    encoder_key: bytes = b""
    num_encoder_states: int = 0
    lora_name: None = None


def make(
    num_states: int, block_size: int = BLOCK_SIZE, num_blocks: int = 400
) -> tuple[KVCacheCoordinator, StateManager]:
    kv = make_coordinator(single_group_config(1).with_states(num_states), num_blocks, block_size)
    assert kv.states is not None
    return kv, kv.states


def start(kv: KVCacheCoordinator, sequence: Tokens, num_new: int = 0, tenant: str = "") -> int:
    """Start a sequence with all of its tokens, or so many; how many of them are cached."""
    kv.start_step()
    prefix, quota = kv.get_computed_blocks(sequence), kv.quotas.get(tenant)
    num_new = num_new or len(sequence.token_ids) - prefix.num_tokens
    assert kv.allocate_slots(sequence, quota, prefix.num_tokens, num_new, prefix) is not None
    return prefix.num_tokens


def finish(kv: KVCacheCoordinator, sequence: Tokens, tenant: str = "") -> None:
    kv.free(sequence.seq_id, kv.quotas.get(tenant))
    kv.check_integrity({})


def test_a_shared_prefix_is_at_most_a_fifth_longer_than_what_is_kept_of_it() -> None:
    positions = list(spaced_positions(100_000))
    assert positions[0] == MIN_SHARED_TOKENS
    assert len(positions) < 32
    assert all(position % CHECKPOINT_INTERVAL == 0 for position in positions)
    for position, following in pairwise(positions):
        assert following - position >= CHECKPOINT_INTERVAL
        assert position >= 0.8 * (following - 1)


def test_states_are_kept_at_the_end_where_prompts_part_and_in_between() -> None:
    assert checkpoint_positions(0, 48, 0) == [48]
    assert checkpoint_positions(0, 400, 208) == [400, 208]
    assert checkpoint_positions(320, 1000, 528) == [1000, 768, 640, 528]
    assert checkpoint_positions(16, 16, 16) == []


def test_a_prompt_goes_on_from_the_longest_prefix_that_has_a_state() -> None:
    """Block 0 holds the first sequence's state; at its end it's kept in block 1."""
    kv, states = make(6)
    first = Tokens(1, list(range(40)))
    assert start(kv, first) == 0
    assert [block.block_id for block in states.tables[1]] == [0]
    assert states.pop_checkpoints() == [(1, 32, 1)]
    assert states.pop_copies() == []
    # Written in the step that is planned: nothing can be copied from there yet.
    prefix = kv.get_computed_blocks(Tokens(2, list(range(50))))
    assert (prefix.num_tokens, prefix.branch) == (0, 32)

    second = Tokens(2, [*range(40), *range(100, 130)])
    assert start(kv, second) == 32
    assert states.pop_copies() == [(1, 2)]
    assert states.pop_checkpoints() == [(2, 64, 3)]
    for sequence in (first, second):
        kv.free(sequence.seq_id, kv.quotas.get(""))
    kv.check_integrity({})


def test_where_prompts_part_is_known_from_the_second_on() -> None:
    kv, states = make(8)
    shared = list(range(200))
    for turn, expected in enumerate((0, 0, 192)):
        sequence = Tokens(turn, [*shared, *range(1000 * turn + 1000, 1000 * turn + 1040)])
        kv.start_step()
        prefix = kv.get_computed_blocks(sequence)
        assert start(kv, sequence) == expected
        retained_num_tokens = [num_tokens for _, num_tokens, _ in states.pop_checkpoints()]
        if turn == 1:
            assert kv.miss_reason(sequence, prefix, reads_cache=True) == "no_state"
            assert retained_num_tokens == [192, 224, 240]
        finish(kv, sequence)


def test_a_later_state_of_an_output_replaces_the_one_before() -> None:
    kv, states = make(4)
    sequence = Tokens(1, list(range(20)))
    start(kv, sequence)
    quota = kv.quotas.get("")
    for count in range(20, 300):
        kv.start_step()
        sequence.token_ids.append(count)
        assert kv.allocate_slots(sequence, quota, count, 1) is not None
    finish(kv, sequence)
    cached = [block for block in states.pool.blocks if block.block_hash is not None]
    assert len(cached) == 2  # the prompt's end, and the last one
    assert kv.get_computed_blocks(Tokens(2, list(range(400)))).num_tokens == 256


def test_a_turn_goes_on_from_the_end_of_a_prompt_in_full_blocks() -> None:
    """The same prompt computes its last block anew, but what follows it needn't."""
    kv, _ = make(6)
    sequence, quota = Tokens(1, list(range(48))), kv.quotas.get("")
    start(kv, sequence)
    for count in range(48, 53):
        kv.start_step()
        sequence.token_ids.append(count)
        assert kv.allocate_slots(sequence, quota, count, 1) is not None
    finish(kv, sequence)
    assert kv.get_computed_blocks(Tokens(2, list(range(48)))).num_tokens == 32
    assert kv.get_computed_blocks(Tokens(3, list(range(100)))).num_tokens == 48


def test_running_sequences_come_before_checkpoints() -> None:
    """Two sequences and two blocks: the first one's checkpoint, still unwritten, gives way."""
    kv, states = make(2)
    first, second = Tokens(1, list(range(40))), Tokens(2, list(range(500, 540)))
    start(kv, first)
    prefix = kv.get_computed_blocks(second)
    assert kv.allocate_slots(second, kv.quotas.get(""), 0, 40, prefix) is not None
    assert states.pop_checkpoints() == []
    assert {block.block_id for table in states.tables.values() for block in table} == {0, 1}
    kv.check_integrity({1: "", 2: ""})


def test_a_checkpoint_may_become_the_sequence_itself() -> None:
    kv, states = make(2)
    start(kv, first := Tokens(1, list(range(40))))
    finish(kv, first)
    start(kv, Tokens(2, list(range(500, 510))))
    assert start(kv, Tokens(3, list(range(60)))) == 32
    assert states.pop_copies() == []  # it's the only block that is left
    kv.check_integrity({2: "", 3: ""})


def test_what_a_failed_step_should_have_kept_is_forgotten() -> None:
    kv, states = make(6)
    sequence = Tokens(1, list(range(100)))
    start(kv, sequence, num_new=90)
    kv.start_step()
    kv.allocate_slots(sequence, kv.quotas.get(""), 90, 10)
    assert [num_tokens for _, num_tokens, _ in states.pop_checkpoints()] == [96]
    kv.uncache_from(1, sequence.block_hashes, 90)
    kv.check_integrity({1: ""})
    assert states.pool.num_cached == 0
    kv.free(1, kv.quotas.get(""))
    kv.uncache_all(sequence.block_hashes)
    again = Tokens(2, list(range(100)))
    start(kv, again)
    kv.start_step()  # cached, though its step is still run
    assert states.pool.num_cached == 1
    kv.free(2, kv.quotas.get(""))
    kv.uncache_all(again.block_hashes)
    assert states.pool.num_cached == 0


def test_a_tenant_evicts_its_own_states_first() -> None:
    kv, _ = make(12)
    for name in ("one", "many"):
        kv.record_request(name, 1.0, 0.0, 1.0)
    sequence = Tokens(0, list(range(40)), BlockHashes(b"one"))
    start(kv, sequence, tenant="one")
    finish(kv, sequence, "one")
    for index in range(1, 40):
        other = Tokens(index, list(range(index, index + 40)), BlockHashes(b"many"))
        start(kv, other, tenant="many")
        finish(kv, other, "many")
    again = Tokens(99, list(range(40)), BlockHashes(b"one"))
    assert start(kv, again, tenant="one") == 32
    stranger = Tokens(100, list(range(40)), BlockHashes(b"two"))
    assert start(kv, stranger, tenant="two") == 0


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33])
def test_one_token_is_always_computed(num_tokens: int) -> None:
    kv, _ = make(4)
    for index in range(2):
        sequence = Tokens(index, list(range(num_tokens)))
        hit = start(kv, sequence)
        finish(kv, sequence)
    assert hit == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_states_before_drafts_are_kept_until_these_are_verified() -> None:
    """Three drafts after 21 tokens, of which one holds: the state after 22 is taken."""
    kv, states = make(6)
    sequence, quota = Tokens(1, list(range(21))), kv.quotas.get("")
    start(kv, sequence)
    states.pop_checkpoints()
    kv.start_step()
    assert kv.allocate_slots(sequence, quota, 21, 3, lookahead=True) is not None
    retained_checkpoints = states.pop_checkpoints()
    assert [num_tokens for _, num_tokens, _ in retained_checkpoints] == [21, 22, 23]
    kv.check_integrity({1: ""})
    states.rewind(1, 22)
    assert states.pop_copies() == [(retained_checkpoints[1][2], states.tables[1][0].block_id)]
    kv.check_integrity({1: ""})
    # With too few blocks there are no drafts.
    assert kv.allocate_slots(sequence, quota, 22, 6, lookahead=True) is None
    # All of them hold: the state is what it should be.
    assert kv.allocate_slots(sequence, quota, 22, 2, lookahead=True) is not None
    states.rewind(1, 24)
    assert states.pop_copies() == []
    assert kv.allocate_slots(sequence, quota, 24, 2, lookahead=True) is not None
    finish(kv, sequence)
    assert states.pool.num_free_blocks == 6


@pytest.mark.parametrize("num_prompt_tokens", [30, 100, 500])
def test_in_large_blocks_states_are_kept_at_their_ends_alone(num_prompt_tokens: int) -> None:
    """A state within a block would be cached as that at the block's beginning, or not at all."""
    kv, states = make(20, 128)
    sequence, quota = Tokens(1, list(range(num_prompt_tokens))), kv.quotas.get("")
    start(kv, sequence)
    positions = [num_tokens for _, num_tokens, _ in states.pop_checkpoints()]
    for count in range(num_prompt_tokens, num_prompt_tokens + 200):
        kv.start_step()
        sequence.token_ids.append(count)
        assert kv.allocate_slots(sequence, quota, count, 1) is not None
        positions += [num_tokens for _, num_tokens, _ in states.pop_checkpoints()]
    assert positions
    assert all(position % 128 == 0 for position in positions), positions
    finish(kv, sequence)


@pytest.mark.parametrize("num_step_tokens", [512, 4096])
@pytest.mark.parametrize("shift", range(0, 601, 20))
def test_of_a_shared_prefix_four_fifths_are_reused_and_then_all(
    shift: int, num_step_tokens: int
) -> None:
    """1,600 tokens that three prompts begin with, in a pool that is full of other states."""
    kv, _ = make(20)
    for seq_id in range(20):
        start(kv, other := Tokens(seq_id, list(range(10_000 * seq_id, 10_000 * seq_id + 100))))
        finish(kv, other)
    for turn, min_share in enumerate((0, 0.8, 0.95)):
        suffix = range(10**6 * (turn + 1), 10**6 * (turn + 1) + shift)
        sequence = Tokens(100 + turn, [*range(500_000, 501_600), *suffix])
        num_tokens = len(sequence.token_ids)
        prefix, quota = kv.get_computed_blocks(sequence), kv.quotas.get("")
        assert prefix.num_tokens >= min_share * 1600
        for first in range(prefix.num_tokens, num_tokens, num_step_tokens):
            kv.start_step()
            num_new = min(num_step_tokens, num_tokens - first)
            adopted = prefix if first == prefix.num_tokens else None
            assert kv.allocate_slots(sequence, quota, first, num_new, adopted) is not None
        kv.start_step()
        finish(kv, sequence)


def test_a_shared_prefix_outlives_other_prompts_in_a_full_pool() -> None:
    """What earlier prompts no longer need is evicted before what the latest may share."""
    kv, _ = make(60, num_blocks=2000)
    # The 17th, the 19th and the last begin alike.
    for seq_id, base in enumerate([*range(18), 16, 18, 16]):
        shared, suffix = range(10_000 * base, 10_000 * base + 1600), range(-100 * seq_id - 100, 0)
        sequence = Tokens(seq_id, [*shared, *suffix[:100]])
        hit = start(kv, sequence)
        kv.start_step()
        finish(kv, sequence)
        if base == 16 and seq_id > 16:
            assert hit >= 0.8 * 1600


def test_in_large_blocks_states_before_drafts_are_kept_at_their_ends_alone() -> None:
    kv, states = make(6, 128)
    sequence, quota = Tokens(1, list(range(63))), kv.quotas.get("")
    start(kv, sequence)
    assert kv.allocate_slots(sequence, quota, 63, 2, lookahead=True) is not None
    sequence.token_ids += [63, 64]
    states.rewind(1, 65)
    kv.start_step()
    assert states.pool.num_cached == 0
    finish(kv, sequence)


@dataclass
class Hits:
    """What of the chats' earlier texts was reused.

    Attributes:
        num_tokens: tokens that were reused.
        num_shared: tokens that each turn had in common with an earlier one, of all turns.
    """

    num_tokens: int
    num_shared: list[int]

    @property
    def share(self) -> float:
        return self.num_tokens / sum(self.num_shared)


def hits_of_chats(num_states: int, order: list[int], repeats_outputs: bool = True) -> Hits:
    """Chats take turns in this order and begin with the same 300 tokens."""
    kv, states = make(num_states, num_blocks=20_000)
    source, quota = random.Random(0), kv.quotas.get("")
    texts = [[source.randrange(10**6) for _ in range(300)]] * (max(order) + 1)
    hits = Hits(0, [])
    for seq_id, chat in enumerate(order):
        hits.num_shared.append(len(texts[chat]))
        sequence = Tokens(seq_id, texts[chat] + source.choices(range(10**6), k=100))
        hits.num_tokens += start(kv, sequence)
        num_prompt = len(sequence.token_ids)
        for token in source.choices(range(10**6), k=source.randrange(70, 150)):
            sequence.token_ids.append(token)
            states.pop_checkpoints()
            states.pop_copies()
            kv.start_step()
            assert kv.allocate_slots(sequence, quota, len(sequence.token_ids) - 1, 1) is not None
        kv.start_step()
        kv.free(seq_id, quota)
        texts[chat] = sequence.token_ids[: None if repeats_outputs else num_prompt]
    kv.check_integrity({})
    return hits


def best_share(
    num_checkpoints: int, order: list[int], num_shared: list[int], beginning: int = 300
) -> float:
    """The most that chats can reuse by one who knows the future.

    A chat's text waits in a block from one turn to the next or not at all, and the `beginning` of
    all always or never. Intervals on alike blocks are a linear program with whole solutions.
    """
    last: dict[int, int] = {}
    intervals = []
    for turn, chat in enumerate(order):
        if chat in last:
            intervals.append((last[chat] + 1, turn))
        last[chat] = turn
    waiting = [(turn, index) for index, (a, b) in enumerate(intervals) for turn in range(a, b)]
    turns, indices = zip(*waiting, strict=True)
    matrix = coo_matrix((np.ones(len(waiting)), (turns, indices)), (len(order), len(intervals)))
    best = 0.0
    for num_reserved, reserved in ((0, 0), (1, beginning)):
        saved = np.array([num_shared[turn] - reserved for _, turn in intervals])
        limits = np.full(len(order), num_checkpoints - num_reserved)
        result = linprog(-saved, A_ub=matrix.tocsr(), b_ub=limits, bounds=(0, 1))
        best = max(best, reserved * len(order) - result.fun)
    return best / sum(num_shared)


ROUND_ROBIN = list(range(16)) * 12


def random_order() -> list[int]:
    """Twelve turns of sixteen chats."""
    order = list(ROUND_ROBIN)
    random.Random(1).shuffle(order)
    return order


@pytest.mark.parametrize("num_states", [5, 17, 33])
@pytest.mark.parametrize("repeats_outputs", [True, False])
def test_chats_reuse_more_than_by_the_last_use_alone(
    num_states: int, repeats_outputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a quarter of a state for each chat, with one and with two."""
    share = hits_of_chats(num_states, random_order(), repeats_outputs).share
    monkeypatch.setattr(StateManager, "_evict_superfluous", lambda *_: None)
    monkeypatch.setattr(StateManager, "_make_space", lambda *_: True)
    by_last_use = hits_of_chats(num_states, random_order(), repeats_outputs).share
    assert share >= min(1.7 * by_last_use, 0.95)


@pytest.mark.parametrize("num_states", [5, 17])
def test_chats_that_take_turns_reuse_most_of_what_can_be_reused(num_states: int) -> None:
    """With a quarter of a state for each chat and with one, of an oracle's hits; without turns,
    nobody but the oracle knows which chat is next.
    """
    hits = hits_of_chats(num_states, ROUND_ROBIN)
    assert hits.share >= 0.9 * best_share(num_states - 1, ROUND_ROBIN, hits.num_shared)
    hits = hits_of_chats(num_states, order := random_order())
    assert hits.share >= 0.5 * best_share(num_states - 1, order, hits.num_shared)


def test_chats_with_short_answers_that_take_turns_reuse_as_much() -> None:
    """A sequence that ends with its prompt's step has its checkpoint cached after it has gone."""
    kv, _ = make(5, num_blocks=20_000)
    source = random.Random(0)
    texts: list[list[int]] = [[] for _ in range(16)]
    hits = Hits(0, [])
    for seq_id, chat in enumerate(ROUND_ROBIN):
        hits.num_shared.append(len(texts[chat]))
        texts[chat] = [*texts[chat], *source.choices(range(10**6), k=100)]
        sequence = Tokens(seq_id, texts[chat])
        hits.num_tokens += start(kv, sequence)
        sequence.token_ids.append(source.randrange(10**6))
        finish(kv, sequence)
    assert hits.share >= 0.8 * best_share(4, ROUND_ROBIN, hits.num_shared, beginning=0)


def test_chats_that_ended_make_space_for_others() -> None:
    """Four chats at a time, and a block more than they need."""
    order = [4 * group + turn % 4 for group in range(6) for turn in range(48)]
    assert hits_of_chats(6, order).share >= 0.9


def test_where_chats_part_is_not_evicted_first() -> None:
    kv, _ = make(9)
    shared = list(range(160))
    for seq_id, first_token in enumerate((1000, 2000, 3000, 4000)):
        turn = Tokens(seq_id, [*shared, *range(first_token, first_token + 40)])
        hit = start(kv, turn)
        kv.start_step()
        finish(kv, turn)
        again = Tokens(100 + seq_id, [*turn.token_ids, *range(first_token + 40, first_token + 80)])
        assert start(kv, again) == 192
        kv.start_step()
        finish(kv, again)
    assert hit == 160


@pytest.mark.parametrize("turns", [(40,), (40, 80)])
def test_of_a_state_that_another_tenant_has_overwritten_nothing_is_kept(
    turns: tuple[int, ...],
) -> None:
    """Tenants that fill the pool one after the other."""
    kv, states = make(64)
    for index in range(400):
        tenant = f"tenant {index // 100}"
        kv.record_request(tenant, 1.0, 0.0, 1.0)
        for turn, count in enumerate(turns):
            tokens = list(range(100 * index, 100 * index + count))
            sequence = Tokens(2 * index + turn, tokens, BlockHashes(tenant.encode()))
            start(kv, sequence, tenant=tenant)
            kv.start_step()
            finish(kv, sequence, tenant)
    for quota in states.pool.quotas:
        assert {*quota.superfluous, *quota.unreturned} <= {*quota.free}


def test_a_tenant_loses_its_own_superfluous_state_before_an_older_one() -> None:
    """Both have a prompt and then a chat's two turns; then one sends as much as the pool holds."""
    kv, _ = make(12)

    def run(seq_id: int, tenant: str, token_ids: list[int]) -> None:
        kv.record_request(tenant, 1.0, 0.0, 1.0)
        sequence = Tokens(seq_id, token_ids)
        start(kv, sequence, tenant=tenant)
        kv.start_step()
        finish(kv, sequence, tenant)

    def num_cached() -> list[int]:
        """Tokens of each tenant's prompt, first turn and second turn."""
        prompts = [(500, 40), (0, 40), (0, 80)]
        return [
            kv.get_computed_blocks(
                Tokens(99, [*range(first + shift, first + shift + count - 1), -1])
            ).num_tokens
            for shift in (0, 1000)
            for first, count in prompts
        ]

    for shift, tenant in ((0, "a"), (1000, "b")):
        run(shift, tenant, list(range(500 + shift, 540 + shift)))
        for turn in (1, 2):
            run(shift + turn, tenant, list(range(shift, shift + 40 * turn)))
    assert num_cached() == [32, 32, 64] * 2
    for index in range(3):
        run(5000 + index, "b", list(range(5000 + 100 * index, 5040 + 100 * index)))
    assert num_cached() == [32, 32, 64, 32, 0, 64]
