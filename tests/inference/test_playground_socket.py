"""The playground's WebSocket: who gets in, what it says, when it's closed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import pytest
from asgiref.sync import sync_to_async
from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from channels.testing import WebsocketCommunicator
from django.conf import settings as django_settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY

from engine.text.tokenizer import Tokenizer
from inference.engine_client.client import get_engine_client
from inference.generation.generation import Generation
from inference.playground import _tokens_per_s
from inference.routing import websocket_urlpatterns
from inference.web.session_consumer import SessionConsumer
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, User
from tests.inference.conftest import Gateway, until
from tests.inference.scripted import byte_by_byte, says

APP = AuthMiddlewareStack(URLRouter(websocket_urlpatterns))
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def session_key(rows: Any) -> str:
    """A logged-in member of the tenant."""
    user = User.objects.create(username="ada")
    actions.add_member(actor=SYSTEM_ACTOR, tenant=rows.tenant, user=user, role=Role.MEMBER)
    store = import_module(django_settings.SESSION_ENGINE).SessionStore()
    store[SESSION_KEY] = str(user.pk)
    store[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    store[HASH_SESSION_KEY] = user.get_session_auth_hash()
    store.create()
    return str(store.session_key)


def headers(
    session: str | None, origin: str | None = "http://localhost:8000", host: str = "localhost:8000"
) -> list[tuple[bytes, bytes]]:
    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    if session:
        headers.append((b"cookie", f"{django_settings.SESSION_COOKIE_NAME}={session}".encode()))
    return headers


@asynccontextmanager
async def socket(session: str | None, **where: Any) -> AsyncIterator[WebsocketCommunicator]:
    communicator = WebsocketCommunicator(APP, "/ws/playground/", headers=headers(session, **where))
    accepted, _ = await communicator.connect(timeout=120)
    assert accepted
    yield communicator
    await communicator.disconnect(timeout=120)


async def closed_with(communicator: WebsocketCommunicator) -> int:
    while True:
        message = await communicator.receive_output(timeout=120)
        if message["type"] == "websocket.close":
            return int(message["code"])


async def frames_until(communicator: WebsocketCommunicator, *kinds: str) -> list[dict[str, Any]]:
    frames = []
    while not frames or frames[-1]["type"] not in kinds:
        frames.append(await communicator.receive_json_from(timeout=120))
    return frames


def generate(name: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"type": "generate", "id": name, "model": "fake", "messages": HELLO, **fields}


async def test_an_answer_waits_for_its_tenants_turn_to_be_rendered(
    gateway: Gateway, session_key: str, rendered_for: set[str]
) -> None:
    async with gateway.serving(gateway.fake(eos_after=5)), socket(session_key) as page:
        await page.send_json_to(generate())
        await frames_until(page, "done", "error")
    assert rendered_for == {gateway.rows.tenant.slug}


@pytest.mark.parametrize(("seconds", "rate"), [(0.002, 0.0), (2.0, 4.0)])
def test_an_answer_that_came_at_once_has_no_rate(
    monkeypatch: pytest.MonkeyPatch, seconds: float, rate: float
) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 10.0 + seconds)
    usage = SimpleNamespace(completion_tokens=9)
    generation = SimpleNamespace(usage=usage, first_token_at=10.0, resumed_from=None)
    assert _tokens_per_s(cast(Generation, generation)) == rate


async def test_an_answer_comes_in_frames(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str
) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, "Grüße 🙂"))
    async with gateway.serving(replica), socket(session_key) as page:
        await page.send_json_to({"type": "ping"})
        assert await page.receive_json_from() == {"type": "pong"}
        await page.send_json_to(generate(sampling={"temperature": 0.5, "max_tokens": 50}))
        start, *deltas, done = await frames_until(page, "done", "error")
    assert (start["type"], start["id"], start["model"]) == ("start", "c1", "fake")
    assert start["request_id"].startswith("chatcmpl-")
    assert {frame["type"] for frame in deltas} == {"delta"}
    assert "".join(frame["text"] for frame in deltas) == "Grüße 🙂"
    assert (done["type"], done["id"], done["finish_reason"]) == ("done", "c1", "stop")
    usage = done["usage"]
    assert usage["completion_tokens"] == len("Grüße 🙂".encode()) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert done["ttft_ms"] > 0
    assert done["tokens_per_s"] >= 0
    (record,) = await gateway.usage()
    assert (record.endpoint, record.key_id, record.stream) == ("playground", None, True)
    assert record.user_id is not None
    (request,) = replica.received
    assert (request.sampling.temperature, request.tenant) == (0.5, gateway.rows.tenant.slug)


async def test_reasoning_has_frames_of_its_own(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str
) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, "<think>Hm.</think>Yes."))
    replica.model.reasoning_parser = "qwen3"
    async with gateway.serving(replica), socket(session_key) as page:
        await page.send_json_to(generate())
        frames = await frames_until(page, "done")
    texts = {
        kind: "".join(frame["text"] for frame in frames if frame["type"] == kind)
        for kind in ("reasoning", "delta")
    }
    assert texts == {"reasoning": "Hm.", "delta": "Yes."}


async def test_stop_ends_an_answer_with_what_there_is(gateway: Gateway, session_key: str) -> None:
    replica = gateway.fake(token_delay=0.01)
    async with gateway.serving(replica), socket(session_key) as page:
        await page.send_json_to(generate(sampling={"max_tokens": 1000}))
        await frames_until(page, "delta")
        await page.send_json_to({"type": "stop", "id": "c1"})
        await page.send_json_to({"type": "stop", "id": "unknown"})
        done = (await frames_until(page, "done", "error"))[-1]
        assert (done["type"], done["finish_reason"]) == ("done", "stop")
        assert 0 < done["usage"]["completion_tokens"] < 1000
        await page.send_json_to({"type": "ping"})
        assert await page.receive_json_from() == {"type": "pong"}
        (record,) = await gateway.usage()
    assert record.status == 499
    assert record.completion_tokens >= done["usage"]["completion_tokens"]
    assert get_engine_client().flights == []


async def test_several_answers_run_at_a_time_by_id(gateway: Gateway, session_key: str) -> None:
    async with gateway.serving(gateway.fake(token_delay=0.005)), socket(session_key) as page:
        for name in ("a", "b", "c", "d"):
            await page.send_json_to(generate(name, sampling={"max_tokens": 30}))
        await page.send_json_to(generate("a"))
        await page.send_json_to(generate("e"))
        ends: dict[str, str] = {}
        errors = []
        while len(ends) < 4 or len(errors) < 2:
            frame = await page.receive_json_from(timeout=120)
            if frame["type"] == "done":
                ends[frame["id"]] = frame["finish_reason"]
            if frame["type"] == "error":
                errors.append((frame["id"], frame["error"]["param"]))
    assert ends == dict.fromkeys("abcd", "length")
    assert errors == [("a", "id"), ("e", "id")]


async def test_errors_are_frames_with_the_envelope(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str
) -> None:
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"model": "nothing"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"sampling": {"model": "other"}}, "model"),
        ({"sampling": {"stream": False}}, "stream"),
        ({"sampling": {"nonsense": 1}}, "nonsense"),
        ({"sampling": {"chat_template": "x"}}, "chat_template"),
    ]
    async with gateway.serving(gateway.scripted(says(tokenizer, "x"))), socket(session_key) as page:
        for fields, param in cases:
            await page.send_json_to(generate(**fields))
            frame = await page.receive_json_from()
            assert (frame["type"], frame["id"]) == ("error", "c1"), frame
            assert set(frame["error"]) == {"message", "type", "param", "code"}
            assert frame["error"]["param"] == param
        await page.send_json_to(generate())
        assert (await frames_until(page, "done", "error"))[-1]["type"] == "done"


async def test_without_a_session_the_socket_is_closed(gateway: Gateway) -> None:
    for session in (None, "nonsense", "x" * 1000):
        async with socket(session) as page:
            assert await closed_with(page) == 4401


async def test_fault_38_another_origin_is_refused(gateway: Gateway, session_key: str) -> None:
    for where in (
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:8001"},
        {"origin": "null"},
        {"origin": None},
        {"origin": "http://localhost:nonsense"},
        {"origin": "ftp://localhost:8000"},
        # A name that somebody bound to our address.
        {"origin": "http://evil.example:8000", "host": "evil.example:8000"},
    ):
        async with socket(session_key, **where) as page:
            assert await closed_with(page) == 4403, where
    for where in (
        {"origin": "http://127.0.0.1", "host": "127.0.0.1"},
        {"origin": "https://localhost", "host": "localhost:443"},
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
    ):
        async with socket(session_key, **where) as page:
            await page.send_json_to({"type": "ping"})
            assert (await page.receive_json_from())["type"] == "pong", where


async def test_fault_38_a_session_that_ends_closes_the_socket(
    gateway: Gateway, session_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.playground.RECHECK_SESSION_S", 0.0)

    @sync_to_async
    def log_out() -> None:
        import_module(django_settings.SESSION_ENGINE).SessionStore(session_key).delete()

    replica = gateway.fake(token_delay=0.01)
    async with gateway.serving(replica), socket(session_key) as page:
        await page.send_json_to(generate(sampling={"max_tokens": 1000}))
        await frames_until(page, "delta")
        await log_out()
        assert await closed_with(page) == 4401
    async with socket(session_key) as page:
        assert await closed_with(page) == 4401
    assert get_engine_client().flights == []


async def test_fault_38_a_user_who_is_switched_off_is_out(
    gateway: Gateway, session_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.playground.RECHECK_SESSION_S", 0.0)

    @sync_to_async
    def switch_off() -> None:
        User.objects.filter(username="ada").update(is_active=False)

    async with socket(session_key) as page:
        await switch_off()
        await page.send_json_to(generate())
        assert await closed_with(page) == 4401


async def test_fault_43_an_idle_socket_closes_when_its_users_sessions_are_ended(
    gateway: Gateway, session_key: str
) -> None:
    from tenants.actions import end_sessions

    async with socket(session_key) as page, socket(session_key) as other:
        await sync_to_async(lambda: end_sessions(User.objects.get(username="ada")))()
        for socket_page in (page, other):
            assert await closed_with(socket_page) == 4401


async def test_fault_43_a_demoted_members_answer_ends_in_the_middle(
    gateway: Gateway, session_key: str
) -> None:
    @sync_to_async
    def demote() -> None:
        (membership,) = gateway.rows.tenant.memberships.filter(user__username="ada")
        actions.change_role(actor=SYSTEM_ACTOR, membership=membership, role=Role.VIEWER)

    replica = gateway.fake(token_delay=0.01)
    async with gateway.serving(replica), socket(session_key) as page:
        await page.send_json_to(generate(sampling={"max_tokens": 1000}))
        await frames_until(page, "delta")
        await demote()
        assert await closed_with(page) == 4401
    assert get_engine_client().flights == []


async def test_what_is_no_message_is_refused_and_then_too_much(
    gateway: Gateway, session_key: str
) -> None:
    bad = ["nonsense", "[]", '{"type":"x"}', '{"type":"stop"}', '{"type":"generate","id":5}']
    async with socket(session_key) as page:
        for text in bad:
            await page.send_to(text_data=text)
        frames = [await page.receive_json_from() for _ in bad]
        assert {frame["type"] for frame in frames} == {"error"}
        assert await closed_with(page) == 4409
    for data in ({"text_data": "x" * (2 << 20)}, {"bytes_data": b"{}"}):
        async with socket(session_key) as page:
            await page.send_to(**data)
            assert await closed_with(page) == 4409


async def test_a_page_that_is_closed_aborts_its_answers(gateway: Gateway, session_key: str) -> None:
    replica = gateway.fake(token_delay=0.01)
    async with gateway.serving(replica):
        async with socket(session_key) as page:
            await page.send_json_to(generate("a", sampling={"max_tokens": 1000}))
            await page.send_json_to(generate("b", sampling={"max_tokens": 1000}))
            await frames_until(page, "delta")
            await until(lambda: len(replica.running) >= 2)
        await until(lambda: not replica.running)
        usage = await gateway.usage()
    assert [record.status for record in usage] == [499, 499]
    assert get_engine_client().flights == []


async def test_a_viewer_may_look_but_not_generate(gateway: Gateway, rows: Any) -> None:
    @sync_to_async
    def viewer() -> str:
        user = User.objects.create(username="vera")
        actions.add_member(actor=SYSTEM_ACTOR, tenant=rows.tenant, user=user, role=Role.VIEWER)
        store = import_module(django_settings.SESSION_ENGINE).SessionStore()
        store[SESSION_KEY] = str(user.pk)
        store[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
        store[HASH_SESSION_KEY] = user.get_session_auth_hash()
        store.create()
        return str(store.session_key)

    async with gateway.serving(gateway.fake()), socket(await viewer()) as page:
        await page.send_json_to(generate())
        frame = await page.receive_json_from()
    assert frame["error"]["type"] == "permission_error"
    assert "your role has" in frame["error"]["message"]


async def test_fault_26_idle_sockets_cost_no_work(gateway: Gateway, session_key: str) -> None:
    from contextlib import AsyncExitStack

    replica = gateway.fake()
    async with gateway.serving(replica), AsyncExitStack() as stack:
        initial_count = len(await gateway.redis.client_list())
        pages = [await stack.enter_async_context(socket(session_key)) for _ in range(100)]
        reply = await gateway.client.chat(max_tokens=5)
        assert reply.status == 200
        for page in pages[::20]:
            await page.send_json_to({"type": "ping"})
            assert await page.receive_json_from() == {"type": "pong"}
        after = len(await gateway.redis.client_list())
    assert after - initial_count < 10, "no connection a socket"


async def test_a_frame_chooses_among_the_users_tenants(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str
) -> None:
    @sync_to_async
    def join() -> None:
        other = actions.create_tenant(actor=SYSTEM_ACTOR, name="Other")
        user = User.objects.get(username="ada")
        actions.add_member(actor=SYSTEM_ACTOR, tenant=other, user=user, role=Role.MEMBER)

    await join()
    replica = gateway.scripted(byte_by_byte(tokenizer, "Yes"))
    async with gateway.serving(replica), socket(session_key) as page:
        for tenant in ("other", gateway.rows.tenant.slug, None):
            await page.send_json_to(generate(tenant=tenant))
            assert (await frames_until(page, "done", "error"))[-1]["type"] == "done"
    first = gateway.rows.tenant.slug
    assert [request.tenant for request in replica.received] == ["other", first, first]


async def test_fault_23_a_foreign_tenant_is_refused_and_the_socket_stays(
    gateway: Gateway, session_key: str
) -> None:
    @sync_to_async
    def receive_queued() -> None:
        actions.create_tenant(actor=SYSTEM_ACTOR, name="Foreign")

    await receive_queued()
    replica = gateway.fake()
    async with gateway.serving(replica), socket(session_key) as page:
        answers = []
        for tenant in ("foreign", "nowhere"):
            await page.send_json_to(generate(tenant=tenant))
            answers.append(await page.receive_json_from(timeout=120))
        for tenant in (5, "", "x" * 64):
            await page.send_json_to(generate(tenant=tenant))
            answer = await page.receive_json_from(timeout=120)
            assert answer["error"]["param"] == "tenant"
        await page.send_json_to({"type": "ping"})
        assert await page.receive_json_from() == {"type": "pong"}
    assert [(answer["type"], answer["id"]) for answer in answers] == [("error", "c1")] * 2
    assert answers[0]["error"] == answers[1]["error"]  # nothing tells which tenants there are
    assert replica.received == []


async def test_an_answer_goes_on_where_its_connection_broke(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str
) -> None:
    text = "one two three four five six seven eight nine ten"
    replica = gateway.scripted(byte_by_byte(tokenizer, text))
    replica.token_delay = 0.01
    async with gateway.serving(replica):
        async with socket(session_key) as page:
            await page.send_json_to(generate())
            first = await frames_until(page, "delta")
            first += await frames_until(page, "delta")
        first_text = "".join(frame["text"] for frame in first if frame["type"] == "delta")
        async with socket(session_key) as page:
            await page.send_json_to(generate(after=first[-1]["at"]))
            rest = await frames_until(page, "done", "error")
        assert rest[-1]["type"] == "done", rest[-1]
        assert rest[0]["request_id"] == first[0]["request_id"]
        rest_text = "".join(frame["text"] for frame in rest if frame["type"] == "delta")
        assert rest_text
        assert first_text + rest_text == text
        # Behind the last word there's nothing but the end.
        async with socket(session_key) as page:
            ends = [frame["at"] for frame in rest if "at" in frame]
            await page.send_json_to(generate(after=ends[-1]))
            again = await frames_until(page, "done", "error")
        assert [frame["type"] for frame in again] == ["start", "done"]
        assert again[-1]["finish_reason"] == "stop"
        # Another question isn't that stream's, and neither is what is no id.
        async with socket(session_key) as page:
            for after, param in ((ends[-1], "Last-Event-ID"), ("x", "Last-Event-ID"), (3, "after")):
                other = [{"role": "user", "content": "other"}]
                await page.send_json_to(generate(after=after, messages=other))
                frame = await page.receive_json_from(timeout=120)
                assert (frame["type"], frame["error"]["param"]) == ("error", param)


async def test_tools_schemas_and_probabilities_have_frames(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    replica = gateway.scripted(byte_by_byte(tokenizer, call))
    replica.model.tool_call_parser = "hermes"
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    async with gateway.serving(replica), socket(session_key) as page:
        await page.send_json_to(generate(tools=tools))
        frames = await frames_until(page, "done", "error")
        assert frames[-1]["finish_reason"] == "tool_calls", frames[-1]
        (started,) = [frame for frame in frames if frame["type"] == "call"]
        assert (started["name"], started["index"]) == ("weather", 0)
        arguments = "".join(f["text"] for f in frames if f["type"] == "arguments")
        assert arguments == '{"city": "Rome"}'
        await page.send_json_to(generate(response_format={"type": "nope"}))
        frame = (await frames_until(page, "done", "error"))[-1]
        assert (frame["type"], frame["error"]["type"]) == ("error", "invalid_request_error")
        sampling = {"logprobs": True, "top_logprobs": 2}
        await page.send_json_to(generate(sampling=sampling))
        frames = await frames_until(page, "done", "error")
        assert frames[-1]["type"] == "done", frames[-1]


async def test_a_page_is_told_that_its_answer_waits_for_an_engine(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str
) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, "and so on " * 40))
    replica.token_delay = 0.01
    async with gateway.serving(replica), socket(session_key) as page:
        await page.send_json_to(generate())
        await frames_until(page, "delta")
        client = get_engine_client()
        for flight in client.flights:
            client.fleet.mark_dead(flight.replica_id, flight.incarnation)
            client.unassign(flight, "its replica died")
        frames = await frames_until(page, "waiting", "done", "error")
        assert frames[-1]["type"] == "waiting", frames[-1]


@pytest.mark.django_db(transaction=True)  # Channels closes old connections, which others may leave
async def test_a_page_that_left_before_it_was_accepted_is_cleaned_up_after() -> None:
    closed = []

    class Consumer(SessionConsumer):
        async def on_close(self) -> None:
            closed.append(self)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        raise ConnectionResetError

    consumer = Consumer()
    with pytest.raises(ConnectionResetError):
        await consumer({"type": "websocket", "headers": []}, receive, send)
    assert closed == [consumer]
