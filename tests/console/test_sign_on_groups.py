"""Groups hold between sign-ins: who is let go at the provider is out here, with their keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import requests
from allauth.socialaccount.models import SocialToken
from django.contrib.sessions.models import Session
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from accounts import group_sync as groups
from accounts import tasks as tasks
from common import outbound_http
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Tenant, User
from tests.console.oidc_provider import Provider
from tests.console.test_identity import provider as provider  # a fixture
from tests.console.test_identity import role_of, sign_on


@pytest.fixture
def offline(provider: Provider, settings: Any) -> Provider:
    """The provider gives tokens to ask with again, as `QUIRE_OIDC_SCOPES=offline_access` asks."""
    provider.offline = True
    app = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"][0]
    app["settings"]["scope"] = ["openid", "profile", "email", groups.OFFLINE]
    return provider


def come(provider: Provider, **claims: Any) -> tuple[Client, ApiKey]:
    """Zoe signs on and makes herself a key."""
    client, _ = sign_on(provider, **claims)
    acme = Tenant.objects.get(slug="acme")
    key = actions.create_key(actor=User.objects.get(username="zoe"), tenant=acme)
    return client, key.key


@pytest.fixture(autouse=True)
def _a_worker_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, in this process."""
    monkeypatch.setattr(
        groups, "send_task_best_effort", lambda name, pk, expires: tasks.check_user(pk)
    )


def minutes_pass() -> None:
    SocialToken.objects.update(expires_at=timezone.now())
    tasks.sign_on()


def today(provider: Provider, **claims: Any) -> None:
    """What the provider says of her from now on."""
    for person in provider.refreshes.values():
        person.update(claims)


def test_a_group_that_is_gone_takes_role_key_and_session_without_a_sign_in(
    rows: None, offline: Provider
) -> None:
    client, key = come(offline, groups=["devs"])
    for _ in range(2):  # tokens are replaced each time
        minutes_pass()
    assert offline.asked == 2
    assert (role_of("zoe"), client.get("/").status_code) == ("member", 200)
    today(offline, groups=[])
    tasks.sign_on()  # not yet
    assert role_of("zoe") == "member"
    minutes_pass()
    assert role_of("zoe") is None
    assert ApiKey.objects.get(pk=key.pk).state() == "revoked"
    assert client.get("/").status_code == 302
    entry = AuditEntry.objects.filter(action="member.remove").latest("pk")
    assert entry.actor_label == "single sign-on"


def test_somebody_who_cant_be_let_in_holds_nobody_else_up(
    rows: None, offline: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    come(offline, groups=["devs"])
    zoe = User.objects.get(username="zoe")
    zoe.memberships.all().delete()
    actions.update_user(actor=SYSTEM_ACTOR, user=zoe, is_active=False)
    minutes_pass()  # the provider hasn't heard of it
    assert role_of("zoe") is None
    assert "who zoe is" in caplog.text


def test_another_group_gives_another_role(rows: None, offline: Provider) -> None:
    come(offline, groups=["devs"])
    today(offline, groups=["leads"])
    minutes_pass()
    assert role_of("zoe") == "owner"


def test_who_is_removed_at_the_provider_is_out(rows: None, offline: Provider) -> None:
    client, key = come(offline, groups=["devs"])
    offline.refreshes.clear()
    minutes_pass()
    assert role_of("zoe") is None
    assert ApiKey.objects.get(pk=key.pk).state() == "revoked"
    assert client.get("/").status_code == 302
    assert not SocialToken.objects.exists()


def test_a_token_that_only_ended_by_time_asks_for_a_sign_in_and_takes_no_key(
    rows: None, provider: Provider
) -> None:
    provider.offline = True  # without the scope it ends with the provider's own session
    client, key = come(provider, groups=["devs"])
    provider.refreshes.clear()
    minutes_pass()
    assert client.get("/").status_code == 302
    assert (role_of("zoe"), ApiKey.objects.get(pk=key.pk).state()) == ("member", "active")
    assert AuditEntry.objects.filter(action="sign_on.end").count() == 1


def test_a_provider_that_is_away_takes_nothing(rows: None, offline: Provider) -> None:
    client, _ = come(offline, groups=["devs"])
    offline.close()
    minutes_pass()
    assert (role_of("zoe"), client.get("/").status_code) == ("member", 200)
    assert SocialToken.objects.get().expires_at > timezone.now()


def test_fault_70_a_provider_that_does_not_answer_is_left_in_peace_for_a_while(
    rows: None, offline: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    come(offline, groups=["devs"])
    asked: list[Any] = []
    baseline = groups._refreshed

    def silent(*_: Any) -> None:
        asked.append(None)
        raise requests.Timeout

    monkeypatch.setattr(groups, "_refreshed", silent)
    for _ in range(outbound_http.MAX_FAILURES + 3):
        minutes_pass()
    assert len(asked) == outbound_http.MAX_FAILURES
    today(offline, groups=[])
    monkeypatch.setattr(groups, "_refreshed", baseline)
    minutes_pass()
    assert (role_of("zoe"), offline.asked) == ("member", 0)
    cache.clear()  # as after ten minutes
    minutes_pass()
    assert role_of("zoe") is None


def test_fault_70_what_is_wrong_with_one_person_opens_no_breaker(
    rows: None, offline: Provider
) -> None:
    come(offline, groups=["devs"])
    today(offline, sub="8")
    for _ in range(outbound_http.MAX_FAILURES + 3):
        minutes_pass()
    assert offline.asked == outbound_http.MAX_FAILURES + 3


def test_a_provider_that_speaks_of_somebody_else_changes_nothing(
    rows: None, offline: Provider
) -> None:
    come(offline, groups=["devs"])
    today(offline, sub="8", groups=["ops"])
    minutes_pass()
    assert role_of("zoe") == "member"
    assert not User.objects.get(username="zoe").is_superuser


def test_the_token_is_kept_encrypted_and_goes_with_the_next_sign_in(
    rows: None, offline: Provider
) -> None:
    come(offline, groups=["devs"])
    (token,) = offline.refreshes
    retained_social_token = SocialToken.objects.get()
    assert token not in retained_social_token.token_secret
    assert groups._box().decrypt(retained_social_token.token_secret.encode()).decode() == token
    sign_on(offline, groups=["devs"])
    assert SocialToken.objects.get().token_secret != retained_social_token.token_secret


def test_without_such_a_token_a_session_ends_by_itself(rows: None, provider: Provider) -> None:
    sign_on(provider, groups=["devs"])
    ends = Session.objects.get().expire_date - timezone.now()
    assert timedelta(hours=11) < ends <= timedelta(hours=12)


@pytest.mark.parametrize("location", ["token", "userinfo"])
def test_fault_62_the_providers_document_leads_to_no_private_address(
    rows: None, provider: Provider, location: str, caplog: Any
) -> None:
    provider.elsewhere = {f"{location}_endpoint": "http://169.254.169.254/latest/"}
    client, answer = sign_on(provider, groups=["ops"])
    assert client.get("/").status_code == 302
    assert not User.objects.filter(username="zoe").exists()
    assert "169.254.169.254" in caplog.text
    assert answer.status_code in (200, 401)


def test_fault_62_a_redirect_of_the_provider_is_not_followed(
    rows: None, provider: Provider
) -> None:
    provider.redirect = f"{provider.url}/userinfo?again"
    sign_on(provider, groups=["devs"])
    assert not User.objects.filter(username="zoe").exists()
