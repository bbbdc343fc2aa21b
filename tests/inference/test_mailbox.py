"""What waits for a slow consumer is merged, never dropped."""

from __future__ import annotations

import asyncio

import pytest

from engine.contract.errors import EngineFault
from engine.contract.messages import TokenLogprobs
from inference.engine_client.mailbox import PIECES_AT_ONCE, Mailbox, Piece


def piece(tokens: list[int], index: int = 0, **fields: object) -> Piece:
    return Piece(0, index, tokens, **fields)  # type: ignore[arg-type]


async def test_pieces_of_one_output_are_merged_in_order() -> None:
    mailbox = Mailbox()
    scores = TokenLogprobs([1], [-0.5], [1])
    mailbox.put(piece([1], num_cached_tokens=4, logprobs=[scores]))
    mailbox.put(piece([9], index=1))
    mailbox.put(piece([2, 3], logprobs=[scores, scores]))
    mailbox.put(piece([], finish_reason="stop", stop_reason=7))
    first, second = await mailbox.get()
    assert (first.index, first.token_ids, first.finish_reason) == (0, [1, 2, 3], "stop")
    assert (first.stop_reason, first.num_cached_tokens, len(first.logprobs or [])) == (7, 4, 3)
    assert (second.index, second.token_ids) == (1, [9])


async def test_fault_26_what_waits_for_a_slow_reader_is_bounded_by_its_outputs() -> None:
    mailbox = Mailbox()
    for token in range(10_000):
        mailbox.put(piece([token], index=token % 2))
    pieces = await mailbox.get()
    assert len(pieces) == 2
    assert sorted(pieces[0].token_ids + pieces[1].token_ids) == list(range(10_000))


async def test_a_waiting_consumer_is_woken() -> None:
    mailbox = Mailbox()
    waiting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.put(piece([5]))
    assert [p.token_ids for p in await waiting] == [[5]]


async def test_waiting_ends_after_its_time() -> None:
    assert await Mailbox().get(0.01) == []


async def test_a_later_wait_may_be_shorter_or_longer_than_the_one_before() -> None:
    mailbox, loop = Mailbox(), asyncio.get_running_loop()
    mailbox.put(piece([1]))
    assert len(await mailbox.get(60.0)) == 1
    loop.call_later(0.01, mailbox.put, piece([2]))
    assert len(await mailbox.get(60.0)) == 1
    assert await mailbox.get(0.01) == []
    loop.call_soon(mailbox.put, piece([3]))
    assert len(await mailbox.get(0.02)) == 1
    started = loop.time()
    assert await mailbox.get(0.1) == []
    assert loop.time() - started >= 0.1
    mailbox.close()


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    mailbox = Mailbox()
    mailbox.put(piece([1]))
    mailbox.fail(EngineFault("broken"))
    assert len(await mailbox.get()) == 1
    for _ in range(2):
        with pytest.raises(EngineFault):
            await mailbox.get()


async def test_a_cancelled_consumer_leaves_what_came() -> None:
    mailbox = Mailbox()
    waiting = asyncio.create_task(mailbox.get(10))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    mailbox.put(piece([1]))
    assert [p.token_ids for p in await mailbox.get()] == [[1]]


async def test_of_thousands_of_outputs_a_few_come_in_one_turn_of_the_loop() -> None:
    mailbox, turns = Mailbox(), []
    for number in range(3 * PIECES_AT_ONCE + 1):
        mailbox.put(Piece(number, 0, [number]))
    asyncio.get_running_loop().call_soon(turns.append, "others")
    first = await mailbox.get()
    assert [piece.number for piece in first] == list(range(PIECES_AT_ONCE))
    assert not turns
    mailbox.put(Piece(PIECES_AT_ONCE, 0, [7]))  # joins what waits of its output
    second = await mailbox.get()
    assert turns == ["others"]
    assert second[0].token_ids == [PIECES_AT_ONCE, 7]
    rest = [*second, *await mailbox.get(), *await mailbox.get()]
    assert [piece.number for piece in rest] == list(range(PIECES_AT_ONCE, 3 * PIECES_AT_ONCE + 1))
    assert await mailbox.get(0.01) == []
