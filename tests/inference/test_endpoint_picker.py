"""The endpoint picker: which pod, over Envoy's external processing, with several pickers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis
from django.core.management import CommandError, call_command

from catalog.processes import ManagedProcess, spawn
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.lora import AdapterStatus
from engine.contract.messages import EngineStats, Heartbeat, ModelInfo
from inference.endpoint_picker.messages import (
    BUFFERED,
    HEALTH_CHECK,
    PROCESS,
    SERVICE_UNKNOWN,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from inference.endpoint_picker.picker import EndpointPicker
from inference.endpoint_picker.processor import DESTINATION, RequestProcessor
from inference.endpoint_picker.request import RequestFacts
from tests.deploy.containers import clean
from tests.deploy.variables import ROOT
from tests.platform.instance import internal
from tests.waiting import free_port

DEADLINE_S = 60.0
#: As Envoy's own classes write them: headers of a POST, with a subset of the endpoints and the mode
#: FULL_DUPLEX_STREAMED; a body in two parts; what the picker answers.
HEADERS = bytes.fromhex(
    "12480a460a0f0a073a6d6574686f641a04504f53540a180a053a706174681a0f2f76312f636f6d706c6574696f6e73"
    "0a190a0d617574686f72697a6174696f6e1a08426561726572206b42580a560a14656e766f792e6c622e7375627365"
    "745f68696e74123e0a3c0a25782d676174657761792d64657374696e6174696f6e2d656e64706f696e742d73756273"
    "6574121332110a0f1a0d31302e302e302e323a383030305a0408041004"
)
BODY = [
    bytes.fromhex("22110a0f7b226d6f64656c223a20226d222c20"),
    bytes.fromhex("22150a112270726f6d7074223a20224f6e6365227d1001"),
]
ANSWERS = [
    bytes.fromhex(
        "0a3b0a3912350a330a2f0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741a0d31"
        "302e302e302e323a383030301802280142430a410a08656e766f792e6c6212352a330a310a1e782d6761746577"
        "61792d64657374696e6174696f6e2d656e64706f696e74120f1a0d31302e302e302e323a38303030"
    ),
    bytes.fromhex("1a170a151a131a110a0f7b226d6f64656c223a20226d222c20"),
    bytes.fromhex("1a1b0a191a171a150a112270726f6d7074223a20224f6e6365227d1001"),
]


def beat(name: str, endpoint: str, *, model: str = "m", **fields: Any) -> Heartbeat:
    info = ModelInfo(name=model, path="", max_model_len=10, vocab_size=10, dtype="float32")
    return Heartbeat(
        replica_id=name,
        incarnation=name,
        model=info,
        at=time.time(),
        progress_at=time.time(),
        endpoint=endpoint,
        **({"state": "ready"} | fields),
    )


def picker_of(*beats: Heartbeat, gateways: tuple[str, ...] = ()) -> EndpointPicker:
    picker = EndpointPicker("")
    picker._gateways = list(gateways)
    values: dict[str, bytes | None] = {one.replica_id: protocol.encode(one) for one in beats}
    picker._fleet.update(values, time.monotonic())
    return picker


def facts(model: str = "m", prompt: str = "Once", **fields: Any) -> RequestFacts:
    body = json.dumps({"model": model, "prompt": prompt}).encode()
    return RequestFacts.from_http({"authorization": "Bearer k"}, body, fields.get("subset"))


async def answers_of(picker: EndpointPicker, *messages: Any, limit: int = 1000) -> list[Any]:
    async def stream() -> AsyncIterator[Any]:
        for message in messages:
            yield message

    return [answer async for answer in RequestProcessor(picker, limit).run(stream())]


async def test_envoys_bytes_are_read_and_answered_as_envoy_reads_them() -> None:
    """In full duplex: the headers with the endpoint come first, then the body as it was sent."""
    picker = picker_of(beat("a", "10.0.0.1:8000"), beat("b", "10.0.0.2:8000"))
    sent = [ProcessingRequest.FromString(part) for part in (HEADERS, *BODY)]
    answers = await answers_of(picker, *sent)
    assert answers == [ProcessingResponse.FromString(part) for part in ANSWERS]


async def test_a_buffered_body_is_answered_with_the_endpoint() -> None:
    headers = ProcessingRequest(request_headers={}, protocol_config={"request_body_mode": BUFFERED})
    body = ProcessingRequest(request_body={"body": b'{"model": "m"}', "end_of_stream": True})
    go_on, answer = await answers_of(picker_of(beat("a", "10.0.0.1:8000")), headers, body)
    assert go_on == ProcessingResponse(request_headers={})
    (option,) = answer.request_body.response.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == (DESTINATION, b"10.0.0.1:8000")
    assert not answer.request_body.response.HasField("body_mutation")


async def test_trailers_end_a_body() -> None:
    parts = [
        ProcessingRequest(request_headers={}),
        ProcessingRequest(request_body={"body": b'{"model": "m"}'}),
        ProcessingRequest(request_trailers={}),
    ]
    headers, body, trailers = await answers_of(picker_of(beat("a", "10.0.0.1:8000")), *parts)
    assert headers.request_headers.response.clear_route_cache
    streamed = body.request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b'{"model": "m"}', False)
    assert trailers.HasField("request_trailers")


async def test_a_request_without_a_body_goes_to_a_gateway() -> None:
    headers = ProcessingRequest(request_headers={"end_of_stream": True})
    (answer,) = await answers_of(picker_of(gateways=("10.0.0.9:8000",)), headers)
    assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == "10.0.0.9:8000"


@pytest.mark.parametrize(
    ("picker", "size", "status"),
    [
        (lambda: picker_of(), 10, 503),
        (lambda: picker_of(beat("a", "10.0.0.9:8000")), 10, 503),
        (lambda: picker_of(beat("a", "10.0.0.2:8000")), 2000, 413),
    ],
)
async def test_what_nobody_can_take_is_refused(picker: Any, size: int, status: int) -> None:
    body = ProcessingRequest(request_body={"body": b" " * size, "end_of_stream": True})
    sent = [ProcessingRequest.FromString(HEADERS), body]
    (answer,) = await answers_of(picker(), *sent)
    assert answer.immediate_response.status.code == status
    assert json.loads(answer.immediate_response.body)["error"]["message"]


def test_a_prefix_stays_with_a_replica_until_that_is_busier() -> None:
    names = ("a", "b", "c")
    endpoints = {name: f"10.0.0.{number}:8000" for number, name in enumerate(names, 1)}
    picker = picker_of(*(beat(name, endpoints[name]) for name in names))
    first = picker.pick(facts())
    assert all(picker.pick(facts()) == first for _ in range(5))
    homes = {tuple(picker.pick(facts(prompt=f"{number} tales"))) for number in range(40)}
    assert homes == {(endpoint,) for endpoint in endpoints.values()}
    busy = {
        name: EngineStats(num_requests_running=20 if [endpoints[name]] == first else 0)
        for name in names
    }
    picker = picker_of(*(beat(name, endpoints[name], stats=busy[name]) for name in names))
    assert picker.pick(facts()) != first


def test_gateways_get_what_no_replica_is_ready_for() -> None:
    gateways = ("10.0.1.1:8000", "10.0.1.2:8000", "10.0.1.3:8000")
    picker = picker_of(
        beat("a", "10.0.0.1:8000"),
        beat("b", "10.0.0.2:8000", model="loading", state="loading"),
        beat("c", "", model="elsewhere"),
        gateways=gateways,
    )
    chosen = picker.pick(facts())
    assert chosen[0] == "10.0.0.1:8000"
    assert set(chosen[1:]) < set(gateways)
    for model in ("loading", "elsewhere", "unknown", ""):
        assert set(picker.pick(facts(model))) == set(gateways)
    assert picker.pick(facts(subset=["10.0.1.2:8000"])) == ["10.0.1.2:8000"]
    deep = b'{"messages": ' + b"[" * 100_000
    for body in (b"", b"[]", b"\xff", b'{"model": "\xff"}', b'{"model": 5}', deep):
        assert set(picker.pick(RequestFacts.from_http({}, body, None))) == set(gateways)


def test_an_adapters_requests_go_where_its_weights_are() -> None:
    loaded = [AdapterStatus(digest="1" * 64, name="tales", tier="device")]
    adapters = [AdapterStatus(digest="1" * 64, name="tales", tier="disk")]
    picker = picker_of(
        *(beat(name, f"10.0.0.{name}:8000", adapters=adapters) for name in "123"),
        beat("4", "10.0.0.4:8000", adapters=loaded),
    )
    for number in range(5):
        assert picker.pick(facts("tales", f"{number}")) == ["10.0.0.4:8000"]


def test_prompts_of_chats_and_of_keys_are_told_apart() -> None:
    def key(fields: dict[str, Any], client: str = "k") -> bytes:
        body = json.dumps({"model": "m", **fields}).encode()
        return RequestFacts.from_http({"authorization": client}, body, None).prefix_key

    system = {"role": "system", "content": "You tell tales. " * 30}
    asked = [key({"messages": [system, {"role": "user", "content": word}]}) for word in "ab"]
    assert asked[0] == asked[1]
    other_picks = [
        key({"messages": [{"role": "user", "content": "a"}]}),
        key({"messages": [system]}, client="other"),
        key({"system": "x", "messages": [system]}),
        key({"prompt": "a"}),
        key({"prompt": "b"}),
    ]
    assert len({asked[0], *other_picks}) == 6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--port=0"], "--port must be in"),
        (["--gateways=host"], "--gateways must be HOST:PORT"),
        (["--ssl-certfile=a"], "given together"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(words: list[str], sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        call_command("endpoint_picker", *words)


class Proxy:
    """Plays Envoy: asks pickers in turn, and the next one when a picker is gone."""

    def __init__(self, ports: list[int]) -> None:
        unlimited = [("grpc.max_receive_message_length", -1)]
        self.channels = [grpc.insecure_channel(f"127.0.0.1:{port}", unlimited) for port in ports]

    def health(self, index: int, service: str) -> int:
        check = self.channels[index].unary_unary(
            f"/{HEALTH_CHECK[0]}/{HEALTH_CHECK[1]}",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        return int(check(HealthCheckRequest(service=service), timeout=DEADLINE_S).status)

    def await_ready(self, index: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                if self.health(index, PROCESS[0]) == SERVING:
                    return
            except grpc.RpcError:
                pass
            assert time.monotonic() < deadline, "the picker isn't ready"
            time.sleep(0.1)

    def ask(self, index: int, prompt: str, model: str = "m") -> list[str]:
        process = self.channels[index].stream_stream(
            f"/{PROCESS[0]}/{PROCESS[1]}",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        body = json.dumps({"model": model, "prompt": prompt}).encode()
        sent = [
            ProcessingRequest(request_headers={}),
            ProcessingRequest(request_body={"body": body, "end_of_stream": True}),
        ]
        first, *_ = process(iter(sent), timeout=DEADLINE_S)
        return str(first.dynamic_metadata["envoy.lb"][DESTINATION]).split(",")

    def ask_any(self, number: int, model: str = "m") -> list[str]:
        """A route's retry: at the other picker."""
        prompt = f"{number} tales"
        try:
            return self.ask(number % 2, prompt, model)
        except grpc.RpcError:
            return self.ask(1 - number % 2, prompt, model)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


