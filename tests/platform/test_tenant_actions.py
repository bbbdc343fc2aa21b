"""Creating and changing tenants."""

import pytest

from common.errors import Conflict, NotFound, PermissionDenied
from engine.contract.errors import InvalidRequest
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.models import AuditEntry, Role, Tenant
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def test_a_new_tenant_has_a_slug_an_owner_and_a_secret_salt(world: World) -> None:
    tenant = actions.create_tenant(actor=world.operator, name="Blue Sky", owner=world.member)
    assert tenant.slug == "blue-sky"
    assert tenant.memberships.get().role == Role.OWNER
    assert len(bytes.fromhex(tenant.salt)) == 32
    assert tenant.salt != world.acme.salt


def test_the_cache_namespace_is_stable_apart_and_tells_nothing_of_the_salt(world: World) -> None:
    tenant = Tenant.objects.get(pk=world.acme.pk)
    assert tenant.cache_namespace == world.acme.cache_namespace
    assert len(tenant.cache_namespace) == 32
    assert tenant.cache_namespace != world.rival.cache_namespace
    assert tenant.salt not in tenant.cache_namespace
    assert tenant.cache_namespace not in tenant.salt


def test_a_new_salt_gives_a_new_namespace(world: World) -> None:
    initial_cache_namespace = world.acme.cache_namespace
    changed = actions.rotate_cache_salt(actor=world.owner, tenant=world.acme)
    assert changed.cache_namespace != initial_cache_namespace
    entry = AuditEntry.objects.first()
    assert entry is not None
    assert entry.action == "tenant.rotate_cache_salt"
    assert changed.salt not in str(entry.details)


def test_members_may_not_create_tenants(world: World) -> None:
    with pytest.raises(PermissionDenied):
        actions.create_tenant(actor=world.owner, name="Mine")


def test_a_taken_slug_is_a_conflict_and_leaves_the_transaction_usable(world: World) -> None:
    with pytest.raises(Conflict):
        actions.create_tenant(actor=CLI_ACTOR, name="Other", slug="acme")
    assert Tenant.objects.count() == 2


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"name": "X", "slug": "Not A Slug"}, "slug"),
        ({"name": "X", "slug": "-x"}, "slug"),
        ({"name": "X", "slug": "x\n"}, "slug"),
        ({"name": "X" * 201, "slug": "x"}, "name"),
        ({"name": "", "slug": "x"}, "name"),
        ({"name": "X", "weight": 0}, "weight"),
        ({"name": "X", "weight": -1.0}, "weight"),
        ({"name": "X", "weight": 1e9}, "weight"),
        ({"name": "X", "weight": float("nan")}, "weight"),
        ({"name": "X", "max_priority": 5000}, "max_priority"),
        ({"name": "X", "requests_per_minute": -1}, "requests_per_minute"),
        ({"name": "X", "tokens_per_minute": "many"}, "tokens_per_minute"),
        ({"name": "X", "keep_usage_days": 34}, "keep_usage_days"),
        ({"name": "X", "salt": "00"}, "salt"),
        ({"name": "!!!"}, "slug"),
        ({"name": "a\0b", "slug": "nul"}, "name"),
    ],
)
def test_bad_values_are_refused_by_their_name(values: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        actions.create_tenant(actor=CLI_ACTOR, **values)
    assert caught.value.param == param
    assert not Tenant.objects.exists()


def test_admins_change_the_name_and_operators_the_limits(world: World) -> None:
    tenant = actions.update_tenant(actor=world.admin, tenant=world.acme, name="Acme Inc")
    assert tenant.name == "Acme Inc"
    with pytest.raises(PermissionDenied):
        actions.update_tenant(actor=world.owner, tenant=world.acme, weight=100.0)
    tenant = actions.update_tenant(actor=world.operator, tenant=world.acme, weight=100.0)
    assert tenant.weight == 100.0
    entry = AuditEntry.objects.first()
    assert entry is not None
    assert entry.details == {"changes": {"weight": [1.0, 100.0]}}


def test_an_update_that_changes_nothing_writes_no_audit_row(world: World) -> None:
    initial_audit_entry_count = AuditEntry.objects.count()
    actions.update_tenant(actor=world.operator, tenant=world.acme, name="Acme")
    assert AuditEntry.objects.count() == initial_audit_entry_count


def test_strangers_find_no_tenant_to_change(world: World) -> None:
    with pytest.raises(NotFound):
        actions.update_tenant(actor=world.outsider, tenant=world.acme, name="Hacked")
    with pytest.raises(NotFound):
        actions.rotate_cache_salt(actor=world.outsider, tenant=world.acme)


def test_operators_switch_tenants_off_and_on(world: World) -> None:
    assert not actions.set_tenant_active(
        actor=world.operator, tenant=world.acme, active=False
    ).active
    with pytest.raises(PermissionDenied):
        actions.set_tenant_active(actor=world.owner, tenant=world.acme, active=True)
    assert actions.set_tenant_active(actor=world.operator, tenant=world.acme, active=True).active
    verbs = list(AuditEntry.objects.values_list("action", flat=True)[:2])
    assert verbs == ["tenant.activate", "tenant.deactivate"]


@pytest.mark.parametrize("reserves", [(1.0,), (0.8, 0.8)])
def test_fault_45_reserves_that_add_up_too_far_are_refused_with_their_sum(
    reserves: tuple[float, ...],
) -> None:
    for number, reserved in enumerate(reserves[:-1]):
        actions.create_tenant(actor=CLI_ACTOR, name=f"T{number}", kv_reserved_fraction=reserved)
    with pytest.raises(InvalidRequest, match=f"would be {sum(reserves):g};") as caught:
        actions.create_tenant(actor=CLI_ACTOR, name="Last", kv_reserved_fraction=reserves[-1])
    assert caught.value.param == "kv_reserved_fraction"
    assert Tenant.objects.count() == len(reserves) - 1


def test_fault_45_reserves_are_added_up_when_changed_and_when_a_tenant_is_switched_on(
    world: World,
) -> None:
    def reserve(tenant: Tenant, part: float) -> Tenant:
        return actions.update_tenant(actor=world.operator, tenant=tenant, kv_reserved_fraction=part)

    acme = reserve(world.acme, 0.6)
    with pytest.raises(InvalidRequest, match=r"would be 1\.2"):
        reserve(world.rival, 0.6)
    actions.set_tenant_active(actor=world.operator, tenant=acme, active=False)
    reserve(world.rival, 0.6)
    with pytest.raises(InvalidRequest, match=r"would be 1\.2"):
        actions.set_tenant_active(actor=world.operator, tenant=acme, active=True)
    reserve(world.rival, 0.3)
    assert actions.set_tenant_active(actor=world.operator, tenant=acme, active=True).active


def test_fault_45_a_reserve_above_the_tenants_own_maximum_is_refused(world: World) -> None:
    limits = {"kv_reserved_fraction": 0.9, "kv_max_fraction": 0.1}
    with pytest.raises(InvalidRequest, match="above the tenant's own") as caught:
        actions.update_tenant(actor=world.operator, tenant=world.acme, **limits)
    assert caught.value.param == "kv_reserved_fraction"
    actions.update_tenant(actor=world.operator, tenant=world.acme, kv_reserved_fraction=0.5)
    with pytest.raises(InvalidRequest, match="above the tenant's own"):
        actions.update_tenant(actor=world.operator, tenant=world.acme, kv_max_fraction=0.4)
