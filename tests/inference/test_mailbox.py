"""What waits for a slow consumer is merged, never dropped."""

from __future__ import annotations

import asyncio

import pytest

from engine.contract.errors import EngineFault
from engine.contract.messages import TokenLogprobs
from inference.engine_client.mailbox import MAX_CHUNKS_PER_GET, TokenChunk, TokenQueue


def make_chunk(tokens: list[int], index: int = 0, **fields: object) -> TokenChunk:
    return TokenChunk(0, index, tokens, **fields)  # type: ignore[arg-type]


async def test_pieces_of_one_output_are_merged_in_order() -> None:
    mailbox = TokenQueue()
    scores = TokenLogprobs([1], [-0.5], [1])
    mailbox.push(make_chunk([1], num_cached_tokens=4, logprobs=[scores]))
    mailbox.push(make_chunk([9], index=1))
    mailbox.push(make_chunk([2, 3], logprobs=[scores, scores]))
    mailbox.push(make_chunk([], finish_reason="stop", stop_reason=7))
    first, second = await mailbox.get()
    assert (first.index, first.token_ids, first.finish_reason) == (0, [1, 2, 3], "stop")
    assert (first.stop_reason, first.num_cached_tokens, len(first.logprobs or [])) == (7, 4, 3)
    assert (second.index, second.token_ids) == (1, [9])


async def test_fault_26_what_waits_for_a_slow_reader_is_bounded_by_its_outputs() -> None:
    mailbox = TokenQueue()
    for token in range(10_000):
        mailbox.push(make_chunk([token], index=token % 2))
    chunks = await mailbox.get()
    assert len(chunks) == 2
    assert sorted(chunks[0].token_ids + chunks[1].token_ids) == list(range(10_000))


async def test_a_waiting_consumer_is_woken() -> None:
    mailbox = TokenQueue()
    waiting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.push(make_chunk([5]))
    assert [p.token_ids for p in await waiting] == [[5]]


async def test_waiting_ends_after_its_time() -> None:
    assert await TokenQueue().get(0.01) == []


async def test_a_later_wait_may_be_shorter_or_longer_than_the_one_before() -> None:
    mailbox, loop = TokenQueue(), asyncio.get_running_loop()
    mailbox.push(make_chunk([1]))
    assert len(await mailbox.get(60.0)) == 1
    loop.call_later(0.01, mailbox.push, make_chunk([2]))
    assert len(await mailbox.get(60.0)) == 1
    assert await mailbox.get(0.01) == []
    loop.call_soon(mailbox.push, make_chunk([3]))
    assert len(await mailbox.get(0.02)) == 1
    started = loop.time()
    assert await mailbox.get(0.1) == []
    assert loop.time() - started >= 0.1
    mailbox.close()


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    mailbox = TokenQueue()
    mailbox.push(make_chunk([1]))
    mailbox.fail(EngineFault("broken"))
    assert len(await mailbox.get()) == 1
    for _ in range(2):
        with pytest.raises(EngineFault):
            await mailbox.get()


async def test_a_cancelled_consumer_leaves_what_came() -> None:
    mailbox = TokenQueue()
    waiting = asyncio.create_task(mailbox.get(10))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    mailbox.push(make_chunk([1]))
    assert [p.token_ids for p in await mailbox.get()] == [[1]]


async def test_of_thousands_of_outputs_a_few_come_in_one_turn_of_the_loop() -> None:
    mailbox, turns = TokenQueue(), []
    for number in range(3 * MAX_CHUNKS_PER_GET + 1):
        mailbox.push(TokenChunk(number, 0, [number]))
    asyncio.get_running_loop().call_soon(turns.append, "others")
    first = await mailbox.get()
    assert [chunk.number for chunk in first] == list(range(MAX_CHUNKS_PER_GET))
    assert not turns
    mailbox.push(TokenChunk(MAX_CHUNKS_PER_GET, 0, [7]))  # joins what waits of its output
    second = await mailbox.get()
    assert turns == ["others"]
    assert second[0].token_ids == [MAX_CHUNKS_PER_GET, 7]
    rest = [*second, *await mailbox.get(), *await mailbox.get()]
    assert [chunk.number for chunk in rest] == list(
        range(MAX_CHUNKS_PER_GET, 3 * MAX_CHUNKS_PER_GET + 1)
    )
    assert await mailbox.get(0.01) == []
