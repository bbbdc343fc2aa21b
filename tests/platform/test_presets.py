"""Presets of the playground: a tenant's, changed by their authors and by admins."""

from __future__ import annotations

import pytest

from common.errors import Conflict, NotFound, PermissionDenied
from storage.access import access_presets
from storage.actions import presets
from storage.models import PlaygroundPreset
from tenants.models import AuditEntry
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def test_members_save_presets_and_admins_change_all(world: World) -> None:
    acme = {"tenant": world.acme, "name": "Brief", "options": {}}
    row = presets.save_preset(actor=world.member, prompt="One", **acme)
    for name, error in (
        ("viewer", PermissionDenied),
        ("outsider", NotFound),
    ):
        with pytest.raises(error):
            presets.save_preset(actor=world.user(name), prompt="Two", **acme)
        with pytest.raises(error):
            presets.delete_preset(actor=world.user(name), public_id=row.public_id)
    other = presets.save_preset(actor=world.admin, prompt="A", **{**acme, "name": "Admin's"})
    with pytest.raises(PermissionDenied):
        presets.delete_preset(actor=world.member, public_id=other.public_id)
    with pytest.raises(PermissionDenied):
        presets.save_preset(actor=world.member, prompt="B", **{**acme, "name": "Admin's"})
    changed = presets.save_preset(actor=world.operator, prompt="Three", **acme)
    assert (changed.pk, changed.user, changed.prompt) == (row.pk, world.member, "Three")
    names = access_presets(world.viewer, world.acme).values_list("name", flat=True)
    assert list(names) == ["Admin's", "Brief"]
    assert not access_presets(world.outsider, world.acme).exists()
    presets.delete_preset(actor=world.admin, public_id=row.public_id)
    verbs = AuditEntry.objects.filter(action__startswith="preset.").values_list("action", flat=True)
    assert sorted(verbs) == ["preset.delete", *["preset.save"] * 3]


def test_the_same_name_in_two_tenants_is_two_presets(world: World) -> None:
    for actor, tenant in ((world.owner, world.acme), (world.outsider, world.rival)):
        presets.save_preset(
            actor=actor, tenant=tenant, name="Brief", prompt=tenant.slug, options={}
        )
    assert [row.prompt for row in access_presets(world.owner, world.acme)] == ["acme"]
    assert [row.prompt for row in access_presets(world.outsider, world.rival)] == ["rival"]


def test_a_tenant_has_a_bounded_number_of_presets(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "MAX_PRESETS", 1)
    body = {"actor": world.member, "tenant": world.acme, "prompt": "x", "options": {}}
    presets.save_preset(name="One", **body)
    with pytest.raises(Conflict):
        presets.save_preset(name="Two", **body)
    presets.save_preset(name="One", **body)
    assert PlaygroundPreset.objects.count() == 1


def test_two_members_who_save_a_name_at_once_get_no_database_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"tenant": world.acme, "name": "Brief", "options": {}}

    def other_saves_first(prefix: str) -> str:
        monkeypatch.undo()
        presets.save_preset(actor=world.admin, prompt="Theirs", **body)
        return "preset-" + "0" * 32

    monkeypatch.setattr(presets, "new_id", other_saves_first)
    with pytest.raises(Conflict, match="already a preset Brief"):
        presets.save_preset(actor=world.member, prompt="Mine", **body)
