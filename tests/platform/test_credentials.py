"""What the first start makes: a person, a tenant, a key that is no operator's."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.up.first_run import Credentials, ensure_credentials
from tenants import actions
from tenants import api_keys as scopes
from tenants import api_keys as secrets
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Tenant

pytestmark = [pytest.mark.django_db]


def key_of(secret: str) -> ApiKey:
    return ApiKey.objects.get(public_id=secrets.public_id_of(secret))


def test_the_key_that_up_prints_has_no_operators_scope(tmp_path: Path) -> None:
    credentials = ensure_credentials(tmp_path)
    assert set(key_of(credentials.api_key).scopes) == scopes.DEFAULT
    assert ensure_credentials(tmp_path) == credentials


def test_an_old_folders_key_with_the_operators_scope_is_not_printed_again(tmp_path: Path) -> None:
    first = ensure_credentials(tmp_path)
    old = actions.create_key(actor=SYSTEM_ACTOR, tenant=Tenant.objects.get(), scopes=scopes.ALL)
    Credentials(first.admin_user, first.admin_password, old.secret).write(tmp_path)
    again = ensure_credentials(tmp_path)
    assert set(key_of(again.api_key).scopes) == scopes.DEFAULT
    assert again.admin_password == first.admin_password


def test_the_first_operator_is_audited_without_a_password(tmp_path: Path) -> None:
    credentials = ensure_credentials(tmp_path)
    entry = AuditEntry.objects.get(action="user.create")
    assert entry.details["changes"]["is_superuser"] == [None, True]
    assert credentials.admin_password not in str(entry.details)