@contextmanager
def beating(url: str, prefix: str, endpoints: dict[str, str]) -> Iterator[None]:
    """Replicas' heartbeats, for as long as the block lasts."""
    client, finished_event = redis.Redis.from_url(url), threading.Event()

    def run() -> None:
        while True:
            client.sadd(redis_keys.replicas_key(prefix), *endpoints)
            beats = {name: protocol.encode(beat(name, endpoints[name])) for name in endpoints}
            # At once: however slow this machine is, none looks silent alone.
            client.mset({redis_keys.replica_key(name, prefix): beats[name] for name in beats})
            if finished_event.wait(protocol.HEARTBEAT_INTERVAL_S):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        finished_event.set()
        thread.join()
        client.close()


@contextmanager
def running(
    folder: Path, environment: dict[str, str], *commands: list[str]
) -> Iterator[list[ManagedProcess]]:
    """`manage.py` with each of the command lines."""
    processes = []
    try:
        for number, words in enumerate(commands):
            with (folder / f"{words[0]}-{number}.log").open("wb") as log:
                processes.append(
                    spawn(
                        [sys.executable, "manage.py", *words],
                        name=words[0],
                        env={**clean(), **environment},
                        cwd=str(ROOT),
                        stdout=log,
                        stderr=log,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(60)


async def test_a_name_server_that_says_nothing_kills_no_replica(
    live_redis: str, key_prefix: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REDIS_URL = live_redis
    settings.QUIRE = settings.QUIRE.replace(key_prefix=key_prefix)
    picker, asked = EndpointPicker("127.0.0.1:8000"), asyncio.Event()
    running_picker = asyncio.create_task(picker.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not picker.ready:  # noqa: ASYNC110 - nothing to wait for
                await asyncio.sleep(0.05)

        async def says_nothing(*arguments: Any, **options: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", says_nothing)
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
            with beating(live_redis, key_prefix, {"a": "10.0.0.1:8000"}):
                expected = ["10.0.0.1:8000", "127.0.0.1:8000"]
                while picker.pick(facts()) != expected:  # noqa: ASYNC110 - nothing to wait for
                    await asyncio.sleep(0.05)
    finally:
        running_picker.cancel()
        await asyncio.wait([running_picker])


def picker_command(port: int, gateways: str) -> list[str]:
    return ["endpoint_picker", f"--port={port}", f"--gateways={gateways}"]


@pytest.mark.system
def test_two_pickers_answer_alike_and_one_that_is_killed_loses_no_request(
    live_redis: str, key_prefix: str, tmp_path: Path
) -> None:
    endpoints = {f"r-{number}": f"127.0.0.{number}:8000" for number in range(1, 4)}
    environment = {
        "REDIS_URL": live_redis,
        "QUIRE_DATA_DIR": str(tmp_path),
        **internal(key_prefix=key_prefix),
    }
    ports = [free_port(), free_port()]
    gateways = f"127.0.0.1:{free_port()}"
    proxy = Proxy(ports)
    with (
        beating(live_redis, key_prefix, endpoints),
        running(
            tmp_path, environment, *(picker_command(port, gateways) for port in ports)
        ) as pickers,
    ):
        for index in range(2):
            proxy.await_ready(index)
            assert proxy.health(index, "liveness") == SERVING
            assert proxy.health(index, "other") == SERVICE_UNKNOWN
            assert proxy.ask(index, "Once", model="unknown") == [gateways]
            large = "Once" * (2 << 20)  # more than gRPC takes by default, and less than the API
            assert proxy.ask(index, large, model="unknown") == [gateways]
        asked = [f"{number} tales" for number in range(12)]
        deadline = time.monotonic() + DEADLINE_S
        # Not at once: what stood still for seconds on a busy machine takes replicas for dead.
        while True:
            homes = [[proxy.ask(index, prompt)[0] for prompt in asked] for index in range(2)]
            if homes[0] == homes[1] and set(homes[0]) == set(endpoints.values()):
                break
            assert time.monotonic() < deadline, homes
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(proxy.ask_any, number) for number in range(40)]
            os.kill(pickers[0].pid, signal.SIGKILL)
            answers += [pool.submit(proxy.ask_any, number) for number in range(40)]
            picked = [answer.result(DEADLINE_S)[0] for answer in answers]
        assert len(picked) == 80
        assert set(picked) <= {*endpoints.values(), gateways}
        # The other one ends when it shall.
        os.kill(pickers[1].pid, signal.SIGTERM)
        assert pickers[1].wait(DEADLINE_S) == 0
    proxy.close()


@pytest.mark.slow
@pytest.mark.system
def test_requests_through_pickers_are_answered_while_pickers_and_pods_are_killed(
    live_redis: str, key_prefix: str, tmp_path: Path
) -> None:
    """Two pods, each a replica of the demo and its gateway, a gateway of its own, two pickers."""
    key = "sk-of-the-endpoint-pickers-test"
    environment = {
        "REDIS_URL": live_redis,
        "QUIRE_DATA_DIR": str(tmp_path),
        "QUIRE_API_KEYS": key,
        "QUIRE_ALLOWED_HOSTS": "*",
        "QUIRE_TLS": "off",
        "QUIRE_SHUTDOWN_DELAY_SECONDS": "0",
        **internal(key_prefix=key_prefix),
    }
    for words in (["migrate"], ["create_tenant", "default"]):
        subprocess.run(
            [sys.executable, "manage.py", *words],
            cwd=ROOT,
            env={**clean(), **environment},
            check=True,
            capture_output=True,
        )
    pods, isolated, ports = [free_port(), free_port()], free_port(), [free_port(), free_port()]
    limits = ["--max-model-len=512", "--num-gpu-blocks-override=256"]
    engine = ["engine", "demo/model", "--name=demo"]
    replicas = [
        [*engine, f"--replica-id=r-{port}", f"--endpoint=127.0.0.1:{port}", *limits]
        for port in pods
    ]
    gateways = [["gateway", f"--port={port}", f"--replica-id=r-{port}"] for port in pods]
    gateways.append(["gateway", f"--port={isolated}"])
    pickers = [picker_command(port, f"127.0.0.1:{isolated}") for port in ports]
    proxy = Proxy(ports)

    def answer(number: int) -> tuple[str, str]:
        """The endpoint that answered, and what."""
        body = {"model": "demo", "prompt": f"{number % 8} tales", "max_tokens": 16}
        for endpoint in proxy.ask_any(number, model="demo"):
            with contextlib.suppress(httpx.ConnectError):
                reply = httpx.post(
                    f"http://{endpoint}/v1/completions",
                    json={**body, "temperature": 0},
                    headers={"Authorization": f"Bearer {key}"},
                    timeout=DEADLINE_S,
                )
                assert reply.status_code == 200, reply.text
                return endpoint, reply.json()["choices"][0]["text"]
        raise AssertionError("no endpoint could be reached")

    def await_replicas(ports: list[int]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        endpoints = {f"127.0.0.1:{port}" for port in ports}
        while {proxy.ask_any(number, model="demo")[0] for number in range(20)} != endpoints:
            assert time.monotonic() < deadline, "the replicas aren't ready"
            time.sleep(0.2)

    with contextlib.ExitStack() as stack:
        start = partial(running, tmp_path, environment)
        gateway_processes = stack.enter_context(start(*gateways))
        picker_processes = stack.enter_context(start(*pickers))
        pool = stack.enter_context(ThreadPoolExecutor(8))
        for index in range(2):
            proxy.await_ready(index)
        await_answers([*pods, isolated])
        # One after the other: the first one registers the model.
        for number, replica in enumerate(replicas, 1):
            stack.enter_context(start(replica))
            await_replicas(pods[:number])
        expected = [pool.submit(answer, number).result()[1] for number in range(8)]
        futures = [pool.submit(answer, number) for number in range(40)]
        os.kill(picker_processes[0].pid, signal.SIGKILL)
        futures += [pool.submit(answer, number) for number in range(40, 80)]
        results = [future.result() for future in futures]
        assert {endpoint for endpoint, _ in results} == {f"127.0.0.1:{port}" for port in pods}
        # Without one pod's gateway the proxy takes the next endpoint of the answer.
        os.kill(gateway_processes[0].pid, signal.SIGKILL)
        results += [pool.submit(answer, number).result() for number in range(80, 120)]
        assert [text for _, text in results] == [expected[n % 8] for n in range(120)]
    proxy.close()


def await_answers(ports: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    for port in ports:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/ping", timeout=5).is_success:
                    break
            assert time.monotonic() < deadline, "a gateway doesn't answer"
            time.sleep(0.2)
