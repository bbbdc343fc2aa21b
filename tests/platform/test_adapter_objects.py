"""Adapters in object storage: caches by digest, uploads by several gateways, killed uploads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core.management import call_command

from adapters import actions, cards, store
from adapters import version_jobs as work
from adapters.models import VersionState
from catalog.engine_settings import replica_command
from common.errors import Conflict, OffsetMismatch, ServiceUnavailable
from common.installation import APPS_DIR, BASE_DIR
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from tenants.actors import CLI_ACTOR
from tests.adapter_files import adapter_bytes, adapter_folder
from tests.object_storage import KillingProxy, bucket, new_bucket, object_names, s3_server
from tests.platform.adapters import added, checked, served
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("adapter_store")]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as address:
        yield address


@dataclass
class Machines:
    """Machines with one bucket and nothing else in common."""

    entry: dict[str, Any]
    folder: Path
    settings: Any

    @property
    def bucket(self) -> Any:
        options = self.entry["OPTIONS"]
        return bucket(options["endpoint_url"], options["bucket_name"])

    def use(self, name: str, **changes: Any) -> None:
        data_dir = self.folder / name
        data_dir.mkdir(exist_ok=True)
        quire = self.settings.QUIRE.replace(
            data_dir=data_dir, object_storage=json.dumps(self.entry), **changes
        )
        self.settings.QUIRE = quire
        self.settings.STORAGES = django_settings.STORAGES | quire.storages


@pytest.fixture
def machines(s3: str, tmp_path: Path, settings: Any) -> Machines:
    machines = Machines(new_bucket(s3), tmp_path, settings)
    machines.use("gateway")
    return machines


def test_another_machine_checks_and_serves_an_adapter_from_its_own_copy(
    world: World, machines: Machines
) -> None:
    version = added(world.member, world.acme, served())
    digest = version.digest
    (name,) = object_names(machines.entry)
    assert name.startswith(f"adapters/{digest}/")
    machines.use("worker")
    assert not store.content_path(digest).exists()
    work.process_version(version.pk)
    version.refresh_from_db()
    assert version.state == VersionState.READY
    copy = store.content_path(digest)
    assert copy.is_relative_to(machines.folder / "worker")
    assert adapter_digest(copy) == digest
    # What is here already isn't fetched again.
    machines.bucket.objects.delete()
    assert store.fetch_content(digest) == copy
    shutil.rmtree(copy)
    with pytest.raises(FileNotFoundError):
        store.fetch_content(digest)


def test_an_upload_counts_what_is_sent_to_the_object_storage(
    world: World, machines: Machines, tmp_path: Path
) -> None:
    served_model, fractions = served(), list[float]()
    folder = adapter_folder(tmp_path / "tone")
    actions.add_from_folder(
        actor=CLI_ACTOR,
        tenant=None,
        served_model=served_model,
        name="tone",
        path=str(folder),
        on_progress=fractions.append,
    )
    assert fractions == sorted(fractions)
    assert any(0.4 < fraction <= 0.5 for fraction in fractions)  # copied, and not yet sent
    assert fractions[-1] == 1.0


def test_replicas_fetch_adapters_by_a_command(
    world: World, machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    version = checked(world.member, world.acme, served())
    actions.promote(actor=world.owner, version=version)
    (card,) = cards._read(world.acme.pk)
    assert card.version.num_bytes == version.num_bytes
    machines.use("node")
    command = replica_command({}, replica_id="r", key_prefix="q", drain_seconds=1)
    (flag,) = [word for word in command if word.startswith("--adapter-fetch-command=")]
    assert flag.endswith("-m quire fetch_adapter")
    call_command("fetch_adapter", version.digest)
    assert capsys.readouterr().out == f"{machines.folder}/node/adapter-cache/{version.digest}\n"


def test_the_cache_keeps_what_was_used_last_within_its_budget(
    world: World, machines: Machines
) -> None:
    model = served()
    digests = [added(world.member, world.acme, model, seed=seed).digest for seed in range(3)]
    for age, digest in enumerate(digests):
        os.utime(store.adapters_dir() / digest, (1e9 - age, 1e9 - age))
    size = store.size_of(store.content_path(digests[0]))
    machines.use("gateway", object_cache_bytes=2 * size)
    digests.append(added(world.member, world.acme, model, seed=3).digest)
    stored = [digest for digest in digests if store.content_path(digest).exists()]
    assert stored == [digests[0], digests[3]]
    # One that is read now stays, whatever the budget.
    machines.use("gateway", object_cache_bytes=1)
    store.fetch_content(digests[1])
    stored = [digest for digest in digests if store.content_path(digest).exists()]
    assert stored == [digests[1], digests[3]]


def test_a_damaged_object_is_served_to_nobody(world: World, machines: Machines) -> None:
    first = added(world.member, world.acme, served()).digest
    (name,) = object_names(machines.entry)
    stored = machines.bucket.Object(name)
    body = stored.get()["Body"].read()
    stored.put(Body=body.replace(b'"r": 8', b'"r": 9'))
    shutil.rmtree(store.content_path(first))
    with pytest.raises(ServiceUnavailable, match="damaged"):
        store.fetch_content(first)
    assert not store.content_path(first).exists()


@pytest.mark.database
def test_pieces_of_an_upload_go_to_any_gateway(world: World, machines: Machines) -> None:
    files = adapter_bytes()
    upload = actions.begin_upload(
        actor=world.member,
        tenant=world.acme,
        served_model=served(),
        name="tone",
        sizes={name: len(content) for name, content in files.items()},
    )

    def send(name: str, begin: int, *chunks: bytes) -> int:
        return actions.append_chunk(
            actor=world.member, upload=upload, file=name, offset=begin, chunks=chunks
        )

    def dropped() -> Iterator[bytes]:
        yield weights[:50]
        raise ConnectionResetError("the client is gone")

    weights = files[WEIGHTS_FILE]
    with pytest.raises(ServiceUnavailable):
        actions.append_chunk(
            actor=world.member, upload=upload, file=WEIGHTS_FILE, offset=0, chunks=dropped()
        )
    machines.use("second")
    assert actions.received_bytes(upload) == {CONFIG_FILE: 0, WEIGHTS_FILE: 50}
    with pytest.raises(OffsetMismatch):
        send(WEIGHTS_FILE, 0, weights)
    assert send(WEIGHTS_FILE, 50, weights[50:70], weights[70:90]) == 90
    machines.use("gateway")
    assert send(WEIGHTS_FILE, 90, weights[90:]) == len(weights)
    send(CONFIG_FILE, 0, files[CONFIG_FILE])
    machines.use("third")
    version = actions.finish_upload(actor=world.member, upload=upload)
    assert (store.content_path(version.digest) / WEIGHTS_FILE).read_bytes() == weights
    assert {name.split("/")[0] for name in object_names(machines.entry)} == {"adapters"}


@pytest.mark.database
def test_an_upload_that_is_finished_twice_at_once_stores_whole_objects(
    world: World, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = adapter_bytes()
    upload = actions.begin_upload(
        actor=world.member,
        tenant=world.acme,
        served_model=served(),
        name="tone",
        sizes={name: len(content) for name, content in files.items()},
    )
    for name, content in files.items():
        actions.append_chunk(
            actor=world.member, upload=upload, file=name, offset=0, chunks=[content]
        )
    upload_folder = store._upload

    def while_another_one_joins(digest: str, staged: Path, on_bytes: Any) -> None:
        with monkeypatch.context() as patch:
            # It ends before it has written anything.
            patch.setattr("shutil.copyfileobj", lambda source, target: interrupt())
            with pytest.raises(KeyboardInterrupt):
                actions.finish_upload(actor=world.member, upload=upload)
        upload_folder(digest, staged, on_bytes)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_upload", while_another_one_joins)
    version = actions.finish_upload(actor=world.member, upload=upload)
    shutil.rmtree(store.content_path(version.digest))
    assert adapter_digest(store.fetch_content(version.digest)) == version.digest


def test_content_that_is_stored_again_and_again_takes_one_object(
    world: World, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served()
    added(world.member, world.acme, model)
    first = object_names(machines.entry)
    with pytest.raises(Conflict, match="exactly this content"):
        added(world.member, world.acme, model)
    assert object_names(machines.entry) == first
    # An old one may be a sweep's in this moment, so it's replaced.
    modified_at = store.object_storage.modified_at

    def long_ago(name: str) -> datetime:
        return modified_at(name) - timedelta(days=name in first)

    monkeypatch.setattr(store.object_storage, "modified_at", long_ago)
    added(world.outsider, world.rival, model)
    (second,) = object_names(machines.entry)
    assert [second] != first


@pytest.mark.database
def test_objects_go_when_no_version_has_them_and_not_before(
    world: World, machines: Machines
) -> None:
    model = served()
    mine = checked(world.owner, world.acme, model)
    theirs = checked(world.outsider, world.rival, model)
    assert mine.digest == theirs.digest
    actions.delete_version(actor=world.owner, version=mine)
    store.delete_orphans(actions.referenced_digests, -1)
    assert store.has_content(theirs.digest)
    actions.delete_version(actor=world.outsider, version=theirs)
    work.sweep()  # requests that began with it may still need it
    assert store.has_content(theirs.digest)
    store.delete_orphans(actions.referenced_digests, -1)
    assert object_names(machines.entry) == []


WRITE = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from django.conf import settings
entry, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
settings.configure(
    STORAGES={"objects": entry},
    QUIRE=SimpleNamespace(adapters_dir=folder, object_cache_bytes=1),
    INSTALLED_APPS=[
        "django.contrib.contenttypes", "tenants", "django.contrib.auth", "storage", "catalog",
        "metering", "adapters",
    ],
    AUTH_USER_MODEL="tenants.User",
)
import django
django.setup()
from adapters import store
if digest := sys.argv[3]:
    store.fetch_content(digest)
staged = store.staging_dir()
(staged / "adapter_config.json").write_text("{}")
(staged / "adapter_model.safetensors").write_bytes(b"x" * (64 << 20))
store.store_content(staged)
"""


