"""A gateway in the test's own loop: real tenants, keys, catalogue, metering and Redis."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django_prometheus.middleware import Metrics
from redis import asyncio as aioredis

from adapters.models import AdapterVersion
from catalog import access as catalog_access
from catalog.models import DesiredState, ServedModel
from common.db import run_in_db_thread
from config.logging import build_formatter
from engine.text.tokenizer import Tokenizer, load_tokenizer
from inference.edge.handler import GatewayHandler
from inference.engine_client.client import close_engine_client, get_engine_client
from inference.generation import background
from inference.loop.offload import FairThreadPool
from metering import request_log_writer as writer
from metering import rules
from metering.redis_scripts import close_redis_link
from metering.usage_record import UsageRecord, decode_record
from tenants import actions, api_keys, authentication
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, Tenant
from tests.fakes.fake_replica import FakeReplica, expected_tokens
from tests.inference.asgi_client import AsgiClient
from tests.inference.scripted import FailingReplica, Script, ScriptedReplica
from tests.inference.tokenizer_folder import EOS, write_tokenizer
from tests.platform.adapters import checked

VOCAB = 512
#: Fake replicas make tokens in [LOW, HIGH): one printable ASCII character each.
LOW, HIGH = 10, 90


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds; fail when it doesn't within two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("waited in vain")
        await asyncio.sleep(0.005)


def generated_tokens(prompt: list[int], count: int, index: int = 0) -> list[int]:
    """What a fake replica answers."""
    return expected_tokens(prompt, count, index=index, low=LOW, high=HIGH)


@dataclass
class Rows:
    """What the tests find in the database."""

    tenant: Tenant
    key: ApiKey
    secret: str


@pytest.fixture(scope="module", autouse=True)
def _requests_of_other_files_are_forgotten() -> None:
    """A gateway tells now and then what its process has counted. The console's tests leave it
    thousands of series, one for each page and status: to tell them takes longer than most tests.
    """
    for metric in vars(Metrics.get_instance()).values():
        metric.clear()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and no weights."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    """The fake model's tokenizer."""
    return load_tokenizer(model_folder)


@pytest.fixture
def no_record_waits() -> None:
    """What became of earlier requests isn't written by the next test."""
    writer._waiting.clear()
    writer._refusals.sweep(all_of_them=True)
    writer._waiting.clear()


@pytest.fixture
def rows(transactional_db: None) -> Iterator[Rows]:
    """A tenant with a key, and the model "fake" in the catalogue.

    Committed, not inside a transaction: the gateway looks from threads of its own.
    """
    authentication.clear_cache()
    catalog_access.clear_cache()
    rules.forget()
    tenant = actions.create_tenant(actor=SYSTEM_ACTOR, name="Gateway tests")
    key = actions.create_key(actor=SYSTEM_ACTOR, tenant=tenant, name="test")
    ServedModel.objects.create(
        name="fake", source="fake", desired_state=DesiredState.LOADED, managed=False
    )
    yield Rows(tenant, key.key, key.secret)
    authentication.clear_cache()
    catalog_access.clear_cache()
    rules.forget()


@dataclass
class Gateway:
    """The application and all around it."""

    client: AsgiClient
    redis: Any
    redis_url: str
    prefix: str
    model_folder: Path
    rows: Rows
    options: dict[str, Any] = field(default_factory=dict)

    def fake(self, **options: Any) -> FakeReplica:
        """A replica of the model "fake"; use it with `async with`. Where tokens come at once, an
        answer has a few at most: a whole context of them would take seconds.
        """
        short = {} if "token_delay" in options else {"eos_after": 256}
        return FakeReplica(self.redis_url, **(self._options() | short | options))

    def scripted(self, script: Script, **options: Any) -> ScriptedReplica:
        """One that says what it's told."""
        return ScriptedReplica(self.redis_url, script, **(self._options() | options))

    def failing(self, **options: Any) -> FailingReplica:
        """One whose engine fails in the middle of every answer."""
        return FailingReplica(self.redis_url, **(self._options() | options))

    def _options(self) -> dict[str, Any]:
        return {
            "key_prefix": self.prefix,
            "model_name": "fake",
            "model_path": str(self.model_folder),
            "vocab_size": VOCAB,
            "eos_token_ids": (EOS,),
            "low": LOW,
            "high": HIGH,
        }

    @asynccontextmanager
    async def serving(self, replica: FakeReplica) -> AsyncIterator[FakeReplica]:
        """With this replica running, and known to the gateway."""
        async with replica:
            await self.refresh()
            yield replica

    async def refresh(self) -> None:
        """Read the heartbeats now."""
        client = get_engine_client()
        await client.start()
        await client.watchman.tick()

    async def usage(self) -> list[UsageRecord]:
        """What was settled so far."""
        await background.drain(10)
        entries = await self.redis.xrange(f"{self.prefix}:usage")
        return [decode_record(next(iter(fields.values()))) for _, fields in entries]


@pytest.fixture
async def gateway(
    rows: Rows, live_redis: str, key_prefix: str, model_folder: Path, settings: Any
) -> AsyncIterator[Gateway]:
    """A gateway without replicas."""
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=5.0)
    redis = aioredis.from_url(live_redis)
    client = AsgiClient(GatewayHandler(), rows.secret)
    yield Gateway(client, redis, live_redis, key_prefix, model_folder, rows)
    get_engine_client().expire_aborted(-1.0)  # replicas are gone, and answer no abort
    await background.drain(10)
    await close_engine_client()
    await close_redis_link()
    await redis.aclose()


@pytest.fixture
async def served(gateway: Gateway) -> AsyncIterator[Gateway]:
    """A gateway with one fake replica, whose answers have 20 tokens and EOS at most."""
    async with gateway.serving(gateway.fake(eos_after=20)):
        yield gateway


@pytest.fixture
def rendered_for(settings: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """In whose turns prompts are rendered: all of them are in threads here."""
    settings.QUIRE = settings.QUIRE.replace(inline_render_chars=0)
    tenants: set[str] = set()
    submit = FairThreadPool.submit

    def spy(threads: FairThreadPool, tenant: str, job: Callable[[], Any]) -> Any:
        tenants.add(tenant)
        return submit(threads, tenant, job)

    monkeypatch.setattr(FairThreadPool, "submit", spy)
    return tenants


@pytest.fixture
def live(gateway: Gateway) -> Any:
    """Makes a live version; in a thread."""

    def make(tenant: Tenant | None, name: str = "tone", seed: int = 0, **more: Any) -> Any:
        model = ServedModel.objects.get(name=more.pop("model", "fake"))
        more.setdefault("promote", True)
        return checked(SYSTEM_ACTOR, tenant, model, name=name, seed=seed, **more)

    async def in_thread(*args: Any, **kwargs: Any) -> AdapterVersion:
        return await run_in_db_thread(make, *args, **kwargs)

    return in_thread


@pytest.fixture
def written() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What this process writes meanwhile, as collectors read it."""
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(build_formatter("json"))
    root.addHandler(handler)
    yield lambda: [json.loads(text) for text in stream.getvalue().splitlines()]
    root.removeHandler(handler)


@pytest.fixture
async def operator(gateway: Gateway) -> Gateway:
    """The gateway, asked with an operator's key."""
    key = await asyncio.to_thread(
        lambda: actions.create_key(
            actor=SYSTEM_ACTOR, tenant=gateway.rows.tenant, name="op", scopes=api_keys.ALL
        )
    )
    gateway.client.key = key.secret
    return gateway
