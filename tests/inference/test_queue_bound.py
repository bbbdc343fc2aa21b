"""What waits for a model is bounded, and who is refused is told when to come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from engine.contract import messages as protocol
from engine.contract.errors import EngineOverloaded
from engine.contract.messages import EngineStats, Heartbeat, ModelInfo
from engine.contract.pooling_params import PoolingParams
from inference import errors
from inference.engine_client import queue_limit as queue_bound
from inference.engine_client.client import get_engine_client
from inference.engine_client.fleet import Fleet
from inference.engine_client.queue_limit import MIN_WAITING, QUEUE_ROUNDS, Load, QueueLimit
from inference.errors import Overloaded, RateLimitedLog, error_headers
from tests.inference.asgi_client import chat_body
from tests.inference.conftest import Gateway


def flights(**tenants: int) -> Any:
    """Open requests for the model "m"."""
    return [
        SimpleNamespace(model="m", request=SimpleNamespace(tenant=tenant, pooling=None))
        for tenant, count in tenants.items()
        for _ in range(count)
    ]


def texts(count: int, num_tokens: int, tenant: str = "a") -> Any:
    """Open requests for vectors of the model "m"."""
    request = SimpleNamespace(
        tenant=tenant, pooling=PoolingParams(), prompt_token_ids=[5] * num_tokens
    )
    return [SimpleNamespace(model="m", request=request)] * count


FULL = Load(running=100, waiting=400, per_second=50.0)


def test_nobody_is_refused_while_there_is_room() -> None:
    bound = QueueLimit()
    bound.check("m", "a", 0, Load(running=1, waiting=MIN_WAITING - 1), flights(a=1000))
    bound.check("m", "a", 0, Load(running=100, waiting=399), flights(a=1000))


def test_fault_86_short_texts_that_wait_are_counted_by_their_tokens() -> None:
    bound = QueueLimit()
    waiting = Load(running=64, waiting=2000, per_second=300.0)
    bound.check("m", "a", 0, waiting, texts(2000, 200))
    # The texts have ended, and the heartbeat that this gateway has doesn't say so yet.
    bound._counted_at = float("-inf")
    bound.check("m", "a", 0, waiting, [])
    with pytest.raises(Overloaded):
        QueueLimit().check("m", "a", 0, waiting, texts(2000, 4000))
    # Those of one tenant leave another its share of a model that is really busy.
    both = texts(2000, 4000) + texts(10, 4000, "b")
    bound = QueueLimit()
    bound.check("m", "b", 0, Load(running=64, waiting=500), both)
    with pytest.raises(EngineOverloaded):
        bound.check("m", "a", 0, Load(running=64, waiting=500), both)


async def test_fault_86_what_has_ended_waits_no_more_whatever_an_old_heartbeat_says(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first heartbeat stays the last one, and never expires.
    monkeypatch.setattr("inference.engine_client.fleet.oldest_heartbeat_at", lambda: float("-inf"))
    async with gateway.serving(gateway.fake()):
        monkeypatch.setattr(Fleet, "refresh", AsyncMock())
        (replica,) = get_engine_client().fleet.of_model("fake")
        for _ in range(3):
            assert (await gateway.client.chat()).status == 200
        assert (replica.submitted, replica.load, Load.of([replica]).waiting) == (0, 0, 0)
        replica.submitted = -1
        assert (replica.load, Load.of([replica]).waiting) == (0, 0)


def test_a_full_queue_is_503_with_the_time_that_the_replicas_need() -> None:
    with pytest.raises(Overloaded) as caught:
        QueueLimit().check("m", "a", 0, Load(100, 500, 50.0), flights(a=600))
    # 100 too many, at 50 a second.
    assert error_headers(caught.value)["Retry-After"] == "2"
    assert error_headers(caught.value)["retry-after-ms"] == "2000"
    with pytest.raises(Overloaded) as caught:
        QueueLimit().check("m", "a", 0, Load(100, 500), flights(a=600))
    assert error_headers(caught.value)["Retry-After"] == "5"


def test_a_tenant_beyond_its_share_is_429_and_one_within_it_is_let_in() -> None:
    waiting = flights(greedy=480, modest=20)
    with pytest.raises(EngineOverloaded):
        QueueLimit().check("m", "greedy", 0, FULL, waiting)
    QueueLimit().check("m", "modest", 0, FULL, waiting)
    QueueLimit().check("m", "new", 0, FULL, waiting)
    with pytest.raises(Overloaded):
        QueueLimit().check("m", "modest", 0, Load(100, 800, 50.0), waiting)


def test_the_least_urgent_are_refused_first_and_the_most_urgent_last() -> None:
    local = flights(a=600)
    all_of_them = ["low", "usual", "urgent"]
    for waiting, number in ((199, 0), (200, 1), (400, 2), (800, 3)):
        refused = all_of_them[:number]
        load = Load(100, waiting, 50.0)
        names = []
        for name, priority in (("low", 1), ("usual", 0), ("urgent", -1)):
            try:
                QueueLimit().check("m", "a", priority, load, local)
            except Overloaded:
                names.append(name)
        assert names == refused


def waits(bound: QueueLimit, count: int, tenant: str = "a", priority: int = 0) -> list[float]:
    """What so many refused ones of a tenant are told."""
    waits_s, waiting = [], flights(a=600)
    for _ in range(count):
        with pytest.raises(Overloaded) as caught:
            bound.check("m", tenant, priority, Load(100, 500, 50.0), waiting)
        assert caught.value.retry_after is not None
        waits_s.append(caught.value.retry_after)
    return waits_s


def test_the_refused_come_again_one_after_the_other_at_the_replicas_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(queue_bound.time, "monotonic", lambda: now)
    bound = QueueLimit()
    assert waits(bound, 4) == pytest.approx([2.0, 2.04, 2.08, 2.12])
    # Who waits less urgently stands in a line of his own: his room is there later.
    assert waits(bound, 2, priority=1) == pytest.approx([6.0, 6.04])
    now += 1.0
    assert waits(bound, 1) == pytest.approx([2.0])
    # Who never waits puts the others off for so long: 400 that may wait, at 50 a second.
    waits_s = waits(bound, 4000)
    assert 2.0 + QUEUE_ROUNDS * 7.9 < max(waits_s) <= 2.0 + QUEUE_ROUNDS * 8.0
    assert min(waits_s[2000:]) == 2.0
    # All of what was told is over.
    now += 60.0
    assert waits(bound, 1) == pytest.approx([2.0])


def test_one_tenants_refusals_put_no_other_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_bound.time, "monotonic", lambda: 1000.0)
    bound, waiting = QueueLimit(), flights(greedy=480, other=480)

    def retry_after(tenant: str) -> float:
        with pytest.raises(EngineOverloaded) as caught:
            bound.check("m", tenant, 0, Load(100, 500, 50.0), waiting)
        return float(error_headers(caught.value)["retry-after-ms"])

    # Each of two tenants gets half of what the replicas do, and half of that goes to who returns.
    line = [retry_after("greedy") for _ in range(100)]
    assert line == pytest.approx([2000 + 80 * index for index in range(100)], abs=1)
    assert retry_after("other") == 2000


def test_an_overload_writes_a_line_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(errors, "_refusals", RateLimitedLog(errors.logger, lambda: now))
    for number in range(500):
        errors.report(Overloaded("full"), f"r{number}")
    now += 10
    errors.report(Overloaded("full"), "later")
    assert [record.getMessage() for record in caplog.records] == [
        "Request r0 was refused: full",
        "Request later was refused: full (and 499 more like it before)",
    ]


def test_thousands_of_refusals_count_the_house_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = 0

    def counting() -> Any:
        nonlocal counted
        counted += 1
        return iter(flights(a=600))

    class House:
        __iter__ = staticmethod(counting)

    monkeypatch.setattr(queue_bound.time, "monotonic", lambda: 100.0)
    bound = QueueLimit()
    for _ in range(1000):
        with pytest.raises(Overloaded):
            bound.check("m", "a", 0, FULL, House())
    assert counted == 1


def test_the_rate_is_what_heartbeats_say_while_others_wait() -> None:
    fleet = Fleet(None, "quire")  # type: ignore[arg-type]
    info = ModelInfo(name="m", path="", max_model_len=10, vocab_size=10, dtype="float32")
    finished = 0
    for second in range(40):
        busy = 10 <= second < 20 or second >= 30
        finished += 31 if busy else 1
        beat = Heartbeat(
            replica_id="r",
            incarnation="i",
            state="ready",
            model=info,
            at=1000.0 + second,
            progress_at=1000.0 + second,
            stats=EngineStats(
                requests_finished_total={"stop": finished // 2, "length": finished - finished // 2},
                num_requests_waiting=5 if busy else 0,
            ),
        )
        fleet.update({"r": protocol.encode(beat)}, float(second))
        (replica,) = fleet._replicas.values()
        assert replica.per_second == pytest.approx(31.0 if second > 10 else 0.0)


async def test_a_full_queue_is_told_before_a_prompt_is_rendered(
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Load, "of", classmethod(lambda cls, replicas: Load(1, 5000, 100.0)))
    for reply in (await served.client.chat(), await served.client.complete()):
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert reply.headers["retry-after"] == "48"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_a_large_body_is_not_read_where_every_queue_is_full(
    served: Gateway, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(Load, "of", classmethod(lambda cls, replicas: Load(1, 5000, 100.0)))
    parts = [b'{"model": "fake", "prompt": "', b"x" * (1 << 20), b"y" * (1 << 20)]
    exchange = served.client.open("POST", path, parts=parts)
    status, headers = await exchange.head()
    assert (status, headers["retry-after"]) == (503, "48")
    assert len(exchange.received) < len(parts)
    await exchange.leave()
    retained_response = await served.client.post(
        path, parts=list(parts), headers={"Idempotency-Key": "k"}
    )
    assert retained_response.status == 400  # read to its end: it's no JSON


async def test_a_large_body_is_read_where_one_queue_has_room(
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Load(1, 5000, 100.0)
    monkeypatch.setattr(Load, "of", classmethod(lambda cls, those: full if those else cls()))
    monkeypatch.setattr(Fleet, "model_names", lambda self: ["fake", "other"])
    reply = await served.client.post("/v1/completions", parts=[b"{" + b" " * (1 << 20)])
    assert reply.status == 400


@pytest.mark.parametrize(
    ("headers", "fields", "status"),
    [
        ({"X-Request-Timeout": "1.5"}, {}, 503),
        ({"X-Request-Timeout": "1.5"}, {"stream": True}, 503),
        ({"X-Request-Timeout": "3"}, {}, 200),
        ({"x-stainless-read-timeout": "1.5"}, {}, 503),
        ({"x-stainless-read-timeout": "1.5"}, {"stream": True}, 200),
        ({"x-stainless-read-timeout": "not a number"}, {}, 200),
        ({"X-Request-Timeout": "-1"}, {}, 400),
        ({"X-Request-Timeout": "nan"}, {}, 400),
    ],
)
async def test_whose_turn_comes_too_late_is_refused_at_once(
    served: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    fields: dict[str, Any],
    status: int,
) -> None:
    monkeypatch.setattr(Load, "of", classmethod(lambda cls, replicas: Load(1, 200, 100.0)))
    body = chat_body(**fields)
    reply = await served.client.post("/v1/chat/completions", body, headers=headers)
    assert reply.status == status
    if status == 503:
        assert reply.error["code"] == "overloaded"
        assert float(reply.headers["retry-after-ms"]) == 1000
    if status == 400:
        assert reply.error["param"] == "X-Request-Timeout"
