"""Adapters: versions, their check, which one answers, and who may."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery.signals import worker_shutting_down
from django.utils import timezone

from adapters import access, actions, store, tasks
from adapters import version_jobs as work
from adapters.models import Adapter, AdapterVersion, VersionState
from catalog.actions import delete_model
from catalog.models import DesiredState, ServedModel
from common.errors import AdapterInvalid, AdapterTooLarge, Conflict, NotFound, PermissionDenied
from engine.contract.errors import InvalidRequest
from engine.contract.lora import adapter_digest
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry
from tests.adapter_files import adapter_folder
from tests.platform.adapters import added, checked, served
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("adapter_store")]
#: What rows, their locks and their constraints decide; files and names are the same beside any.
database = pytest.mark.database


def test_a_version_is_checked_probed_and_ready(world: World) -> None:
    version = checked(world.member, world.acme, served())
    assert version.state == VersionState.READY
    assert version.rank == 8
    assert version.report["probe"]["passed"]
    assert adapter_digest(store.content_path(version.digest)) == version.digest
    done = list(AuditEntry.objects.filter(tenant=world.acme).values_list("action", flat=True))
    assert {"adapter.create", "adapter.add", "adapter.ready"} <= set(done)


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("refuse", "lora_A holds NaN."),
        ("differ", "Its answers differ from those of the merged model by up to 3.5."),
        ("crash", "The check ended without a result"),
    ],
)
def test_what_fails_its_check_can_never_go_live(world: World, says: str, text: str) -> None:
    version = checked(world.owner, world.acme, served(), says=says, promote=True)
    assert version.state == VersionState.FAILED
    assert version.problem.startswith(text)
    with pytest.raises(Conflict, match="only a version whose check has passed"):
        actions.promote(actor=world.owner, version=version)


@database
def test_promote_canary_and_rollback(world: World) -> None:
    model = served()
    first = checked(world.owner, world.acme, model, promote=True)
    second = checked(world.owner, world.acme, model, seed=2)
    assert (first.state, second.state, second.number) == ("live", "ready", 2)
    alias = actions.promote(actor=world.admin, version=second, percent=20)
    assert (alias.version, alias.canary, alias.canary_percent) == (first, second, 20)
    alias = actions.rollback(actor=world.admin, alias=alias)
    assert (alias.version, alias.canary) == (first, None)
    alias = actions.promote(actor=world.admin, version=second)
    assert (alias.version, alias.previous) == (second, first)
    alias = actions.rollback(actor=world.admin, alias=alias)
    assert (alias.version, alias.previous) == (first, second)
    states = {v.number: v.state for v in first.adapter.versions.all()}
    assert states == {1: "live", 2: "ready"}
    entry = AuditEntry.objects.filter(action="adapter.rollback").latest("pk")
    assert entry.details["changes"] == {"version": [2, 1]}


def test_an_alias_of_its_own_tries_a_version_before_it_goes_live(world: World) -> None:
    model = served()
    checked(world.owner, world.acme, model, promote=True)
    second = checked(world.owner, world.acme, model, seed=2)
    alias = actions.promote(actor=world.owner, version=second, alias="tone-next")
    assert alias.version == second
    local_alias = access.access_alias(world.owner, second.adapter, "")
    with pytest.raises(Conflict, match="the adapter's own name"):
        actions.delete_alias(actor=world.owner, alias=local_alias)
    actions.delete_alias(actor=world.owner, alias=alias)
    second.refresh_from_db()
    assert second.state == VersionState.READY


@database
def test_live_versions_can_be_neither_retired_nor_deleted(world: World) -> None:
    version = checked(world.owner, world.acme, served(), promote=True)
    for operation in (actions.retire_version, actions.delete_version):
        with pytest.raises(Conflict):
            operation(actor=world.owner, version=version)
    with pytest.raises(Conflict, match="offline"):
        actions.delete_adapter(actor=world.owner, adapter=version.adapter)
    actions.take_offline(actor=world.owner, adapter=version.adapter)
    alias = access.access_alias(world.owner, version.adapter, "")
    assert actions.rollback(actor=world.owner, alias=alias).version == version
    actions.take_offline(actor=world.owner, adapter=version.adapter)
    version.refresh_from_db()
    actions.retire_version(actor=world.owner, version=version)
    with pytest.raises(Conflict):
        actions.promote(actor=world.owner, version=version)
    actions.delete_adapter(actor=world.owner, adapter=version.adapter)
    assert not Adapter.objects.exists()


@database
def test_content_goes_when_no_version_has_it(world: World) -> None:
    model = served()
    mine = checked(world.owner, world.acme, model)
    theirs = checked(world.outsider, world.rival, model)
    assert mine.digest == theirs.digest
    actions.delete_version(actor=world.owner, version=mine)
    assert store.delete_orphans(actions.referenced_digests, -1) == 0
    assert store.has_content(theirs.digest)
    actions.delete_version(actor=world.outsider, version=theirs)
    assert work.sweep() == 0
    assert store.has_content(theirs.digest)
    assert store.delete_orphans(actions.referenced_digests, -1) == 1
    assert not store.has_content(theirs.digest)


def test_roles(world: World) -> None:
    model = served()
    with pytest.raises(PermissionDenied):
        added(world.viewer, world.acme, model)
    with pytest.raises(NotFound):
        added(world.outsider, world.acme, model)
    with pytest.raises(PermissionDenied):
        added(world.owner, None, model)
    with pytest.raises(PermissionDenied, match="Only admins make adapters live"):
        added(world.member, world.acme, model, promote=True)
    version = checked(world.member, world.acme, model)
    for name, expected in (("member", PermissionDenied), ("outsider", NotFound)):
        with pytest.raises(expected):
            actions.promote(actor=world.user(name), version=version)
        with pytest.raises(expected):
            actions.delete_adapter(actor=world.user(name), adapter=version.adapter)
    alias = actions.promote(actor=world.admin, version=version)
    for name, expected in (("member", PermissionDenied), ("outsider", NotFound)):
        with pytest.raises(expected):
            actions.rollback(actor=world.user(name), alias=alias)
    with pytest.raises(NotFound):
        access.access_adapter(world.outsider, world.acme, version.adapter_id)
    with pytest.raises(NotFound):
        access.access_adapter(world.outsider, world.rival, version.adapter_id)
    assert access.access_adapter(world.viewer, world.acme, version.adapter_id)


@database
def test_shared_adapters_are_seen_by_all_and_changed_by_operators(world: World) -> None:
    version = checked(world.operator, None, served(), promote=True)
    adapter = access.access_adapter(world.outsider, world.rival, version.adapter_id)
    with pytest.raises(PermissionDenied):
        actions.take_offline(actor=world.outsider, adapter=adapter)
    hidden = checked(world.operator, None, served("secret", public=False), name="x")
    with pytest.raises(NotFound):
        access.access_adapter(world.outsider, world.rival, hidden.adapter_id)


BAD_NAMES = ["a:b", "-a", "a b", "a\n", "x" * 101, "../up", "a//b", "a/./b", "a/../b", "a/..", "a/"]


@pytest.mark.parametrize("name", ["", *BAD_NAMES])
def test_fault_19_bad_names_are_refused(world: World, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        added(world.owner, world.acme, served(), name=name)
    assert caught.value.param == "name"


@pytest.mark.parametrize(
    "name", ["a/b", "owner/name-7b.v2", "a/.b/c", "a/_b", "me@there/x", "a...b"]
)
def test_names_may_be_paths(world: World, name: str) -> None:
    assert added(world.owner, world.acme, served(), name=name).adapter.name == name


def test_names_that_there_were_before_their_rule_go_on_working(world: World) -> None:
    model = served()
    version = checked(world.owner, world.acme, model, promote=True)
    for rows in (Adapter.objects.all(), version.adapter.aliases.all()):
        rows.update(name="a//b")
    later = checked(world.owner, world.acme, model, name="a//b", seed=2)
    assert actions.promote(actor=world.owner, version=later).version == later
    assert (later.number, later.adapter) == (2, version.adapter)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_alias_is_refused_by_the_field_that_it_came_in(world: World, name: str) -> None:
    version = checked(world.owner, world.acme, served(), promote=True)
    with pytest.raises(InvalidRequest, match=r"^alias: ") as caught:
        actions.promote(actor=world.owner, version=version, alias=name)
    assert caught.value.param == "alias"


def test_an_alias_that_a_model_has_is_refused_by_its_field(world: World) -> None:
    version = checked(world.owner, world.acme, served(aliases=["other"]), promote=True)
    with pytest.raises(Conflict) as caught:
        actions.promote(actor=world.owner, version=version, alias="other")
    assert caught.value.param == "alias"


def test_a_models_name_is_no_adapters_name(world: World) -> None:
    model = served(aliases=["other"])
    for name in ("base", "other"):
        with pytest.raises(Conflict):
            added(world.owner, world.acme, model, name=name)
    with pytest.raises(NotFound):
        added(world.owner, world.acme, served("secret", public=False))


@database
def test_the_same_content_is_no_second_version(world: World) -> None:
    model = served()
    added(world.owner, world.acme, model)
    with pytest.raises(Conflict, match="Version 1"):
        added(world.owner, world.acme, model)


@database
def test_a_tenant_has_so_much_room(world: World, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"adapter_bytes": 300})
    model = served()
    added(world.owner, world.acme, model)
    with pytest.raises(AdapterTooLarge, match="delete a version first"):
        added(world.owner, world.acme, model, seed=1)
    added(world.outsider, world.rival, model, seed=1)


@database
def test_a_dead_workers_version_is_taken_up_by_another(world: World) -> None:
    version = added(world.owner, world.acme, served())
    stuck = AdapterVersion.objects.filter(pk=version.pk)
    stuck.update(state=VersionState.PROBING)
    work.process_version(version.pk)
    assert stuck.get().state == VersionState.PROBING  # another worker's
    assert work.waiting() == []
    later = timezone.now() + work.LEASE + timedelta(seconds=1)
    assert work.waiting(later) == [version.pk]
    work.process_version(version.pk)
    assert stuck.get().state == VersionState.READY


@pytest.mark.parametrize(
    ("says", "step"), [("hang", "_checked"), ("hang in the probe", "_probing")]
)
def test_a_worker_that_is_told_to_end_gives_its_check_to_the_next_one(
    world: World, monkeypatch: pytest.MonkeyPatch, says: str, step: str
) -> None:
    """Neither what it checks nor what waits behind that keeps it."""
    version = added(world.owner, world.acme, served(), says=says)
    later_version = added(world.owner, world.acme, ServedModel.objects.get(), name="behind")
    monkeypatch.setattr(work, "shutdown_event", threading.Event())
    monkeypatch.setattr(tasks, "close_old_connections", lambda: None)  # the test's
    go = getattr(work, step)

    def counted_step(*args: Any) -> Any:
        worker_shutting_down.send(sender="a worker")
        return go(*args)

    monkeypatch.setattr(work, step, counted_step)
    tasks._work(version.pk)
    tasks._work(later_version.pk)
    rows = {row.pk: row for row in AdapterVersion.objects.all()}
    assert {row.state for row in rows.values()} == {VersionState.UPLOADED}
    assert work.waiting() == [version.pk]  # the next sweep's
    later = timezone.now() + work.CLAIM_TTL
    assert set(work.waiting(later)) == {version.pk, later_version.pk}


@database
def test_a_version_deleted_while_it_is_checked_stays_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = added(world.owner, world.acme, served(), says="hang")
    monkeypatch.setattr(work, "BEAT_S", 0.0)
    claimed = work._claim

    def then_deleted(*args: Any, **kwargs: Any) -> Any:
        claimed_ids = claimed(*args, **kwargs)
        AdapterVersion.objects.filter(pk=version.pk).delete()
        return claimed_ids

    monkeypatch.setattr(work, "_claim", then_deleted)
    work.process_version(version.pk)
    assert not AdapterVersion.objects.exists()


def test_one_process_checks_and_then_probes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    version = added(world.owner, world.acme, served(), says="hang in the probe")
    monkeypatch.setattr(work, "BEAT_S", 0.0)
    noted, seen = work._probing, []

    def then_deleted(ours: AdapterVersion) -> None:
        noted(ours)
        rows = AdapterVersion.objects.filter(pk=version.pk)
        seen.append(rows.get().state)
        rows.delete()

    monkeypatch.setattr(work, "_probing", then_deleted)
    work.process_version(version.pk)
    assert seen == [VersionState.PROBING]
    assert not AdapterVersion.objects.exists()


def test_a_probe_that_breaks_is_no_pass(world: World) -> None:
    version = added(world.owner, world.acme, served(), says="crash in the probe")
    work.process_version(version.pk)
    version.refresh_from_db()
    assert version.state == VersionState.FAILED
    assert "without a result (status 3)" in version.report["error"]["message"]


# -- from folders -----------------------------------------------------------------------------


def from_folder(world: World, path: object, actor: Any = None) -> AdapterVersion:
    return actions.add_from_folder(
        actor=actor or world.operator,
        tenant=None,
        served_model=served(),
        name="tone",
        path=str(path),
    )


def test_operators_add_from_the_folders_that_a_setting_names(world: World, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "allowed" / "tone")
    version = from_folder(world, folder)
    assert version.digest == adapter_digest(folder)
    assert version.source == str(folder)


@pytest.mark.parametrize("where", ["elsewhere", "allowed/../elsewhere", "allowed/link"])
def test_no_path_leads_out_of_them(world: World, tmp_path: Path, where: str) -> None:
    adapter_folder(tmp_path / "elsewhere")
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequest, match="in none of the folders") as caught:
        from_folder(world, tmp_path / where)
    assert caught.value.param == "path"


@pytest.mark.parametrize("where", ["loop", "x" * 300, "~nobody-of-this-name/x", "far/loop/x"])
def test_a_path_that_leads_nowhere_is_refused_by_its_field(
    world: World, adapter_store: Path, where: str
) -> None:
    (adapter_store / "far").mkdir(parents=True)
    for loop in (adapter_store / "loop", adapter_store / "far" / "loop"):
        loop.symlink_to(loop)
    model = served()
    for path in (where, str(adapter_store / where)):
        with pytest.raises(InvalidRequest) as caught:
            actions.add_from_folder(
                actor=world.operator, tenant=None, served_model=model, name="tone", path=path
            )
        assert caught.value.param == "path"


def test_a_file_that_links_elsewhere_is_refused(world: World, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "allowed" / "tone")
    (folder / "adapter_config.json").rename(tmp_path / "config")
    (folder / "adapter_config.json").symlink_to(tmp_path / "config")
    with pytest.raises(AdapterInvalid):
        from_folder(world, folder)


def test_tenants_may_not_read_the_servers_folders(world: World, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "allowed" / "tone")
    with pytest.raises(PermissionDenied):
        from_folder(world, folder, actor=world.owner)


def test_a_pickle_is_refused_by_any_name(world: World, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "allowed" / "tone")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"PK\x03\x04" + b"\0" * 60)
    with pytest.raises(AdapterInvalid, match="a pickle under another name"):
        from_folder(world, folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterInvalid, match=r"adapter_model\.bin can't be read as weights alone"):
        actions.add_from_folder(
            actor=SYSTEM_ACTOR,
            tenant=None,
            served_model=served("b2"),
            name="tone",
            path=str(folder),
        )


def test_an_operators_adapter_model_bin_is_stored_as_safetensors(
    world: World, tmp_path: Path
) -> None:
    folder = adapter_folder(tmp_path / "allowed" / "tone")
    weights = folder / "adapter_model.safetensors"
    convert = (
        "import sys, torch; from safetensors.torch import load_file;"
        "torch.save(load_file(sys.argv[1]), sys.argv[2])"
    )
    files = [str(weights), str(folder / "adapter_model.bin")]
    subprocess.run([sys.executable, "-c", convert, *files], check=True)
    weights.unlink()
    version = from_folder(world, folder)
    stored = store.content_path(version.digest)
    assert sorted(path.name for path in stored.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


# -- from the hub -----------------------------------------------------------------------------


def test_without_the_hub_a_version_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    version = actions.add_from_hub(
        actor=world.admin,
        tenant=world.acme,
        served_model=served(),
        name="tone",
        repository="somebody/tone",
    )
    work.process_version(version.pk)
    version.refresh_from_db()
    assert version.state == VersionState.FAILED
    assert "hub" in version.problem
    with pytest.raises(InvalidRequest):
        actions.add_from_hub(
            actor=world.admin,
            tenant=world.acme,
            served_model=served("b2"),
            name="tone",
            repository="../../etc",
        )


def test_a_hub_that_nobody_reaches_fails_the_version_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the client that the hub's library really has, at a port where nobody listens."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    version = actions.add_from_hub(
        actor=world.admin,
        tenant=world.acme,
        served_model=served(),
        name="tone",
        repository="somebody/tone",
    )
    work.process_version(version.pk)
    version.refresh_from_db()
    assert version.state == VersionState.FAILED
    assert "The hub is unreachable" in version.problem


@database
def test_a_model_with_adapters_is_deleted_after_them(world: World) -> None:
    model = served()
    version = checked(world.owner, world.acme, model, promote=True)
    model.desired_state = DesiredState.UNLOADED
    model.save()
    with pytest.raises(Conflict, match=r"^base has adapters \(tone\): delete them first\.$"):
        delete_model(actor=SYSTEM_ACTOR, model=model)
    actions.take_offline(actor=world.owner, adapter=version.adapter)
    actions.delete_adapter(actor=world.owner, adapter=version.adapter)
    delete_model(actor=SYSTEM_ACTOR, model=model)
    assert not ServedModel.objects.exists()
