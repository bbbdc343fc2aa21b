"""API keys: made, hashed, shown once, revoked."""

from datetime import timedelta

import pytest
from django.utils import timezone

from common.errors import Conflict, NotFound, PermissionDenied
from engine.contract.errors import InvalidRequest
from tenants import actions
from tenants import api_keys as secrets
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def test_a_key_has_its_prefix_and_256_bits(world: World) -> None:
    assert world.secret.startswith("sk-quire-")
    secret = world.secret.removeprefix("sk-quire-" + world.key.public_id)
    assert len(secret) == 43
    assert secret.isalnum()
    assert 62**43 > 2**256


def test_the_database_holds_the_hash_alone(world: World) -> None:
    row = ApiKey.objects.filter(pk=world.key.pk).values().get()
    secret = world.secret.removeprefix("sk-quire-" + world.key.public_id)
    assert not any(secret in str(value) for value in row.values())
    assert row["digest"] == secrets.hash_key(world.secret)


def test_neither_audit_nor_repr_show_the_secret(world: World) -> None:
    key = actions.create_key(actor=world.member, tenant=world.acme)
    assert key.secret not in repr(key)
    for entry in AuditEntry.objects.all():
        text = f"{entry} {entry.details} {entry.target_label}"
        assert key.secret not in text
        assert key.key.digest not in text


def test_two_keys_share_nothing(world: World) -> None:
    keys = [actions.create_key(actor=SYSTEM_ACTOR, tenant=world.acme) for _ in range(20)]
    assert len({new.secret for new in keys}) == 20
    assert len({new.key.public_id for new in keys}) == 20


def test_viewers_make_no_keys_and_outsiders_find_no_tenant(world: World) -> None:
    with pytest.raises(PermissionDenied):
        actions.create_key(actor=world.viewer, tenant=world.acme)
    with pytest.raises(NotFound):
        actions.create_key(actor=world.outsider, tenant=world.acme)


@pytest.mark.parametrize("scopes", [[], ["inference", "root"], "inference", [3]])
def test_unknown_scopes_are_refused(world: World, scopes: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        actions.create_key(actor=world.owner, tenant=world.acme, scopes=scopes)  # type: ignore[arg-type]
    assert caught.value.param == "scopes"


def test_the_operators_scope_is_the_operators_to_give(world: World) -> None:
    with pytest.raises(PermissionDenied):
        actions.create_key(actor=world.owner, tenant=world.acme, scopes=["operator"])
    key = actions.create_key(actor=world.operator, tenant=world.acme, scopes=["operator"])
    assert key.key.scopes == ["operator"]


def test_a_key_must_expire_in_the_future(world: World) -> None:
    past = timezone.now() - timedelta(seconds=1)
    with pytest.raises(InvalidRequest) as caught:
        actions.create_key(actor=world.owner, tenant=world.acme, expires_at=past)
    assert caught.value.param == "expires_at"
    soon = timezone.now() + timedelta(days=1)
    key = actions.create_key(actor=world.owner, tenant=world.acme, expires_at=soon).key
    assert key.state() == "active"
    assert key.state(soon) == "expired"


def test_a_tenant_that_is_off_gets_no_keys(world: World) -> None:
    tenant = actions.set_tenant_active(actor=SYSTEM_ACTOR, tenant=world.acme, active=False)
    with pytest.raises(Conflict):
        actions.create_key(actor=SYSTEM_ACTOR, tenant=tenant)


def test_members_revoke_their_own_keys_and_admins_any(world: World) -> None:
    other = actions.create_key(actor=world.owner, tenant=world.acme).key
    with pytest.raises(PermissionDenied):
        actions.revoke_key(actor=world.member, key=other)
    with pytest.raises(NotFound):
        actions.revoke_key(actor=world.outsider, key=other)
    assert actions.revoke_key(actor=world.member, key=world.key).state() == "revoked"
    assert actions.revoke_key(actor=world.admin, key=other).state() == "revoked"


def test_revoking_twice_keeps_the_first_time(world: World) -> None:
    first = actions.revoke_key(actor=world.admin, key=world.key)
    again = actions.revoke_key(actor=world.admin, key=world.key)
    assert again.revoked_at == first.revoked_at
    assert AuditEntry.objects.filter(action="api_key.revoke").count() == 1


def test_the_prefix_is_enough_to_recognize_a_key_and_nothing_more(world: World) -> None:
    assert world.secret.startswith(world.key.prefix.removesuffix("..."))
    assert len(world.key.prefix) < 25


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sk-quire-",
        "sk-quire-" + "a" * 52,
        "sk-quire-" + "a" * 54,
        "sk-other-" + "a" * 53,
        "sk-quire-" + "é" * 53,
        "sk-quire-" + "a" * 52 + "\n",
        "sk-quire-" + "a" * 52 + "\0",
        "sk-quire-" + "a" * 10_000_000,
    ],
)
def test_malformed_keys_have_no_public_id(text: str) -> None:
    assert secrets.public_id_of(text) is None
    assert len(secrets.hash_key(text)) == 64


