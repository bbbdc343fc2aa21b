"""Adapters that a request finds by name: whose they become, and for whom nobody looks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters import actions as adapter_actions
from adapters import resolution as resolved
from adapters import resolution as resolving
from adapters import version_jobs as work
from adapters.models import Adapter, AdapterVersion
from adapters.resolvers import lora_resolvers
from adapters.signals import version_waits
from catalog.models import ServedModel
from common.db import run_in_db_thread
from common.task_queue import scheduler_lock
from engine.contract import plugins
from engine.contract.errors import ConfigError
from engine.contract.lora import adapter_digest
from engine.contract.plugins import LoRAResolver, LoRAResolverRegistry
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry
from tests.adapter_files import adapter_folder
from tests.inference.adapter_requests import ask, client_of, digest_of, newcomer
from tests.inference.conftest import Gateway
from tests.packages import EXAMPLE, install
from tests.platform.adapters import added

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("adapter_store")]


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is remembered; a version is checked as soon as it's there."""

    def check(version: AdapterVersion, **_: object) -> None:
        work.process_version(version.pk)

    monkeypatch.delenv("QUIRE_PLUGINS", raising=False)
    monkeypatch.setattr(resolving, "POLL_INTERVAL_S", 0.01)
    version_waits.connect(check, weak=False, dispatch_uid="test")
    resolving.forget()
    yield
    version_waits.disconnect(dispatch_uid="test")
    resolving.forget()


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    """The folder that the operator named."""
    cache_dir = tmp_path / "resolved"
    cache_dir.mkdir()
    settings.QUIRE = settings.QUIRE.replace(lora_resolver_cache_dir=str(cache_dir))
    return cache_dir


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Installs the example package; says which names its resolver knows."""
    monkeypatch.syspath_prepend(str(install(EXAMPLE, tmp_path / "installed")))
    monkeypatch.setenv("EXAMPLE_ADAPTERS", str(tmp_path / "table.json"))

    def knows(**folders: Path) -> None:
        names = {name: str(path) for name, path in folders.items()}
        (tmp_path / "table.json").write_text(json.dumps(names))
        resolving.forget()

    knows()
    return knows


def lora(folder: Path, seed: int = 0, base: str = "fake", **config: Any) -> Path:
    return adapter_folder(folder, seed, base_model_name_or_path=base, **config)


def count() -> int:
    return Adapter.objects.count()


async def test_a_name_in_the_operators_folder_is_found(gateway: Gateway, folder: Path) -> None:
    digest = adapter_digest(lora(folder / "sql"))
    lora(folder / "other", 1, base="another-model")
    async with gateway.serving(gateway.fake()) as replica:
        assert await digest_of(gateway.client, "sql") == digest
        assert await digest_of(gateway.client, "fake:sql") == digest
        for name in ("other", "fake:other", "sqll", "x:sql"):
            assert (await ask(gateway.client, name)).status == 404
        listed = (await gateway.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["fake", "sql"]
    assert [request.adapter.digest for request in replica.received if request.adapter] == [
        digest
    ] * 2
    entry = await run_in_db_thread(AuditEntry.objects.filter(action="adapter.add").get)
    assert entry.actor_label == "LoRA resolver lora_filesystem_resolver"
    assert entry.tenant_id == gateway.rows.tenant.pk


async def test_without_a_resolver_it_is_not_there(gateway: Gateway, adapter_store: Path) -> None:
    lora(adapter_store / "sql")
    async with gateway.serving(gateway.fake()):
        assert (await ask(gateway.client, "sql")).status == 404
    assert await run_in_db_thread(count) == 0


async def test_what_one_tenant_resolved_is_never_anothers(gateway: Gateway, folder: Path) -> None:
    _, theirs = await run_in_db_thread(newcomer)
    _, third = await run_in_db_thread(newcomer, "Third")
    first = adapter_digest(lora(folder / "sql", 1))
    async with gateway.serving(gateway.fake()):
        assert await digest_of(gateway.client, "sql") == first
        second = adapter_digest(lora(folder / "sql", 2))
        assert await digest_of(theirs, "sql") == second
        assert await digest_of(gateway.client, "sql") == first
        listed = (await third.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["fake"]
    owners = await run_in_db_thread(
        lambda: set(Adapter.objects.values_list("tenant__name", flat=True))
    )
    assert owners == {gateway.rows.tenant.name, "Rival"}


async def test_nobody_looks_for_those_who_may_not(gateway: Gateway, folder: Path) -> None:
    lora(folder / "sql")
    lora(folder / "fake")
    tenant = gateway.rows.tenant
    barred = await run_in_db_thread(client_of, tenant, allowed_models=["fake"])
    deaf = await run_in_db_thread(client_of, tenant, scopes=["models:read"])
    other, elsewhere = await run_in_db_thread(newcomer)
    await run_in_db_thread(
        lambda: actions.update_tenant(actor=SYSTEM_ACTOR, tenant=other, allowed_models=["big"])
    )
    async with gateway.serving(gateway.fake()):
        assert (await ask(barred, "sql")).status == 404
        assert (await ask(barred, "fake:sql")).status == 404
        assert (await ask(deaf, "sql")).status == 403
        assert (await ask(elsewhere, "sql")).status == 404
        assert (await ask(elsewhere, "fake")).status == 404
        assert (await gateway.client.get("/v1/models/sql")).status == 404
        assert "x-quire-adapter" not in (await ask(gateway.client, "fake")).headers
    assert await run_in_db_thread(count) == 0


async def test_names_and_links_that_lead_out_of_the_folder_find_nothing(
    gateway: Gateway, folder: Path, tmp_path: Path
) -> None:
    outside = lora(tmp_path / "outside")
    (folder / "link").symlink_to(outside)
    lora(folder, 3)
    async with gateway.serving(gateway.fake()):
        for name in ("../outside", "a/../../outside", str(outside), "link", ".", "a/..", "x\0y"):
            for asked in (name, f"fake:{name}"):
                assert (await ask(gateway.client, asked)).status == 404, asked
    assert await run_in_db_thread(count) == 0


async def test_the_digest_stays_until_its_owner_says_otherwise(
    gateway: Gateway, folder: Path
) -> None:
    first = adapter_digest(lora(folder / "sql", 1))

    def adapter() -> Adapter:
        return Adapter.objects.select_related("tenant", "served_model").get()

    async with gateway.serving(gateway.fake()):
        assert await digest_of(gateway.client, "sql") == first
        second = adapter_digest(lora(folder / "sql", 2))
        resolving.forget()
        assert await digest_of(gateway.client, "sql") == first
        await run_in_db_thread(
            lambda: adapter_actions.take_offline(actor=SYSTEM_ACTOR, adapter=adapter())
        )
        resolving.forget()
        assert (await ask(gateway.client, "sql")).status == 404
        await run_in_db_thread(
            lambda: adapter_actions.delete_adapter(actor=SYSTEM_ACTOR, adapter=adapter())
        )
        resolving.forget()
        assert await digest_of(gateway.client, "sql") == second


async def test_what_the_check_refuses_is_told(gateway: Gateway, folder: Path) -> None:
    lora(folder / "bad", says="refuse")
    lora(folder / "pickled")
    (folder / "pickled" / "adapter_model.safetensors").rename(folder / "pickled" / "x.bin")
    async with gateway.serving(gateway.fake()):
        for _ in range(2):
            for name, words in (("bad", "lora_A holds NaN."), ("pickled", "is a pickle")):
                reply = await ask(gateway.client, name)
                assert (reply.status, reply.error["code"]) == (400, "invalid_adapter")
                assert words in reply.error["message"]
                assert str(folder) not in reply.error["message"]
                resolving.forget()
        assert (await ask(gateway.client, "fake")).status == 200


async def test_a_packages_resolver_answers(
    gateway: Gateway,
    package: Callable[..., None],
    adapter_store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = adapter_digest(lora(adapter_store / "somewhere"))
    package(sql=adapter_store / "somewhere")
    async with gateway.serving(gateway.fake()):
        monkeypatch.setenv("QUIRE_PLUGINS", "another")
        assert (await ask(gateway.client, "sql")).status == 404
        monkeypatch.setenv("QUIRE_PLUGINS", "example_table")
        resolving.forget()
        assert await digest_of(gateway.client, "sql") == digest


async def test_a_resolver_that_names_a_strangers_files_gets_nothing(
    gateway: Gateway, package: Callable[..., None], tmp_path: Path, settings: Any
) -> None:
    """The store may lie inside a folder that is allowed: by default it does."""
    settings.QUIRE = settings.QUIRE.replace(adapter_dirs=[tmp_path])
    rival, _ = await run_in_db_thread(newcomer)
    model = await run_in_db_thread(ServedModel.objects.get)
    theirs = await run_in_db_thread(added, SYSTEM_ACTOR, rival, model, "secret")
    package(sql=tmp_path / "adapters" / theirs.digest, root=Path("/etc"))
    async with gateway.serving(gateway.fake()):
        for name in ("sql", "root"):
            reply = await ask(gateway.client, name)
            assert reply.status == 400
            assert "outside the allowed directories" in reply.error["message"]
            assert "/" not in reply.error["message"]


async def test_a_resolver_in_trouble_is_no_404(
    gateway: Gateway, package: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXAMPLE_ADAPTERS", "/nowhere/at/all")
    async with gateway.serving(gateway.fake()):
        reply = await ask(gateway.client, "sql")
        assert (reply.status, reply.error["code"]) == (503, "service_unavailable")


async def test_one_that_waits_for_its_check_is_joined_and_many_are_refused(
    gateway: Gateway, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version_waits.disconnect(dispatch_uid="test")
    monkeypatch.setattr(resolving, "CHECKED_WITHIN_S", 0.05)
    monkeypatch.setattr(resolved, "MAX_PENDING_LOOKUPS", 1)
    digest = adapter_digest(lora(folder / "sql"))
    lora(folder / "more", 1)
    async with gateway.serving(gateway.fake()):
        for _ in range(2):
            waits = await ask(gateway.client, "sql")
            assert (waits.status, waits.headers["retry-after"]) == (503, "2")
        many = await ask(gateway.client, "more")
        assert (many.status, many.headers["retry-after"]) == (429, "2")
        pk = await run_in_db_thread(lambda: AdapterVersion.objects.get().pk)
        await run_in_db_thread(work.process_version, pk)
        assert await digest_of(gateway.client, "sql") == digest


def test_a_function_may_register_one_and_what_is_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, settings: Any
) -> None:
    info = tmp_path / "more-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more\nVersion: 1.0\n")
    points = info / "entry_points.txt"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(LoRAResolverRegistry, "_resolvers", {})
    (tmp_path / "more_resolvers.py").write_text(
        "from engine.contract.plugins import LoRAResolver, LoRAResolverRegistry\n"
        "class None_(LoRAResolver):\n"
        "    async def resolve_lora(self, base_model_name, lora_name): return None\n"
        "def register(): LoRAResolverRegistry.register_resolver('Mine', None_())\n"
    )
    points.write_text("[quire.lora_resolvers]\nmine = more_resolvers:register\n")
    resolvers = lora_resolvers()
    assert list(resolvers) == ["lora_filesystem_resolver", "Mine"]
    assert isinstance(resolvers["Mine"], LoRAResolver)
    points.write_text("[quire.lora_resolvers]\nwrong = json:JSONDecoder\n")
    plugins._installed.cache_clear()  # as in another process
    resolving.forget()
    with pytest.raises(
        ConfigError, match=r"wrong .* is no subclass of engine.contract.plugins.LoRA"
    ):
        lora_resolvers()
    points.write_text("")
    plugins._installed.cache_clear()
    shutil.rmtree(folder)
    resolving.forget()
    with pytest.raises(ConfigError, match="QUIRE_LORA_RESOLVER_CACHE_DIR must be a folder"):
        lora_resolvers()


async def test_without_a_worker_nobody_waits_for_its_check(
    gateway: Gateway, folder: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up --no-worker`, until somebody starts a worker, which holds the schedule's lock."""
    settings.QUIRE = settings.QUIRE.replace(without_worker=True)
    version_waits.disconnect(dispatch_uid="test")
    lora(folder / "sql")
    async with gateway.serving(gateway.fake()):
        reply = await ask(gateway.client, "sql")
        assert reply.status == 503
        assert "--no-worker" in reply.error["message"]
        await gateway.redis.set(scheduler_lock(), "a worker")
        monkeypatch.setattr(resolving, "CHECKED_WITHIN_S", 0.1)
        reply = await ask(gateway.client, "sql")
        assert (reply.status, "still being checked" in reply.error["message"]) == (503, True)
