"""The console's socket: who gets in, which topics they may have, and that what they lose ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from channels.testing import WebsocketCommunicator
from channels_redis.pubsub import RedisPubSubLoopLayer
from django.conf import settings as django_settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.utils import timezone

from common.messaging import broadcast
from console.live import consumer as live_consumer
from console.live.consumer import MAX_TOPICS, ConsoleConsumer
from console.live.hub import TOPICS, Audience, Leader, PermissionMonitor, Topic, leader
from console.routing import SOCKET_PATH, websocket_urlpatterns
from metering import request_log_writer
from metering.request_log import RequestTrace
from metering.usage_record import UsageRecord
from storage.actions import start_batch
from storage.models import Batch
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Membership, Role, Tenant, User
from tests.console.rows import make_rows

APP = AuthMiddlewareStack(URLRouter(websocket_urlpatterns))
pytestmark = pytest.mark.usefixtures("live_rows")


@pytest.fixture
def live_rows(
    committed: None, live_redis: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = settings.CHANNEL_LAYERS["default"]
    config = {**layer["CONFIG"], "hosts": [live_redis]}
    settings.CHANNEL_LAYERS = {"default": {**layer, "CONFIG": config}}
    settings.REDIS_URL = live_redis
    make_rows()
    viewer = User.objects.create_user("vera", "vera@example.org", "a quiet page of ink")
    acme = Tenant.objects.get(slug="acme")
    actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=viewer, role=Role.VIEWER)
    monkeypatch.setitem(TOPICS, "spoken", Topic("spoken", Audience.TENANT))
    monkeypatch.setitem(TOPICS, "inside", Topic("inside", Audience.OPERATORS))


def session_of(name: str) -> str:
    user = User.objects.get(username=name)
    store = import_module(django_settings.SESSION_ENGINE).SessionStore()
    store[SESSION_KEY] = str(user.pk)
    store[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    store[HASH_SESSION_KEY] = user.get_session_auth_hash()
    store.create()
    return str(store.session_key)


@asynccontextmanager
async def socket(
    name: str | None, origin: str = "http://localhost:8000"
) -> AsyncIterator[WebsocketCommunicator]:
    headers = [(b"host", b"localhost:8000"), (b"origin", origin.encode())]
    if name is not None:
        session = await sync_to_async(session_of)(name)
        cookie = f"{django_settings.SESSION_COOKIE_NAME}={session}"
        headers.append((b"cookie", cookie.encode()))
    page = WebsocketCommunicator(APP, SOCKET_PATH, headers=headers)
    accepted, _ = await page.connect(timeout=60)
    assert accepted
    yield page
    await page.disconnect(timeout=60)


async def closed_with(page: WebsocketCommunicator) -> int:
    while True:
        message = await page.receive_output(timeout=60)
        if message["type"] == "websocket.close":
            return int(message["code"])


async def want(page: WebsocketCommunicator, *topics: list[str | None]) -> list[dict[str, Any]]:
    """Subscribe, and read what is so now; all else that comes until then."""
    await page.send_json_to({"type": "want", "topics": list(topics)})
    await page.send_json_to({"type": "ping"})
    other_frames: list[dict[str, Any]] = []
    num_answered, answered = 0, False
    while not answered or num_answered < len(topics):
        frame = await page.receive_json_from(timeout=60)
        if frame["type"] == "pong":
            answered = True
            continue
        num_answered += 1
        if frame["type"] != "data":
            other_frames.append(frame)
    return other_frames


async def send_frame(
    page: WebsocketCommunicator, tenant: str, data: dict[str, Any]
) -> dict[str, Any]:
    """Publish until it comes: joining a group takes the layer a moment."""
    pk = (await Tenant.objects.aget(slug=tenant)).pk
    for _ in range(50):
        await broadcast("spoken", data, tenant_id=pk)
        if not await page.receive_nothing(timeout=0.1):
            return dict(await page.receive_json_from())
    raise AssertionError("Nothing came.")


async def test_nobody_is_let_in() -> None:
    async with socket(None) as page:
        assert await closed_with(page) == 4401


async def test_fault_38_a_page_of_another_origin_is_refused() -> None:
    async with socket("ada", "https://evil.example") as page:
        assert await closed_with(page) == 4403


@pytest.mark.parametrize("name", ["ada", "vera"])
async def test_members_hear_their_tenant_and_no_other(name: str) -> None:
    async with socket(name) as page:
        assert await want(page, ["spoken", "acme"]) == []
        rival = (await Tenant.objects.aget(slug="rival")).pk
        await broadcast("spoken", {"of": "rival"}, tenant_id=rival)
        frame = await send_frame(page, "acme", {"of": "acme"})
        data = {"of": "acme"}
        assert frame == {"type": "data", "topic": "spoken", "tenant": "acme", "data": data}


@pytest.mark.parametrize(
    ("name", "topic", "code"),
    [
        ("ada", ["spoken", "rival"], "not_found"),
        ("nobody", ["spoken", "acme"], "not_found"),
        ("ada", ["spoken", None], "permission_denied"),
        ("ada", ["inside", None], "permission_denied"),
        ("root", ["nonsense", None], "not_found"),
    ],
)
async def test_fault_23_what_is_not_ones_own_is_refused_and_the_socket_stays(
    name: str, topic: list[str | None], code: str
) -> None:
    async with socket(name) as page:
        (refused,) = await want(page, topic)
        assert (refused["type"], refused["topic"]) == ("refused", topic[0])
        assert refused["error"]["code"] == code
        assert leader._sockets == {}


async def test_operators_hear_all_tenants_at_once() -> None:
    async with socket("root") as page:
        await want(page, ["spoken", None])
        assert (await send_frame(page, "rival", {"n": 1}))["data"] == {"n": 1}


async def test_what_is_so_now_comes_at_once_and_one_task_reads_it_for_all_who_look() -> None:
    async with socket("ada") as one, socket("vera") as two:
        await one.send_json_to({"type": "want", "topics": [["now", "acme"]]})
        data = (await one.receive_json_from(timeout=60))["data"]
        assert "acme-private" in {model["id"] for model in data["models"]}
        assert "rival-private" not in str(data)
        await two.send_json_to({"type": "want", "topics": [["now", "acme"]]})
        assert (await two.receive_json_from(timeout=60))["data"]["models"] == data["models"]
        assert len(leader._tasks) == 1
    assert leader._tasks == {}


async def test_of_several_gateways_one_reads_a_topic_and_all_hear_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = Topic("counted", Audience.TENANT, "tests.console.test_live.count", 0.05)
    monkeypatch.setitem(TOPICS, "counted", topic)
    reads.clear()
    key = ("counted", (await Tenant.objects.aget(slug="acme")).pk)
    leaders = [Leader(), Leader()]
    async with socket("ada") as page:
        await page.send_json_to({"type": "want", "topics": [["counted", "acme"]]})
        for other in leaders:
            other.add(topic, key, page)
        numbers = [(await page.receive_json_from(timeout=60))["data"]["number"] for _ in range(10)]
        for other in leaders:
            other.remove(key, page)
    # Each read was heard once: three that read would have sent more than was read by one.
    assert numbers == list(range(1, 11))


reads: list[int] = []


def count(tenant_id: int) -> dict[str, int]:
    """The topic `counted`: how often it was read."""
    reads.append(tenant_id)
    return {"number": len(reads)}


async def test_pages_are_told_of_requests_and_batches_that_change_and_ask_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tenant = await Tenant.objects.aget(slug="acme")
    async with socket("ada") as page:
        await want(page, ["batches", "acme"], ["requests", "acme"])
        batch = await sync_to_async(Batch.objects.create)(
            public_id="batch_1", tenant=tenant, input_file_id="f", endpoint="/v1/completions",
            completion_window="24h", expires_at=timezone.now(),
        )  # fmt: skip
        await sync_to_async(start_batch)(row=batch, total=3)
        frame = await page.receive_json_from(timeout=60)
        assert (frame["topic"], frame["tenant"], frame["data"]) == ("batches", "acme", {})
        record = UsageRecord(
            request_id="r1", tenant_id=tenant.pk, key_id=None, endpoint="chat", model="m",
            prompt_tokens=1, cached_tokens=0, completion_tokens=1, finish_reason="stop",
            status=200, started_at=1_700_000_000.0, ttft_ms=1.0, duration_ms=2.0, stream=False,
        )  # fmt: skip
        monkeypatch.setattr(request_log_writer, "_waiting", deque())
        request_log_writer.log_request(record, RequestTrace())
        await sync_to_async(request_log_writer.write_waiting)()
        frame = await page.receive_json_from(timeout=60)
        assert (frame["topic"], frame["data"]) == ("requests", {"newest": 1_700_000_000.0})


async def test_while_the_layer_is_down_pages_get_what_is_so_now_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_consumer, "CHECK_LAYER_S", 0.05)
    topic = Topic("counted", Audience.TENANT, "tests.console.test_live.count")
    monkeypatch.setitem(TOPICS, "counted", topic)
    async with socket("ada") as page:
        await want(page, ["counted", "acme"])
        assert await page.receive_nothing(timeout=0.5)  # nobody reads it again

        async def fail(*_: Any) -> None:
            raise ConnectionError("Redis is away")

        with monkeypatch.context() as broken:
            broken.setattr(RedisPubSubLoopLayer, "send", fail)
            first = await page.receive_json_from(timeout=60)
            second = await page.receive_json_from(timeout=60)
            assert second["data"]["number"] > first["data"]["number"]
        while not await page.receive_nothing(timeout=0.5):  # and once more when it's back
            await page.receive_json_from(timeout=60)


async def test_fault_43_a_deactivated_persons_socket_ends() -> None:
    async with socket("ada") as page:
        await want(page, ["spoken", "acme"])
        await User.objects.filter(username="ada").aupdate(is_active=False)
        assert await closed_with(page) == 4401


async def test_fault_43_who_leaves_a_tenant_hears_it_no_more() -> None:
    tenant, olga = await Tenant.objects.aget(slug="acme"), await User.objects.aget(username="olga")
    await Membership.objects.acreate(tenant=tenant, user=olga, role=Role.OWNER)
    async with socket("ada") as page:
        await want(page, ["spoken", "acme"])
        await Membership.objects.filter(user__username="ada").adelete()
        assert await closed_with(page) == 4401
    assert leader._sockets == {}


async def test_fault_43_an_operator_who_is_one_no_more_sees_all_no_more() -> None:
    async with socket("root") as page:
        await want(page, ["spoken", None])
        await User.objects.filter(username="root").aupdate(is_superuser=False)
        assert await closed_with(page) == 4401


@pytest.mark.parametrize(
    "topics", ["all", [["now"]], [["now", 1]], [[None, "acme"]], [["now", "a"]] * (MAX_TOPICS + 1)]
)
async def test_what_is_no_wish_is_refused(topics: Any) -> None:
    async with socket("ada") as page:
        await page.send_json_to({"type": "want", "topics": topics})
        frame = await page.receive_json_from(timeout=60)
        assert (frame["type"], frame["error"]["param"]) == ("error", "topics")


async def test_fault_26_a_reader_that_stands_still_holds_the_newest_alone() -> None:
    consumer = ConsoleConsumer()
    consumer._names = {("spoken", 1): ["acme"]}
    for number in range(10_000):
        consumer._store_pending(("spoken", 1), {"n": number})
    assert consumer._pending == {("spoken", 1): {"n": 9_999}}


async def test_who_comes_while_rights_are_looked_at_ends_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, lost, later = PermissionMonitor(), asyncio.Event(), asyncio.Event()

    async def lose() -> None:
        lost.set()

    async def lose_later() -> None:
        later.set()

    def find_tenants(users: set[int]) -> dict[int, set[int]]:
        watch._watched[lose_later] = (2, {7})  # as `watch` does in the loop
        return {user: set() for user in users}

    monkeypatch.setattr("console.live.hub._allowed_tenants", find_tenants)
    monkeypatch.setattr("console.live.hub.POLL_INTERVAL_S", 0.01)
    watch.watch(lose, 1, {7})
    await asyncio.wait_for(lost.wait(), 60)
    await asyncio.wait_for(later.wait(), 60)  # at the next look
