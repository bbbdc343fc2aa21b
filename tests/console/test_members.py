"""The pages of members, invitations, service accounts and the audit log: who may do what."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
from django.core import mail
from django.test import Client

from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import (
    AuditEntry,
    Invitation,
    Membership,
    Role,
    ServiceAccount,
    Tenant,
    User,
)
from tests.console.conftest import Login

PAGE = "/console/members/"
AUDIT = "/console/audit/"
PASSWORD = "a quiet page of ink"


@pytest.fixture
def people(login: Login) -> dict[str, Client]:
    """A client for somebody of every kind. Ada owns Acme; Olga is a stranger; root operates."""
    acme = Tenant.objects.get(slug="acme")
    for name in ("admin", "member", "viewer"):
        user = User.objects.create_user(name, f"{name}@example.org", PASSWORD)
        actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=Role(name))
    names = {"owner": "ada", "outsider": "olga", "operator": "root", "nobody": "nobody"}
    return {
        name: login(names.get(name, name))
        for name in ("owner", "admin", "member", "viewer", "outsider", "operator", "nobody")
    } | {"stranger": Client()}


def row_of(name: str) -> Membership:
    return Membership.objects.get(tenant__slug="acme", user__username=name)


#: What each kind of person is answered, on the page and for each operation.
SEES = {
    "owner": 200,
    "admin": 200,
    "member": 200,
    "viewer": 200,
    "outsider": 404,
    "operator": 200,
    "nobody": 404,
    "stranger": 302,
}
MAY = {**SEES, "owner": 302, "admin": 302, "operator": 302, "member": 403, "viewer": 403}


@pytest.mark.parametrize("kind", SEES)
def test_each_kind_of_person_sees_the_page_or_not(people: dict[str, Client], kind: str) -> None:
    assert people[kind].get(PAGE, {"tenant": "acme"}).status_code == SEES[kind]
    audit = {**SEES, "member": 403, "viewer": 403}
    assert people[kind].get(AUDIT, {"tenant": "acme"}).status_code == audit[kind]
    full_status_code = people[kind].get(AUDIT, {"all": "yes"}).status_code
    assert full_status_code == {"operator": 200, "stranger": 302}.get(kind, 403)


@pytest.mark.parametrize("kind", MAY)
def test_each_kind_of_person_may_do_each_deed_or_not(people: dict[str, Client], kind: str) -> None:
    acme = Tenant.objects.get(slug="acme")
    invited = actions.invite(actor=SYSTEM_ACTOR, tenant=acme, email="x@example.org")
    account = actions.create_service_account(actor=SYSTEM_ACTOR, tenant=acme, name="ci")
    initial_audit_entry_count = AuditEntry.objects.count()
    operations: dict[str, dict[str, str]] = {
        f"{PAGE}invite/": {"email": "new@example.org", "role": "member"},
        f"/console/invitations/{invited.invitation.pk}/revoke/": {},
        "/console/service-accounts/add/": {"name": "nightly", "role": "member"},
        f"/console/service-accounts/{account.pk}/retire/": {},
        f"{PAGE}{row_of('viewer').pk}/role/": {"role": "member"},
        f"{PAGE}{row_of('viewer').pk}/remove/": {},
    }
    if kind == "viewer":
        operations.popitem()  # anyone may leave
    for address, data in operations.items():
        answer = people[kind].post(address, {"tenant": "acme", **data})
        assert answer.status_code == MAY[kind], address
        if kind == "stranger":
            assert answer["Location"].startswith("/login/")
        assert people[kind].get(address).status_code in (302, 405)
    assert (AuditEntry.objects.count() == initial_audit_entry_count) == (
        kind not in ("owner", "admin", "operator")
    )


def test_an_admin_cannot_reach_above(people: dict[str, Client]) -> None:
    admin = people["admin"]
    for address, data in (
        (f"{PAGE}{row_of('ada').pk}/role/", {"role": "viewer"}),
        (f"{PAGE}{row_of('ada').pk}/remove/", {}),
        (f"{PAGE}{row_of('admin').pk}/role/", {"role": "owner"}),
        (f"{PAGE}invite/", {"email": "new@example.org", "role": "owner"}),
        ("/console/service-accounts/add/", {"name": "x", "role": "owner"}),
    ):
        assert admin.post(address, {"tenant": "acme", **data}).status_code == 403, address


def test_rows_of_another_tenant_are_not_there(people: dict[str, Client]) -> None:
    rival = Tenant.objects.get(slug="rival")
    theirs = Membership.objects.get(tenant=rival)
    account = actions.create_service_account(actor=SYSTEM_ACTOR, tenant=rival, name="ci")
    invitation = actions.invite(actor=SYSTEM_ACTOR, tenant=rival, email="x@example.org").invitation
    for address in (
        f"{PAGE}{theirs.pk}/role/",
        f"{PAGE}{theirs.pk}/remove/",
        f"/console/service-accounts/{account.pk}/retire/",
        f"/console/invitations/{invitation.pk}/revoke/",
    ):
        assert (
            people["owner"].post(address, {"tenant": "acme", "role": "viewer"}).status_code == 404
        )
    assert Membership.objects.filter(pk=theirs.pk, role="owner").exists()


def test_the_last_owner_stays_and_the_page_says_so(people: dict[str, Client]) -> None:
    page = people["owner"].post(f"{PAGE}{row_of('ada').pk}/remove/", {"tenant": "acme"})
    assert page.status_code == 409
    assert "needs at least one owner" in page.content.decode()


def test_who_leaves_is_logged_out(people: dict[str, Client]) -> None:
    people["viewer"].post(f"{PAGE}{row_of('viewer').pk}/remove/", {"tenant": "acme"})
    assert people["viewer"].get("/console/").status_code == 302


# -- invitations ------------------------------------------------------------------------------


def invite(client: Client, role: str = "member", email: str = "new@example.org") -> str:
    """The path of the link."""
    answer = client.post(
        f"{PAGE}invite/", {"tenant": "acme", "email": email, "role": role}, follow=True
    )
    (link,) = re.findall(r'value="http://testserver(/invitation/[^"]+)"', answer.content.decode())
    again = client.get(answer.redirect_chain[-1][0]).content.decode()
    assert link not in again
    return str(link)


def test_somebody_new_joins_by_the_link_once(people: dict[str, Client]) -> None:
    link = invite(people["admin"])
    guest = Client()
    assert "ada" not in guest.get(link).content.decode()
    assert guest.post(link, {"username": "nina", "password": "short"}).status_code == 200
    assert guest.post(link, {"username": "ada", "password": PASSWORD}).status_code == 200
    answer = guest.post(link, {"username": "nina", "password": PASSWORD})
    assert (answer.status_code, answer["Location"]) == (302, "/")
    assert row_of("nina").role == "member"
    assert User.objects.get(username="nina").email == "new@example.org"
    assert Client().get(link).status_code == 404
    assert Client().post(link, {"username": "two", "password": PASSWORD}).status_code == 404
    assert not User.objects.filter(username="two").exists()
    entry = AuditEntry.objects.get(action="invitation.accept")
    assert (entry.actor_label, entry.tenant.slug if entry.tenant else None) == ("nina", "acme")


def test_somebody_who_is_logged_in_joins_as_they_are(people: dict[str, Client]) -> None:
    link = invite(people["owner"], role="viewer")
    assert "Join as nobody" in people["nobody"].get(link).content.decode()
    page = people["nobody"].post(link, follow=True).content.decode()
    assert "Welcome to Acme" in page
    assert row_of("nobody").role == "viewer"


@pytest.mark.parametrize("end", ["revoked", "expired", "replaced", "inviter", "demoted", "off"])
def test_a_link_that_has_ended_lets_nobody_in(people: dict[str, Client], end: str) -> None:
    link = invite(people["admin"])
    invitation = Invitation.objects.get()
    acme = Tenant.objects.get(slug="acme")
    if end == "revoked":
        actions.revoke_invitation(actor=SYSTEM_ACTOR, invitation=invitation)
    elif end == "expired":
        Invitation.objects.update(expires_at=invitation.created_at)
    elif end == "replaced":
        invite(people["admin"])
    elif end == "inviter":
        actions.remove_member(actor=SYSTEM_ACTOR, membership=row_of("admin"))
    elif end == "demoted":
        Membership.objects.filter(pk=row_of("admin").pk).update(role="member")
    else:
        actions.set_tenant_active(actor=SYSTEM_ACTOR, tenant=acme, active=False)
    assert Client().get(link).status_code == 404
    assert people["nobody"].post(link).status_code == 404
    assert not Membership.objects.filter(user__username="nobody").exists()


def test_the_database_and_the_log_hold_no_token(people: dict[str, Client]) -> None:
    token = invite(people["owner"]).split("/")[2]
    assert token not in str(list(Invitation.objects.values()))
    assert token not in str(list(AuditEntry.objects.values()))
    assert token not in str(list(people["owner"].session.items()))


def test_an_invitation_goes_by_mail_where_there_is_a_server(
    people: dict[str, Client], settings: Any
) -> None:
    invite(people["owner"])
    assert mail.outbox == []
    settings.QUIRE = settings.QUIRE.replace(
        smtp_url="smtp://mail.example", mail_from="quire@mail.example"
    )
    link = invite(people["owner"])
    (sent,) = mail.outbox
    assert sent.to == ["new@example.org"]
    assert f"http://testserver{link}" in sent.body


@pytest.mark.parametrize("data", [{"email": "nonsense"}, {"role": "god"}, {"role": ""}])
def test_a_bad_invitation_says_what_is_wrong(
    people: dict[str, Client], data: dict[str, str]
) -> None:
    form = {"tenant": "acme", "email": "new@example.org", "role": "member"} | data
    page = people["owner"].post(f"{PAGE}invite/", form)
    assert page.status_code == 400
    assert "Nothing was changed" in page.content.decode()
    assert not Invitation.objects.exists()


def test_members_are_not_invited_again(people: dict[str, Client]) -> None:
    form = {"tenant": "acme", "email": "VIEWER@example.org", "role": "member"}
    assert people["owner"].post(f"{PAGE}invite/", form).status_code == 409


# -- service accounts -------------------------------------------------------------------------


def test_admins_make_keys_for_service_accounts(people: dict[str, Client]) -> None:
    admin = people["admin"]
    admin.post("/console/service-accounts/add/", {"tenant": "acme", "name": "ci", "role": "member"})
    account = ServiceAccount.objects.get()
    assert "ci (service account)" in admin.get("/console/keys/").content.decode()
    form = {"tenant": "acme", "scopes": ["inference"], "holder": str(account.pk)}
    admin.post("/console/keys/", form)
    assert account.api_keys.get().created_by is not None
    assert "service account" not in people["member"].get("/console/keys/").content.decode()
    people["member"].post("/console/keys/", form)
    assert account.api_keys.count() == 1


# -- the audit log ----------------------------------------------------------------------------


def test_the_log_is_narrowed_and_paged(people: dict[str, Client]) -> None:
    actions.change_role(actor=SYSTEM_ACTOR, membership=row_of("viewer"), role="member")
    page = people["owner"].get(AUDIT, {"q": "change_role"}).content.decode()
    assert "viewer → member" in page
    assert "member.add" not in page
    page = people["owner"].get(AUDIT, {"first": "2999-01-01"}).content.decode()
    assert "No entry matches" in page
    assert "Enter a valid date" in people["owner"].get(AUDIT, {"first": "x"}).content.decode()


def test_the_log_is_exported_without_other_tenants(people: dict[str, Client]) -> None:
    actions.create_service_account(
        actor=SYSTEM_ACTOR, tenant=Tenant.objects.get(slug="acme"), name="=1+1"
    )
    answer = people["admin"].get(AUDIT, {"format": "csv", "tenant": "acme"})
    text = b"".join(answer.streaming_content).decode()  # type: ignore[attr-defined]
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["tenant"] for row in rows} == {"acme"}
    assert rows[0]["action"] == "service_account.create"
    assert rows[0]["target"] == "'=1+1"
    answer = people["operator"].get(AUDIT, {"format": "json", "all": "yes"})
    payload = json.loads(b"".join(answer.streaming_content))  # type: ignore[attr-defined]
    assert {"acme", "rival"} <= {row["tenant"] for row in payload}
    assert len(payload) == AuditEntry.objects.count()
    refused = people["member"].get(AUDIT, {"format": "json", "tenant": "acme"})
    assert refused.status_code == 403


def test_names_on_the_pages_are_text(people: dict[str, Client]) -> None:
    acme = Tenant.objects.get(slug="acme")
    actions.create_service_account(actor=SYSTEM_ACTOR, tenant=acme, name="<b>x</b>")
    for address in (PAGE, AUDIT):
        page = people["owner"].get(address).content.decode()
        assert "<b>x" not in page
        assert "&lt;b&gt;x" in page
