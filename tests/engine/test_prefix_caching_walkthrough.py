"""The numbered time steps of docs/prefix-caching.md: 10 blocks of 4 tokens, exact block ids."""

from __future__ import annotations

from tests.engine.helpers import Driver


def test_walkthrough_of_ten_blocks_of_four_tokens() -> None:
    driver = Driver(num_blocks=10)
    pool = driver.scheduler.kv.pool
    shared = list(range(100, 115))

    # Time 1: request 0 brings 15 tokens: three full blocks, cached at once, and one of 3 tokens.
    zero = driver.add(shared)
    driver.step(next_token=50)
    assert driver.table(zero) == [0, 1, 2, 3]
    assert [pool.blocks[i].block_hash is not None for i in range(4)] == [True, True, True, False]
    assert driver.free_ids() == [4, 5, 6, 7, 8, 9]

    # Time 2: its 16th token fills block 3; the next one needs block 4.
    driver.step(next_token=51)
    assert pool.blocks[3].block_hash is not None
    assert driver.table(zero) == [0, 1, 2, 3]
    driver.step(next_token=52)
    assert driver.table(zero) == [0, 1, 2, 3, 4]

    # Time 3: request 1 brings 14 tokens, the first 10 as request 0's: two blocks hit.
    one = driver.add([*shared[:10], 1, 2, 3, 4])
    plan = driver.step(next_token=53)
    assert driver.table(one) == [0, 1, 5, 6]
    assert one.num_cached_tokens == 8
    assert dict(zip(plan.seq_ids, plan.num_scheduled, strict=True)) == {0: 1, 1: 6}
    assert [pool.blocks[i].ref_count for i in (0, 1, 2)] == [2, 2, 1]

    # Time 4: request 0 ends. Its own blocks go to the tail in reverse; 0 and 1 are still in use.
    driver.scheduler.finish(zero, "stop")
    assert driver.free_ids() == [7, 8, 9, 4, 3, 2]
    assert pool.blocks[2].block_hash is not None
    assert pool.blocks[3].block_hash is not None

    # Time 5: request 1 ends.
    driver.scheduler.finish(one, "stop")
    assert driver.free_ids() == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]

    # Time 6: request 2 brings 29 tokens, the first 12 as request 0's: three blocks hit and leave
    # the free list before anything is allocated; five more come from its head, block 3 evicted.
    two = driver.add([*shared[:12], *range(200, 217)])
    driver.step(next_token=54)
    assert driver.table(two) == [0, 1, 2, 7, 8, 9, 4, 3]
    assert two.num_cached_tokens == 12
    assert driver.free_ids() == [6, 5]
    driver.scheduler.check_integrity()


def test_an_equal_request_leaves_duplicate_blocks_until_it_is_freed() -> None:
    driver = Driver(num_blocks=10)
    prompt = [1, 2, 3, 4, 5, 6]
    one = driver.add(prompt)
    for token in (7, 8, 9, 10):
        driver.step(next_token=token)
    assert driver.table(one) == [0, 1, 2]
    # Request 2 hits block 0; its second block fills up to the same content as block 1.
    two = driver.add(prompt)
    for token in (7, 8, 9):
        driver.step(next_token=token)
    assert driver.table(two)[0] == 0
    duplicate = driver.blocks(two)[1]
    assert duplicate.block_id != 1
    assert duplicate.block_hash == driver.blocks(one)[1].block_hash


def test_a_whole_prompt_in_the_cache_still_computes_its_last_block() -> None:
    driver = Driver(num_blocks=10)
    prompt = list(range(8))
    first = driver.add(prompt)
    driver.step()
    driver.scheduler.finish(first, "stop")
    again = driver.add(prompt)
    plan = driver.step()
    assert again.num_cached_tokens == 4
    assert plan.num_scheduled == [4]


def test_namespaces_never_share_a_block() -> None:
    driver = Driver(num_blocks=20)
    prompt = list(range(16))
    driver.add(prompt, namespace="a")
    driver.step()
    other = driver.add(prompt, namespace="b")
    driver.step()
    assert other.num_cached_tokens == 0
    same = driver.add(prompt, namespace="a")
    driver.step()
    assert same.num_cached_tokens == 12


def test_two_equal_prompts_of_one_step_share_the_blocks_of_that_step() -> None:
    driver = Driver(num_blocks=20)
    prompt = list(range(14))
    driver.add(prompt)
    second = driver.add(prompt)
    plan = driver.step()
    assert second.num_cached_tokens == 12
    assert plan.num_scheduled == [14, 2]


def test_caching_switched_off_finds_nothing() -> None:
    driver = Driver(num_blocks=20, enable_prefix_caching=False)
    prompt = list(range(14))
    driver.add(prompt)
    second = driver.add(prompt)
    driver.step()
    assert second.num_cached_tokens == 0
    assert driver.scheduler.kv.pool.num_cached == 0
