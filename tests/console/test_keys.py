"""The page of API keys: whose it shows, what it makes, that a secret is shown once."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from tenants import actions
from tenants import api_keys as secrets
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, Role, Tenant, User
from tests.console.conftest import Login

PAGE = "/console/keys/"
NEW = {"tenant": "acme", "name": "reports", "scopes": ["inference", "models:read"]}


def key_of(name: str, slug: str = "acme") -> ApiKey:
    """A key made by this user in a tenant."""
    user, tenant = User.objects.get(username=name), Tenant.objects.get(slug=slug)
    return actions.create_key(actor=user, tenant=tenant, name=f"{name}'s").key


def join(name: str, role: Role) -> None:
    """Make somebody a member of Acme."""
    actions.add_member(
        actor=SYSTEM_ACTOR,
        tenant=Tenant.objects.get(slug="acme"),
        user=User.objects.get(username=name),
        role=role,
    )


def secret_in(html: str) -> str:
    (secret,) = re.findall(rf'value="({secrets.PREFIX}\w+)"', html)
    return str(secret)


def test_a_new_keys_secret_is_in_the_answer_and_never_again(login: Login) -> None:
    client = login("ada")
    answer = client.post(PAGE, NEW | {"lifetime": "30"}, follow=True)
    assert "no-store" in answer["Cache-Control"]
    secret = secret_in(answer.content.decode())
    key = ApiKey.objects.get(name="reports")
    assert key.digest == secrets.hash_key(secret)
    assert (key.tenant.slug, key.scopes) == ("acme", ["inference", "models:read"])
    assert key.expires_at is not None
    assert abs(key.expires_at - timezone.now() - timedelta(days=30)) < timedelta(minutes=5)
    again = client.get(PAGE).content.decode()
    assert key.prefix in again
    assert secret not in again


def test_with_many_keys_the_form_is_one_click_away(login: Login) -> None:
    client = login("ada")
    for count, is_offered in ((5, False), (6, True)):
        while ApiKey.objects.filter(tenant__slug="acme").count() < count:
            key_of("ada")
        page = client.get(PAGE).content.decode()
        assert ('href="#make-title"' in page) is is_offered
        assert 'id="make-title"' in page


def test_a_key_is_rotated_with_an_overlap_or_without(login: Login) -> None:
    client = login("ada")
    first, second = key_of("ada"), key_of("ada")
    answer = client.post(
        f"{PAGE}{first.pk}/rotate/", {"tenant": "acme", "overlap": "168"}, follow=True
    )
    secret_in(answer.content.decode())
    assert "works for a week" in answer.content.decode()
    client.post(f"{PAGE}{second.pk}/rotate/", {"tenant": "acme", "overlap": "0"})
    for key in (first, second):
        key.refresh_from_db()
    assert (first.state(), second.state()) == ("active", "revoked")
    assert ApiKey.objects.count() == 4


def test_fault_46_a_page_reloaded_after_a_key_was_made_makes_nothing_twice(login: Login) -> None:
    client, old = login("ada"), key_of("ada")
    for address, data in (
        (PAGE, NEW),
        (f"{PAGE}{old.pk}/rotate/", {"tenant": "acme", "overlap": "24"}),
        (f"{PAGE}{old.pk}/revoke/", {"tenant": "acme"}),
    ):
        answer = client.post(address, data)
        assert answer.status_code == 302
        assert secrets.PREFIX not in str(client.session.items())
        first = client.get(answer["Location"]).content.decode()
        count = ApiKey.objects.count()
        again = client.get(answer["Location"]).content.decode()
        assert ApiKey.objects.count() == count
        assert ("Your new key" in first, "Your new key" in again) == (
            "revoke" not in address,
            False,
        )
    assert ApiKey.objects.count() == 3


def test_a_secret_that_nobody_looked_at_is_gone_after_a_minute(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = login("ada")
    answer = client.post(PAGE, NEW)
    monkeypatch.setattr("common.one_time.SECONDS", -1)
    assert "Your new key" not in client.get(answer["Location"]).content.decode()


def test_a_key_is_revoked(login: Login) -> None:
    client, key = login("ada"), key_of("ada")
    answer = client.post(f"{PAGE}{key.pk}/revoke/", {"tenant": "acme"}, follow=True)
    page = answer.content.decode()
    assert f"{key.prefix} is revoked" in page
    assert "1 revoked or expired" in page
    key.refresh_from_db()
    assert key.state() == "revoked"


def test_members_see_their_own_keys_and_admins_all(login: Login) -> None:
    join("nobody", Role.MEMBER)
    adas, theirs = key_of("ada"), key_of("nobody")
    member = login("nobody").get(PAGE).content.decode()
    assert theirs.prefix in member
    assert adas.prefix not in member
    owner = login("ada").get(PAGE).content.decode()
    assert theirs.prefix in owner
    assert adas.prefix in owner


def test_viewers_can_make_none_and_are_told(login: Login) -> None:
    join("nobody", Role.VIEWER)
    client = login("nobody")
    assert "Viewers can't create keys" in client.get(PAGE).content.decode()
    refused = client.post(PAGE, NEW)
    assert refused.status_code == 403
    assert "Nothing was changed" in refused.content.decode()
    assert ApiKey.objects.count() == 0


@pytest.mark.parametrize("operation", ["rotate", "revoke"])
def test_fault_23_foreign_keys_and_tenants_are_not_there(login: Login, operation: str) -> None:
    client, key = login("olga"), key_of("ada")
    for tenant in ("acme", "rival", "nowhere"):
        answer = client.post(f"{PAGE}{key.pk}/{operation}/", {"tenant": tenant})
        assert answer.status_code == 404
        assert key.prefix not in answer.content.decode()
    assert client.get(f"{PAGE}?tenant=acme").status_code == 404
    assert client.post(PAGE, NEW).status_code == 404
    key.refresh_from_db()
    assert key.state() == "active"
    assert ApiKey.objects.count() == 1


def test_only_operators_are_offered_the_operators_scope(login: Login) -> None:
    invalid_form = NEW | {"scopes": ["operator"]}
    ada = login("ada")
    assert 'value="operator"' not in ada.get(PAGE).content.decode()
    assert "operator is not one of" in ada.post(PAGE, invalid_form).content.decode()
    assert ApiKey.objects.count() == 0
    root = login("root")
    assert 'value="operator"' in root.get(PAGE).content.decode()
    root.post(PAGE, invalid_form)
    assert ApiKey.objects.get().scopes == ["operator"]


def test_a_key_without_scopes_is_not_made(login: Login) -> None:
    page = login("ada").post(PAGE, {"tenant": "acme", "name": "x"}).content.decode()
    assert "This field is required" in page
    assert ApiKey.objects.count() == 0


def test_somebody_without_a_tenant_is_told_so(login: Login) -> None:
    client = login("nobody")
    assert "You belong to no tenant yet" in client.get(PAGE).content.decode()
    client.post(PAGE, {"scopes": ["inference"]})
    assert ApiKey.objects.count() == 0


def test_pages_elsewhere_can_make_nothing(login: Login) -> None:
    user = User.objects.get(username="ada")
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(user)
    assert strict.post(PAGE, NEW).status_code == 403
    assert ApiKey.objects.count() == 0


def test_a_keys_name_is_text(login: Login) -> None:
    answer = login("ada").post(PAGE, NEW | {"name": "<b>bold</b>"}, follow=True)
    page = answer.content.decode()
    assert "<b>bold" not in page
    assert "&lt;b&gt;bold" in page
