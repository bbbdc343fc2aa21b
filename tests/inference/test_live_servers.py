"""The gateway under uvicorn, granian and daphne, asked by the real `openai` SDK."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
from openai import AsyncOpenAI, OpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from engine.contract import redis_keys
from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer
from tests.inference import live
from tests.inference.conftest import HIGH, LOW, generated_tokens
from tests.waiting import free_port

pytestmark = pytest.mark.system

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def installation(short_tmp: Path) -> Iterator[live.Instance]:
    """One installation with a fake replica, for all servers."""
    flags = ["--token-delay", "0.002", "--low", str(LOW), "--high", str(HIGH)]
    folder = short_tmp / "live"
    folder.mkdir()
    with (
        live.instance(folder) as of,
        live.replica(of, "tests.fakes.fake_replica", *flags, "--vocab-size", "512"),
    ):
        yield of


@pytest.fixture(scope="module")
def ports(installation: live.Instance) -> Iterator[dict[str, int]]:
    """All three servers, side by side: three gateways of one installation."""
    with ExitStack() as stack:
        ports = {}
        for server in ("uvicorn", "granian", "daphne"):
            ports[server] = free_port()
            command = live.server_command(server, ports[server])
            stack.enter_context(live.process(command, installation.environment))
        for port in ports.values():
            live.wait_until_healthy(port)
        yield ports


@pytest.fixture
def client(installation: live.Instance, ports: dict[str, int]) -> Iterator[OpenAI]:
    """The SDK before uvicorn."""
    with sdk(installation, ports["uvicorn"]) as client:
        yield client


def sdk(of: live.Instance, port: int, key: str | None = None) -> OpenAI:
    url = f"http://127.0.0.1:{port}/v1"
    return OpenAI(base_url=url, api_key=key or of.key, max_retries=0, timeout=60)


def expected(tokenizer: Tokenizer, count: int, index: int = 0) -> str:
    return tokenizer.decode(generated_tokens(render_chat(tokenizer, HELLO), count, index))


# -- the SDK ------------------------------------------------------------------------------------


def test_whole_answers(client: OpenAI, tokenizer: Tokenizer) -> None:
    chat = client.chat.completions.create(model="m", messages=HELLO, max_tokens=12, n=2)
    assert [c.message.content for c in chat.choices] == [
        expected(tokenizer, 12, index) for index in range(2)
    ]
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 24
    assert chat.usage.prompt_tokens_details is not None
    assert chat._request_id is not None
    assert chat._request_id.startswith("req-")
    assert client.models.list().data[0].id == "m"
    assert client.models.retrieve("m").id == "m"


def test_streams(client: OpenAI, tokenizer: Tokenizer) -> None:
    stream = client.chat.completions.create(
        model="m",
        messages=HELLO,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected(tokenizer, 12)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_stop_and_log_probabilities(client: OpenAI, tokenizer: Tokenizer) -> None:
    text = expected(tokenizer, 40)
    stop = text[20:23]
    chat = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=40, stop=[stop], logprobs=True, top_logprobs=2
    )
    (choice,) = chat.choices
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == text.index(stop)
    assert len(choice.logprobs.content[0].top_logprobs) == 2


def test_completions_of_token_ids(client: OpenAI, tokenizer: Tokenizer) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    done = client.completions.create(model="m", prompt=prompts, max_tokens=6, logprobs=1)
    assert [c.text for c in done.choices] == [
        tokenizer.decode(generated_tokens(prompt, 6)) for prompt in prompts
    ]
    assert done.choices[0].logprobs is not None
    assert done.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    echoed = client.completions.create(model="m", prompt="the", max_tokens=2, echo=True)
    assert echoed.choices[0].text.startswith("the")
    extra = client.completions.create(
        model="m", prompt="x", max_tokens=3, extra_body={"top_k": 5, "min_tokens": 1}
    )
    assert extra.usage is not None
    assert extra.usage.completion_tokens == 3


async def test_the_asynchronous_client(
    installation: live.Instance, ports: dict[str, int], tokenizer: Tokenizer
) -> None:
    url = f"http://127.0.0.1:{ports['uvicorn']}/v1"
    async with AsyncOpenAI(base_url=url, api_key=installation.key, max_retries=0) as client:
        chat = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=9)
        assert chat.choices[0].message.content == expected(tokenizer, 9)
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=9, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == expected(tokenizer, 9)


def test_error_classes(installation: live.Instance, ports: dict[str, int]) -> None:
    port = ports["uvicorn"]
    with sdk(installation, port) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="nothing", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="m", messages=HELLO, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", messages=HELLO, stream=True, n=0)
    with sdk(installation, port, "sk-quire-wrong") as client:
        with pytest.raises(openai.AuthenticationError) as unknown:
            client.models.list()
        assert unknown.value.code == "invalid_api_key"
    with sdk(installation, port, installation.limited) as client:
        client.completions.create(model="m", prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as limited:
            client.completions.create(model="m", prompt="x", max_tokens=1)
        assert float(limited.value.response.headers["retry-after"]) >= 1


# -- every server -------------------------------------------------------------------------------

SERVERS = pytest.mark.parametrize("server", ["uvicorn", "granian", "daphne"])


@SERVERS
def test_every_server_answers_and_streams(
    installation: live.Instance, ports: dict[str, int], tokenizer: Tokenizer, server: str
) -> None:
    with sdk(installation, ports[server]) as client:
        chat = client.chat.completions.create(model="m", messages=HELLO, max_tokens=8)
        assert chat.choices[0].message.content == expected(tokenizer, 8)
        stream = client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=200, stream=True
        )
        started, first = time.monotonic(), 0.0
        parts = []
        for chunk in stream:
            first = first or time.monotonic() - started
            parts.append(chunk.choices[0].delta.content or "")
        assert "".join(parts) == expected(tokenizer, 200)
        assert len(parts) > 10, "it came in pieces"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", messages=HELLO, n=0)


@SERVERS
def test_every_server_aborts_what_its_client_leaves(
    installation: live.Instance, ports: dict[str, int], server: str
) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, "max_tokens": 2000, "stream": True})
    with socket.create_connection(("127.0.0.1", ports[server])) as raw:
        raw.sendall(_http(installation.key, body.encode()))
        assert b"200" in raw.recv(4096)
        wait_until_running(installation, 1)
    wait_until_running(installation, 0)


@SERVERS
def test_fault_01_every_server_refuses_fifty_megabytes(
    installation: live.Instance, ports: dict[str, int], server: str
) -> None:
    with socket.create_connection(("127.0.0.1", ports[server]), timeout=60) as raw:
        # Daphne passes a request on when it has all of it; the others ask as it comes in.
        body = b" " * (11 << 20) if server == "daphne" else b""
        raw.sendall(_http(installation.key, body, length=len(body) or 50 << 20))
        answer = raw.recv(65536)
    assert b" 413 " in answer.split(b"\r\n")[0], answer


#: A user of the tenant, and the key of a session of theirs.
_LOG_IN = """
import django
django.setup()
from importlib import import_module
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, Tenant, User
tenant = Tenant.objects.get(name="Live")
user = User.objects.create_user("ada", "ada@example.org", "a quiet page of ink")
actions.add_member(actor=SYSTEM_ACTOR, tenant=tenant, user=user, role=Role.OWNER)
store = import_module(settings.SESSION_ENGINE).SessionStore()
store[SESSION_KEY] = str(user.pk)
store[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
store[HASH_SESSION_KEY] = user.get_session_auth_hash()
store.create()
print(f"{settings.SESSION_COOKIE_NAME}={store.session_key} {tenant.slug}")
"""


@pytest.fixture(scope="module")
def session(installation: live.Instance) -> tuple[str, str]:
    """A cookie, and the slug of its person's tenant."""
    cookie, slug = live_output(installation, _LOG_IN).split()
    return cookie, slug


def page_socket(port: int, path: str, cookie: str) -> ClientConnection:
    return connect(
        f"ws://127.0.0.1:{port}{path}",
        origin=Origin(f"http://127.0.0.1:{port}"),
        additional_headers={"Cookie": cookie},
    )


def frames(page: ClientConnection) -> Iterator[dict[str, Any]]:
    while True:
        yield json.loads(page.recv(timeout=60))


@pytest.mark.parametrize("server", ["uvicorn", "daphne"])
def test_both_supported_servers_carry_the_sockets_of_pages(
    ports: dict[str, int], session: tuple[str, str], server: str
) -> None:
    port, (cookie, slug) = ports[server], session
    with page_socket(port, "/ws/console/", cookie) as page:
        page.send(json.dumps({"type": "want", "topics": [["now", slug]]}))
        frame = next(frames(page))
        assert (frame["type"], frame["topic"]) == ("data", "now")
        assert [model["id"] for model in frame["data"]["models"]] == ["m"]
    with page_socket(port, "/ws/playground/", cookie) as page:
        page.send(json.dumps({"type": "generate", "id": "a", "model": "m", "messages": HELLO,
                              "sampling": {"max_tokens": 5}}))  # fmt: skip
        kinds = []
        for frame in frames(page):
            kinds.append(frame["type"])
            if frame["type"] in ("done", "error"):
                break
        assert (kinds[0], kinds[-1]) == ("start", "done")
    with page_socket(port, "/ws/kv/", cookie) as page:
        page.send(json.dumps({"replica": "nonsense", "tenant": slug}))
        with pytest.raises(ConnectionClosed) as closed:
            page.recv(timeout=60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4404
    with page_socket(port, "/ws/console/", "") as page, pytest.raises(ConnectionClosed) as closed:
        page.recv(timeout=60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4401


def test_runserver_is_a_gateway_with_sockets_and_static_files(
    short_tmp: Path, tokenizer: Tokenizer
) -> None:
    """`make dev`, without any other gateway: usage gets into the ledger, too."""
    folder, port = short_tmp / "dev", free_port()
    folder.mkdir()
    count = (
        "import django; django.setup(); from metering.models import UsageEntry; "
        "print(UsageEntry.objects.count())"
    )
    with live.instance(folder) as of, live.replica(of, "tests.fakes.fake_replica"):
        of.environment["QUIRE_DEBUG"] = "1"
        command = [sys.executable, "manage.py", "runserver", f"127.0.0.1:{port}", "--noreload"]
        with live.process(command, of.environment):
            live.wait_until_healthy(port)
            style = f"http://127.0.0.1:{port}/static/console/css/page.css"
            with urllib.request.urlopen(style, timeout=60) as reply:
                assert reply.headers["content-type"].startswith("text/css")
            with sdk(of, port) as client:
                client.chat.completions.create(model="m", messages=HELLO, max_tokens=8)
            deadline = time.monotonic() + 60
            while live_output(of, count) != "1":
                assert time.monotonic() < deadline, "no usage in the ledger"


def live_output(of: live.Instance, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=of.environment, cwd=live.ROOT, check=True, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return done.stdout.strip()


def _http(key: str, body: bytes, length: int | None = None) -> bytes:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def wait_until_running(of: live.Instance, count: int) -> None:
    """Wait until the replica's heartbeat says that it runs so many requests."""
    from engine.contract import messages as protocol

    deadline = time.monotonic() + 60
    with redis.Redis.from_url(of.redis_url) as client:
        (name,) = client.smembers(redis_keys.replicas_key())
        while True:
            beat = client.get(redis_keys.replica_key(name.decode()))
            assert beat is not None
            running = protocol.decode_heartbeat(beat).stats.num_requests_running
            if running == count:
                return
            assert time.monotonic() < deadline, f"it runs {running} requests"
            time.sleep(0.05)


@pytest.mark.parametrize(("server", "status"), [("uvicorn", 404), ("daphne", 403)])
def test_a_websocket_to_a_path_that_is_not_there_is_refused(
    installation: live.Instance, ports: dict[str, int], server: str, status: int
) -> None:
    """daphne has no way to say another status."""
    url = f"ws://127.0.0.1:{ports[server]}"
    for path in ("/nowhere", "/v1/completions", "/"):
        with pytest.raises(InvalidStatus) as refused, connect(url + path, origin=Origin(url)):
            pass
        assert refused.value.response.status_code == status, path


def test_fault_94_a_stream_for_a_client_of_http_1_0_ends_with_the_connection(
    installation: live.Instance, ports: dict[str, int]
) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, "stream": True, "max_tokens": 5}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n"
        f"Authorization: Bearer {installation.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    for server in ("uvicorn", "daphne"):
        answer = b""
        with socket.create_connection(("127.0.0.1", ports[server]), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            while data := connection.recv(65536):
                answer += data
        headers, _, events = answer.partition(b"\r\n\r\n")
        assert headers.split()[1] == b"200", server
        assert b"chunked" not in headers.lower(), server
        lines = [line for line in events.decode().splitlines() if line]
        assert all(line.startswith(("data: ", "id: ", ":")) for line in lines), server
        assert lines[-1] == "data: [DONE]", server
