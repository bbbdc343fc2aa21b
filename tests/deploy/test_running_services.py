"""FAULTS 76: the compose file's services and the gateway's unit, run as they stand."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psycopg
import pytest

from catalog.processes import spawn
from inference.web.authentication import MAX_FAILED_KEYS
from tenants.api_keys import new_key
from tests.deploy.containers import BRIDGE_ADDRESS, COMPOSE, Containers, clean, example
from tests.deploy.test_systemd import service
from tests.deploy.variables import ROOT
from tests.platform.instance import tiny_model_folder
from tests.services import running_postgresql, running_redis
from tests.waiting import free_port

UNIT = ROOT / "deploy" / "systemd" / "quire-gateway.service"
HEADERS = {"Host": "llm.example.org", "X-Forwarded-Proto": "https"}
#: What systemd gives a unit that asks for nothing: soft limit of descriptors.
SYSTEMD_NOFILE = "1024"
START_S = 120.0


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    with running_postgresql() as url:
        yield url


@pytest.fixture(scope="module")
def redis_url(short_tmp: Path) -> Iterator[str]:
    with running_redis(short_tmp / "services") as url:
        yield url


def wait_until_it_answers(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/ping", headers=HEADERS, timeout=10)
            if answer.status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "the gateway doesn't answer"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def containers(
    tmp_path_factory: pytest.TempPathFactory, database_url: str, redis_url: str
) -> Iterator[Containers]:
    services = Containers(tmp_path_factory.mktemp("compose"), database_url, redis_url, free_port())
    services.run("migrate", *shlex.split(COMPOSE["services"]["migrate"]["command"])[1:])
    try:
        services.start("gateway")
        wait_until_it_answers(services.port)
        yield services
    finally:
        services.stop()


@pytest.fixture(scope="module")
def key(containers: Containers) -> str:
    containers.run("gateway", "manage.py", "create_tenant", "Acme")
    words = ("--tenant", "acme", "--plain", "--addresses", "203.0.113.0/24")
    return containers.run("gateway", "manage.py", "create_key", *words)


def status_for(containers: Containers, peer: str, forwarded: str, key: str) -> int:
    """The status that a client gets whose address the connection's peer forwards."""
    headers = HEADERS | {"Authorization": f"Bearer {key}", "X-Forwarded-For": forwarded}
    transport = httpx.HTTPTransport(local_address=peer)
    with httpx.Client(transport=transport, headers=headers, timeout=60) as client:
        return client.get(f"http://127.0.0.1:{containers.port}/v1/models").status_code


def test_fault_76_what_services_share_is_a_volume_of_each() -> None:
    """The folders that the settings say several processes must see."""
    shares = {
        "/var/lib/quire/files": ("gateway", "worker"),
        "/var/lib/quire/adapters": ("gateway", "worker", "replicas"),
        "/models": ("gateway", "worker", "replicas"),
        "/var/cache/quire": ("gateway", "worker", "replicas"),
    }
    for path, services in shares.items():
        mounted = [
            (name, volume.split(":")[0])
            for name in services
            for volume in COMPOSE["services"][name]["volumes"]
            if volume.split(":")[1] == path
        ]
        assert tuple(name for name, _ in mounted) == services, path
        assert len({source for _, source in mounted}) == 1, path


def test_fault_76_an_adapter_of_the_gateways_is_whole_in_every_service(
    containers: Containers,
) -> None:
    upload = (
        "from adapters import store; from tests.adapter_files import adapter_bytes\n"
        "staged = store.staging_dir()\n"
        "for name, content in adapter_bytes().items(): (staged / name).write_bytes(content)\n"
        "print(store.store_content(staged)[0])"
    )
    shell = ("manage.py", "shell", "--no-imports", "-c")
    digest = containers.run("gateway", *shell, upload)
    for name in ("replicas", "worker"):
        full = f"from adapters import store; print(store.has_content({digest!r}))"
        assert containers.run(name, *shell, full) == "True", name


