"""The people page: who sees it, and what it says of somebody."""

from __future__ import annotations

import pytest
from allauth.mfa.models import Authenticator

from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, Tenant, User
from tests.console.conftest import Login

pytestmark = pytest.mark.usefixtures("rows")


def test_operators_see_everybody_with_roles_factors_and_keys(login: Login) -> None:
    ada, acme = User.objects.get(username="ada"), Tenant.objects.get(slug="acme")
    rival = Tenant.objects.get(slug="rival")
    actions.add_member(actor=SYSTEM_ACTOR, tenant=rival, user=ada, role=Role.VIEWER)
    actions.create_key(actor=ada, tenant=acme, name="one")
    actions.revoke_key(actor=ada, key=actions.create_key(actor=ada, tenant=acme, name="two").key)
    Authenticator.objects.create(user=ada, type=Authenticator.Type.TOTP, data={})
    Authenticator.objects.create(user=ada, type=Authenticator.Type.RECOVERY_CODES, data={})
    page = login("root").get("/console/people/")
    people = {person.user.username: person for person in page.context["people"]}
    assert set(people) == {"ada", "olga", "nobody", "root"}
    roles = {m.tenant.slug: m.role for m in people["ada"].memberships}
    assert roles == {"acme": "owner", "rival": "viewer"}
    assert (people["ada"].factors, people["ada"].num_keys) == ("TOTP Authenticator", 1)
    assert (people["root"].standing, people["nobody"].memberships) == ("operator", [])


def test_people_are_searched_by_name_email_and_tenant(login: Login) -> None:
    root = login("root")
    for query, names in (("OLG", {"olga"}), ("ada@", {"ada"}), ("Acme", {"ada"}), ("zzz", set())):
        page = root.get("/console/people/", {"q": query})
        assert {person.user.username for person in page.context["people"]} == names


def test_others_are_refused(login: Login) -> None:
    page = login("ada").get("/console/people/")
    assert page.status_code == 403
    assert "olga" not in page.content.decode()