def test_a_lone_surrogate_is_hashed_like_anything_else() -> None:
    assert len(secrets.hash_key("sk-quire-\ud800")) == 64


# -- rotation ---------------------------------------------------------------------------------


def test_a_rotated_key_has_a_successor_for_the_same_and_ends_soon(world: World) -> None:
    end = timezone.now() + timedelta(days=90)
    old = actions.create_key(
        actor=world.member,
        tenant=world.acme,
        name="ci",
        scopes=["models:read"],
        expires_at=end,
        requests_per_minute=7,
        tokens_per_minute=900,
    ).key
    rotated = actions.rotate_key(actor=world.member, key=old)
    for name in ("tenant", "name", "scopes", "expires_at", "requests_per_minute"):
        assert getattr(rotated.key, name) == getattr(old, name), name
    assert rotated.key.tokens_per_minute == 900
    assert rotated.key.digest == secrets.hash_key(rotated.secret) != old.digest
    old.refresh_from_db()
    assert old.state() == "active"
    assert old.state(timezone.now() + timedelta(hours=23)) == "active"
    assert old.state(timezone.now() + timedelta(hours=25)) == "expired"
    assert AuditEntry.objects.filter(action="api_key.rotate", target_id=str(old.pk)).exists()


def test_without_an_overlap_the_old_key_is_revoked(world: World) -> None:
    rotated = actions.rotate_key(actor=world.member, key=world.key, overlap=timedelta(0))
    world.key.refresh_from_db()
    assert (world.key.state(), rotated.key.state()) == ("revoked", "active")


def test_an_overlap_never_makes_a_key_live_longer(world: World) -> None:
    soon = timezone.now() + timedelta(hours=1)
    old = actions.create_key(actor=world.member, tenant=world.acme, expires_at=soon).key
    actions.rotate_key(actor=world.member, key=old, overlap=timedelta(days=7))
    old.refresh_from_db()
    assert old.expires_at == soon


def test_only_its_maker_and_admins_rotate_a_key(world: World) -> None:
    other_key = actions.create_key(actor=world.owner, tenant=world.acme).key
    with pytest.raises(PermissionDenied):
        actions.rotate_key(actor=world.member, key=other_key)
    with pytest.raises(NotFound):
        actions.rotate_key(actor=world.outsider, key=other_key)
    assert actions.rotate_key(actor=world.admin, key=other_key).key.created_by == world.admin
    assert ApiKey.objects.filter(created_by=world.member).count() == 1


def test_what_cannot_be_rotated_is_refused_and_nothing_is_made(world: World) -> None:
    count = ApiKey.objects.count()
    with pytest.raises(InvalidRequest, match="0 to 30 days"):
        actions.rotate_key(actor=world.member, key=world.key, overlap=timedelta(days=31))
    actions.revoke_key(actor=world.member, key=world.key)
    with pytest.raises(Conflict, match="revoked"):
        actions.rotate_key(actor=world.member, key=world.key)
    operators = actions.create_key(actor=SYSTEM_ACTOR, tenant=world.acme, scopes=["operator"]).key
    with pytest.raises(PermissionDenied):
        actions.rotate_key(actor=world.owner, key=operators)
    operators.refresh_from_db()
    assert operators.expires_at is None
    assert ApiKey.objects.count() == count + 1