def test_fault_76_a_batch_goes_from_the_gateway_to_the_worker_and_back(
    containers: Containers,
) -> None:
    containers.start("replicas")
    containers.start("worker")
    model = tiny_model_folder(containers.folder / "volumes" / ".._models" / "tiny")
    containers.run("gateway", "manage.py", "load_model", str(model), "--name", "tiny", "--wait")
    containers.run("gateway", "manage.py", "create_tenant", "Batches")
    secret = containers.run("gateway", "manage.py", "create_key", "--tenant", "batches", "--plain")
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    }
    with httpx.Client(
        base_url=f"http://127.0.0.1:{containers.port}/v1",
        headers=HEADERS | {"Authorization": f"Bearer {secret}"},
        timeout=60,
    ) as client:
        file = client.post(
            "/files",
            data={"purpose": "batch"},
            files={"file": ("requests.jsonl", json.dumps(line).encode())},
        ).json()
        batch = client.post(
            "/batches",
            json={
                "input_file_id": file["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
        ).json()
        deadline = time.monotonic() + START_S
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            assert time.monotonic() < deadline, batch
            time.sleep(0.3)
            batch = client.get(f"/batches/{batch['id']}").json()
        assert batch["status"] == "completed", batch
        answer = json.loads(client.get(f"/files/{batch['output_file_id']}/content").text)
    assert answer["response"]["status_code"] == 200


def test_fault_76_a_key_sees_the_client_behind_the_bridge(containers: Containers, key: str) -> None:
    assert status_for(containers, BRIDGE_ADDRESS, "203.0.113.9", key) == 200
    assert status_for(containers, BRIDGE_ADDRESS, "198.51.100.9", key) == 403
    # Another container says what it likes.
    assert status_for(containers, "127.31.76.5", "203.0.113.9", key) == 403


def test_fault_76_wrong_keys_are_counted_by_client(containers: Containers, key: str) -> None:
    statuses: list[int] = []
    while 429 not in statuses:
        assert set(statuses) <= {401}
        # A minute may end meanwhile, and counting begins anew.
        assert len(statuses) < 3 * MAX_FAILED_KEYS, "nobody counts"
        invalid_key = new_key(f"{len(statuses):010d}")
        statuses.append(status_for(containers, BRIDGE_ADDRESS, "203.0.113.66", invalid_key))
    assert status_for(containers, BRIDGE_ADDRESS, "203.0.113.67", new_key("9" * 10)) == 401
    assert status_for(containers, BRIDGE_ADDRESS, "203.0.113.9", key) == 200


def test_fault_76_the_health_check_passes_in_its_container(containers: Containers) -> None:
    *_, source = COMPOSE["services"]["gateway"]["healthcheck"]["test"]
    containers.run("gateway", "-c", source.replace(":8000", f":{containers.port}"))


def test_fault_76_two_gateways_migrate_one_empty_database_at_once(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE two")
    url = database_url.removesuffix("postgres") + "two"
    environment = unit_environment(tmp_path, url, redis_url)
    command = unit_command("ExecStartPre")

    def migrate(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(migrate, range(2)):
            assert done.returncode == 0, done.stderr[-2000:]
    # systemd gives up on what takes longer than this.
    assert service(UNIT)["TimeoutStartSec"] == "infinity"


@pytest.mark.slow
async def test_fault_76_a_gateways_unit_holds_thousands_of_connections(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    count = 5000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = int(service(UNIT).get("LimitNOFILE", SYSTEMD_NOFILE))
    if hard < count + 1000:
        pytest.skip(f"this machine lets a process have {hard} descriptors alone")
    environment = unit_environment(tmp_path, database_url, redis_url)
    port = free_port()
    command = unit_command("ExecStart", "--port 8000", f"--port {port}")
    migrate = await asyncio.create_subprocess_exec(
        *unit_command("ExecStartPre"), cwd=ROOT, env=environment
    )
    assert await migrate.wait() == 0
    with (tmp_path / "gateway.log").open("wb") as log:
        gateway = spawn(
            ["prlimit", f"--nofile={min(limit, hard)}", *command],
            name="gateway",
            env=environment,
            cwd=str(ROOT),
            stdout=log,
            stderr=log,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    writers: list[asyncio.StreamWriter] = []
    try:
        await asyncio.to_thread(wait_until_it_answers, port)
        async with asyncio.timeout(120):
            for _ in range(0, count, 100):
                opened = await asyncio.gather(*(asked_connection(port) for _ in range(100)))
                writers += [writer for _, writer in opened]
                assert {status for status, _ in opened} == {b"HTTP/1.1 200 OK\r\n"}
        assert not any(writer.transport.is_closing() for writer in writers)
        status, writer = await asked_connection(port)
        writers.append(writer)
        assert status == b"HTTP/1.1 200 OK\r\n"
    finally:
        for writer in writers:
            writer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await asyncio.to_thread(gateway.stop, 20)


async def asked_connection(port: int) -> tuple[bytes, asyncio.StreamWriter]:
    """A connection that has asked once and stays open, and its answer's first line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    writer.write(f"GET /ping HTTP/1.1\r\n{lines}\r\n".encode())
    return await reader.readline(), writer


def unit_environment(folder: Path, database_url: str, redis_url: str) -> dict[str, str]:
    """The variables of the unit and of the example, with folders of the test's."""
    lines = re.findall(r"^Environment=(.*)$", UNIT.read_text(), re.M)
    folders = dict(word.split("=", 1) for line in lines for word in line.split())
    return {
        **clean(),
        **example(),
        **{name: f"{folder}{path}" for name, path in folders.items()},
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "QUIRE_SHUTDOWN_DELAY_SECONDS": "0",
    }


def unit_command(key: str, *replaced: str) -> list[str]:
    """One of the unit's command lines, with this Python."""
    line = service(UNIT)[key].replace("/opt/quire/.venv/bin/python", sys.executable)
    return shlex.split(line.replace(*replaced) if replaced else line)