def kill_in_transfer(s3: str, machines: Machines, digest: str = "") -> None:
    """Kill a process while it fetches an adapter, or stores one of 64 MiB."""
    proxy = KillingProxy(s3, num_bytes=20 << 20)
    options = machines.entry["OPTIONS"] | {"endpoint_url": proxy.address}
    entry = machines.entry | {"OPTIONS": options}
    folder = store.adapters_dir()
    command = [sys.executable, "-c", WRITE, json.dumps(entry), str(folder), digest]
    proxy.process = subprocess.Popen(command, env={"PYTHONPATH": f"{APPS_DIR}:{BASE_DIR}"})
    try:
        assert proxy.process.wait(180) == -signal.SIGKILL
    finally:
        proxy.close()
        proxy.process.kill()


def test_a_process_that_is_killed_in_an_upload_leaves_no_adapter(
    s3: str, machines: Machines
) -> None:
    folder = store.adapters_dir()
    kill_in_transfer(s3, machines)
    assert object_names(machines.entry) == []
    assert not any(len(path.name) == 64 for path in folder.iterdir())
    store.delete_orphans(lambda digests: set(), -10)
    assert not any(path.is_file() for path in folder.rglob("*"))


def test_what_a_killed_fetch_left_goes_with_a_later_one(
    world: World, s3: str, machines: Machines
) -> None:
    staged = store.staging_dir()
    (staged / CONFIG_FILE).write_text("{}")
    (staged / WEIGHTS_FILE).write_bytes(b"x" * (64 << 20))
    large, _ = store.store_content(staged)
    small = added(world.member, world.acme, served()).digest
    machines.use("node")
    kill_in_transfer(s3, machines, large)
    folder = store.adapters_dir()
    shards = list(folder.iterdir())
    assert shards
    for path in shards:
        os.utime(path, (1e9, 1e9))
    store.fetch_content(small)
    assert [path.name for path in folder.iterdir()] == [small]
