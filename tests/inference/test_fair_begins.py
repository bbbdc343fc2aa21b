"""Of requests that come at once a few begin in each turn of the loop, and tenants take turns."""

from __future__ import annotations

import asyncio

from inference.web.fair_begins import AT_ONCE, FairBegins


async def test_fault_51_one_of_another_tenant_begins_before_the_rest_of_a_burst() -> None:
    begins, begun = FairBegins(), list[str]()

    async def one(name: str) -> None:
        await begins.wait(name[0])
        begun.append(name)

    tasks = [asyncio.create_task(one(f"a{number}")) for number in range(200)]
    tasks += [asyncio.create_task(one(f"b{number}")) for number in range(2)]
    tasks[100].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun.index("b0") <= AT_ONCE + 2
    assert begun.index("b1") <= 2 * AT_ONCE
    assert [name for name in begun if name[0] == "a"] == [f"a{n}" for n in range(200) if n != 100]


async def test_who_comes_alone_does_not_wait() -> None:
    begins = FairBegins()
    for _ in range(3):
        waiting = begins.wait("a")
        try:
            waiting.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not begins._counting
