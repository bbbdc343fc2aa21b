"""A server of one user answers programs of its machine without a key, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from config.single_user import SingleUser, has_single_user, is_loopback, is_own_request
from config.up.first_run import Credentials, ensure_credentials
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.database import with_tables
from tests.platform.instance import Instance, manage, tiny_model_folder
from tests.waiting import wait_until


def scope(client: str = "127.0.0.1", host: str = "localhost:8000", **headers: str) -> Any:
    pairs = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return {
        "type": "http",
        "path": "/v1/models",
        "client": (client, 5000),
        "headers": [(name.encode(), value.encode()) for name, value in pairs.items()],
    }


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer EMPTY"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer token-abc123"},
        {"authorization": "Bearer sk-1234", "x_api_key": "not-needed"},
        {"x_api_key": "EMPTY"},
        {"host": "127.0.0.1:8000"},
        {"host": "[::1]:8000", "client": "::1"},
        {"host": "0.0.0.0:8000"},
        {"host": "[::]:8000", "client": "::1"},
        {"origin": "http://localhost:3000"},
    ],
)
def test_a_program_of_this_machine_needs_no_key(headers: dict[str, str]) -> None:
    assert is_own_request(scope(**headers))


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-quire-other"},
        {"authorization": "Basic EMPTY"},
        {"authorization": "Bearer EMPTY", "x_api_key": "sk-quire-other"},
        {"client": "192.168.0.7"},
        {"host": "attacker.example"},
        {"host": ""},
        {"origin": "https://attacker.example"},
        {"origin": "null"},
        {"x_forwarded_for": "203.0.113.5"},
        {"forwarded": "for=203.0.113.5"},
        {"via": "1.1 proxy"},
        {"cookie": "sessionid=1"},
    ],
)
def test_anybody_else_needs_one(headers: dict[str, str]) -> None:
    assert not is_own_request(scope(**headers))


def test_a_unix_socket_has_no_address_to_trust() -> None:
    assert not is_own_request(scope() | {"client": None})


def test_addresses_of_this_machine_alone() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.0.0.2", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "host", "")))


@pytest.mark.django_db
def test_a_second_user_tenant_or_key_ends_it(tmp_path: Path) -> None:
    api_key = ensure_credentials(tmp_path).api_key
    assert has_single_user(api_key)
    key = actions.create_key(
        actor=SYSTEM_ACTOR, tenant=Tenant.objects.get(), name="other", scopes=["inference"]
    )
    assert not has_single_user(api_key)
    actions.revoke_key(actor=SYSTEM_ACTOR, key=key.key)
    assert has_single_user(api_key)
    actions.create_tenant(actor=SYSTEM_ACTOR, name="Second", owner=None)
    assert not has_single_user(api_key)


@pytest.mark.django_db(transaction=True)
def test_a_request_without_a_key_gets_the_instances_own(tmp_path: Path, settings: Any) -> None:
    settings.DATA_DIR = tmp_path
    api_key = ensure_credentials(tmp_path).api_key
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    async def ask() -> None:
        wrapped = SingleUser(application)
        await wrapped(scope(authorization="Bearer EMPTY"), None, None)
        await wrapped(scope(authorization="Bearer sk-quire-other"), None, None)

    asyncio.run(ask())
    header = (b"authorization", f"Bearer {api_key}".encode())
    assert seen[0] == [(b"host", b"localhost:8000"), header]
    assert (b"authorization", b"Bearer sk-quire-other") in seen[1]


@pytest.fixture(scope="module")
def served(short_tmp: Path) -> Iterator[Instance]:
    model = tiny_model_folder(short_tmp / "one-user-model")
    data_dir = with_tables(short_tmp / "one-user")
    manage(data_dir, "load_model", str(model), "--name", "earlier")
    with Instance(data_dir, str(model), "--no-worker", command="serve") as instance:
        instance.ready()
        yield instance


def status(facts: dict[str, str], api_key: str = "EMPTY") -> int:
    headers = {"Authorization": f"Bearer {api_key}"}
    url = f"{facts['url']}/v1/models"
    return httpx.get(url, headers=headers, trust_env=False).status_code


@pytest.mark.system
def test_the_manuals_clients_are_answered_until_there_is_somebody_else(served: Instance) -> None:
    facts = served.ready()
    with openai.OpenAI(api_key="EMPTY", base_url=f"{facts['url']}/v1") as client:
        (model,) = [model.id for model in client.models.list().data]
        assert model == "one-user-model"
        assert "Not loaded again: earlier." in served.text()
        answer = client.completions.create(model=model, prompt="Hello", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        body = {"prompt": "Hello", "n": 1, "max_tokens": 3, "stream": True}
        stream = httpx.post(f"{facts['url']}/generate", json=body, trust_env=False)
        *parts, rest = stream.content.split(b"\0")
        assert rest == b""
        assert all(b'"text"' in part for part in parts)
        metrics = httpx.get(f"{facts['url']}/metrics", trust_env=False)
        assert metrics.status_code == 200
        assert "vllm:num_requests_running" in metrics.text
        text = served.text()
        assert "need no API key" in text
        assert "INFO:     Application startup complete." in text
        assert f"INFO:     Uvicorn running on {facts['url']} (Press CTRL+C to quit)" in text
        manage(served.data_dir, "create_tenant", "research")
        wait_until(lambda: status(facts) == 401)
    assert Credentials.read(served.data_dir).api_key == facts["api_key"]
    assert status(facts, facts["api_key"]) == 200
    assert httpx.get(f"{facts['url']}/metrics", trust_env=False).status_code == 401
