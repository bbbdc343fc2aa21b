"""Single sign-on, second factors, sessions, new passwords, recent proof of who one is."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from allauth.core.internal import ratelimit
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import TOTP, format_hotp_value, generate_totp_secret, hotp_value
from django.core import mail
from django.test import Client

from accounts import reauthentication as recent
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Membership, Tenant, User
from tests.console.conftest import Login
from tests.console.oidc_provider import CLIENT, SECRET, Provider
from tests.console.seed import PASSWORD

NEW = "another quiet page"
ROLES = {"devs": "acme:member", "leads": "acme:owner", "ops": "operator", "far": "rival:viewer"}


@pytest.fixture
def provider(settings: Any) -> Iterator[Provider]:
    """An identity provider that settings name."""
    running = Provider()
    app = {"provider_id": "sso", "name": "Acme ID", "client_id": CLIENT, "secret": SECRET}
    app |= {"settings": {"server_url": running.url}}
    settings.SOCIALACCOUNT_PROVIDERS = {
        "openid_connect": {"APPS": [app], "OAUTH_PKCE_ENABLED": True}
    }
    settings.QUIRE = settings.QUIRE.replace(oidc_roles=ROLES)
    yield running
    running.close()


def sign_on(provider: Provider, client: Client | None = None, **claims: Any) -> tuple[Client, Any]:
    """Through the provider and back; the client and the last answer."""
    client = client or Client()
    provider.person = {"sub": "7", "preferred_username": "zoe", **claims}
    start = client.get("/account/oidc/sso/login/")
    assert start["Location"].startswith(f"{provider.url}/authorize")
    back = requests.get(start["Location"], allow_redirects=False, timeout=60).headers["Location"]
    parts = urlsplit(back)
    return client, client.get(f"{parts.path}?{parts.query}")


def role_of(name: str, slug: str = "acme") -> str | None:
    membership = Membership.objects.filter(user__username=name, tenant__slug=slug).first()
    return membership.role if membership else None


def test_somebody_new_comes_in_with_what_their_groups_are_worth(
    rows: None, provider: Provider
) -> None:
    client, answer = sign_on(provider, groups=["devs", "leads", "others"], email="zoe@example.org")
    assert answer.status_code == 302
    assert client.get("/").status_code == 200
    assert role_of("zoe") == "owner"
    user = User.objects.get(username="zoe")
    assert not user.is_superuser
    assert not user.has_usable_password()
    actors = set(
        AuditEntry.objects.filter(target_label="zoe").values_list("actor_label", flat=True)
    )
    assert "single sign-on" in actors


@pytest.mark.parametrize("groups", [[], ["others"], None, "nonsense", [3, {}]])
def test_whoever_has_no_group_of_ours_stays_out(
    rows: None, provider: Provider, groups: Any
) -> None:
    client, answer = sign_on(provider, groups=groups)
    assert "no access" in answer.content.decode()
    assert client.get("/").status_code == 302
    assert not User.objects.filter(username="zoe").exists()


def test_groups_that_are_gone_take_their_roles_and_keys(rows: None, provider: Provider) -> None:
    first, _ = sign_on(provider, groups=["leads"])
    acme = Tenant.objects.get(slug="acme")
    key = actions.create_key(actor=User.objects.get(username="zoe"), tenant=acme).key
    sign_on(provider, groups=["devs"])
    assert role_of("zoe") == "member"
    assert first.get("/").status_code == 302
    assert ApiKey.objects.get(pk=key.pk).state() == "revoked"
    client, answer = sign_on(provider, groups=[])
    assert answer.status_code == 403
    assert client.get("/").status_code == 302
    assert role_of("zoe") is None


def test_roles_that_were_given_by_hand_stay(rows: None, provider: Provider) -> None:
    sign_on(provider, groups=["devs"])
    user = User.objects.get(username="zoe")
    rival = Tenant.objects.get(slug="rival")
    actions.add_member(actor=SYSTEM_ACTOR, tenant=rival, user=user, role="admin")
    sign_on(provider, groups=["far"])
    assert (role_of("zoe"), role_of("zoe", "rival")) == (None, "admin")


def test_operators_come_and_go_by_group(rows: None, provider: Provider) -> None:
    sign_on(provider, groups=["ops"])
    assert User.objects.get(username="zoe").is_superuser
    sign_on(provider, groups=["devs"])
    assert not User.objects.get(username="zoe").is_superuser
    User.objects.filter(username="zoe").update(is_superuser=True)  # by hand
    sign_on(provider, groups=["devs"])
    assert User.objects.get(username="zoe").is_superuser


def test_a_verified_address_finds_the_person_and_an_unverified_one_does_not(
    rows: None, provider: Provider
) -> None:
    address = {"groups": ["devs"], "email": "olga@example.org"}
    _, answer = sign_on(provider, **address, email_verified=False)
    assert answer.status_code == 409
    assert not User.objects.filter(username="zoe").exists()
    client, _ = sign_on(provider, **address, email_verified=True)
    assert "olga" in client.get("/").content.decode()
    assert role_of("olga") == "member"


def sign_on_to_connect(provider: Provider, client: Client) -> None:
    """As the page of the account's connections does it."""
    start = client.get("/account/oidc/sso/login/?process=connect")
    back = requests.get(start["Location"], allow_redirects=False, timeout=60).headers["Location"]
    parts = urlsplit(back)
    client.get(f"{parts.path}?{parts.query}")


def test_operators_are_not_found_by_address_and_connect_it_themselves(
    login: Login, provider: Provider
) -> None:
    client, _ = sign_on(provider, groups=["devs"], email="root@example.org", email_verified=True)
    assert client.get("/").status_code == 302
    root = login("root")
    sign_on_to_connect(provider, root)
    client, _ = sign_on(provider, groups=["devs"])
    assert client.get("/admin/").status_code == 200


def test_an_account_that_another_identity_is_connected_with_is_not_found_by_address(
    rows: None, provider: Provider
) -> None:
    acme = Tenant.objects.get(slug="acme")
    token = actions.invite(actor=SYSTEM_ACTOR, tenant=acme, email="zoe@example.org").token
    waiting = Client()  # has the link, and joins in her name
    waiting.post(f"/invitation/{token}/", {"username": "zoe", "password": NEW})
    provider.person = {"sub": "66", "groups": ["devs"]}
    sign_on_to_connect(provider, waiting)
    client, answer = sign_on(provider, groups=["ops"], email="zoe@example.org", email_verified=True)
    assert answer.status_code == 409
    assert client.get("/").status_code == 302
    assert not User.objects.filter(username="zoe", is_superuser=True).exists()


def test_a_deactivated_person_stays_out(rows: None, provider: Provider) -> None:
    sign_on(provider, groups=["devs"])
    actions.update_user(actor=SYSTEM_ACTOR, user=User.objects.get(username="zoe"), is_active=False)
    client, _ = sign_on(provider, groups=["devs"])
    assert client.get("/").status_code == 302


@pytest.mark.parametrize("change", ["state", "code", "key"])
def test_what_the_provider_did_not_say_is_not_believed(
    rows: None, provider: Provider, change: str
) -> None:
    client = Client()
    provider.person = {"sub": "7", "preferred_username": "zoe", "groups": ["ops"]}
    start = client.get("/account/oidc/sso/login/")
    back = requests.get(start["Location"], allow_redirects=False, timeout=60).headers["Location"]
    parts = urlsplit(back)
    query = parts.query
    if change == "state":
        query = re.sub(r"state=[^&]+", "state=forged", query)
    elif change == "code":
        query = re.sub(r"code=[^&]+", "code=forged", query)
    else:
        provider.codes.clear()
    client.get(f"{parts.path}?{query}")
    assert client.get("/").status_code == 302
    assert not User.objects.filter(username="zoe").exists()


def test_the_login_offers_the_provider_by_its_name(rows: None, provider: Provider) -> None:
    assert "Log in with Acme ID" in Client().get("/login/").content.decode()


def test_without_a_provider_there_is_none(rows: None) -> None:
    assert Client().get("/account/oidc/sso/login/").status_code == 404
    assert "Log in with" not in Client().get("/login/").content.decode()


# -- second factors ---------------------------------------------------------------------------


def code_of(secret: str, steps: int = 0) -> str:
    """What an app shows right now, or showed `-steps` times 30 s ago."""
    return str(format_hotp_value(hotp_value(secret, int(time.time()) // 30 + steps)))


def with_totp(name: str) -> str:
    secret = generate_totp_secret()
    TOTP.activate(User.objects.get(username=name), secret)
    return secret


def test_the_secret_in_the_database_is_encrypted(rows: None) -> None:
    secret = with_totp("ada")
    assert secret not in str(Authenticator.objects.get().data)


def test_a_password_alone_is_not_enough_with_a_second_factor(rows: None) -> None:
    secret = with_totp("ada")
    client = Client()
    answer = client.post("/login/", {"login": "ada", "password": PASSWORD})
    assert answer["Location"] == "/account/2fa/authenticate/"
    assert client.get("/").status_code == 302
    page = client.post("/account/2fa/authenticate/", {"code": "000000"})
    assert page.status_code == 200
    assert client.get("/").status_code == 302
    assert client.post("/account/2fa/authenticate/", {"code": code_of(secret)}).status_code == 302
    assert client.get("/").status_code == 200
    again = Client()
    again.post("/login/", {"login": "ada", "password": PASSWORD})
    again.post("/account/2fa/authenticate/", {"code": code_of(secret)})
    assert again.get("/").status_code == 302, "a code works once"


def second_step(code: str) -> int:
    """The status of a new login's second step."""
    client = Client()
    client.post("/login/", {"login": "ada", "password": PASSWORD})
    return client.post("/account/2fa/authenticate/", {"code": code}).status_code


def test_a_code_may_come_a_step_late_and_works_once(
    rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = with_totp("ada")
    moment = time.time() // 30 * 30 + 29.9  # just before the step turns
    monkeypatch.setattr(time, "time", lambda: moment)
    code, old = code_of(secret), code_of(secret, -2)
    assert second_step(old) == 200
    monkeypatch.setattr(time, "time", lambda: moment + 0.2)
    assert second_step(code) == 302
    monkeypatch.setattr(time, "time", lambda: moment + 29)
    assert second_step(code) == 200, "accepted twice"
    monkeypatch.setattr("allauth.mfa.totp.internal.auth.TOTP._mark_code_used", lambda *_: True)
    assert second_step(code) == 200, "accepted twice, once allauth has forgotten it"


@pytest.mark.parametrize(
    ("asked", "name", "required"),
    [
        (["operator"], "root", True),
        (["operator"], "ada", False),
        (["owner"], "ada", True),
        (["admin"], "ada", False),
        ([], "root", False),
    ],
)
def test_a_role_may_ask_for_a_second_factor(
    login: Login, settings: Any, asked: list[str], name: str, required: bool
) -> None:
    settings.QUIRE = settings.QUIRE.replace(mfa_roles=asked)
    client = login(name)
    answer = client.get("/console/")
    if required:
        assert answer["Location"] == "/account/2fa/?required=yes"
        assert client.get("/console/api/usage").json()["error"]["code"] == "second_factor_required"
        assert client.get("/account/2fa/").status_code == 200
        assert client.get("/admin/").status_code == 302
        with_totp(name)
    assert client.get("/console/").status_code == 200


def test_setting_one_up_asks_for_the_password_and_is_audited(login: Login) -> None:
    client = login("ada")
    answer = client.get("/account/2fa/totp/activate/")
    assert answer["Location"].startswith("/account/reauthenticate/")
    client.post("/account/reauthenticate/", {"password": PASSWORD})
    page = client.get("/account/2fa/totp/activate/").content.decode()
    (secret,) = re.findall(r'value="([A-Z2-7]{16,})"', page)
    answer = client.post("/account/2fa/totp/activate/", {"code": code_of(secret)})
    assert answer.status_code == 302
    types = set(Authenticator.objects.values_list("type", flat=True))
    assert types == {"totp", "recovery_codes"}
    assert AuditEntry.objects.filter(action="second_factor.add").count() == 2
    client.post("/account/2fa/totp/deactivate/")
    assert AuditEntry.objects.filter(action="second_factor.remove").exists()


def test_a_recovery_code_works_once(login: Login) -> None:
    from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes

    with_totp("ada")
    codes = RecoveryCodes.activate(User.objects.get(username="ada"))
    (code, *_) = codes.get_unused_codes()
    for status in (200, 302):
        client = Client()
        client.post("/login/", {"login": "ada", "password": PASSWORD})
        client.post("/account/2fa/authenticate/", {"code": code})
        assert client.get("/").status_code == status


# -- sessions, passwords ----------------------------------------------------------------------


def test_sessions_are_seen_and_ended(rows: None) -> None:
    local_client, remote_client = Client(), Client()
    for client in (local_client, remote_client):
        client.post("/login/", {"login": "ada", "password": PASSWORD})
    page = local_client.get("/account/sessions/").content.decode()
    assert page.count("127.0.0.1") == 2
    local_client.post("/account/sessions/")
    assert (local_client.get("/").status_code, remote_client.get("/").status_code) == (200, 302)


def test_one_session_is_ended_and_the_others_go_on(rows: None) -> None:
    clients = [Client() for _ in range(3)]
    for client in clients:
        client.post("/login/", {"login": "ada", "password": PASSWORD})
    local_client, second, elsewhere = clients
    ends = re.findall(
        r"/account/sessions/\d+/end/", local_client.get("/account/sessions/").content.decode()
    )
    assert len(ends) == 2, "not one for the session that looks"
    stranger = Client()
    stranger.post("/login/", {"login": "root", "password": PASSWORD})
    assert stranger.post(ends[0]).status_code == 404
    assert local_client.post(ends[0]).status_code == 302
    assert [client.get("/").status_code for client in (local_client, second, elsewhere)] == [
        200,
        302,
        200,
    ]
    assert AuditEntry.objects.filter(action="session.end", actor_label="ada").count() == 1


def test_a_forgotten_password_is_set_anew_by_mail(login: Login, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(
        smtp_url="smtp://mail.example", mail_from="quire@mail.example"
    )
    remote_client = login("ada")
    for address in ("ada@example.org", "stranger@example.org"):
        assert Client().post("/account/password/reset/", {"email": address}).status_code == 302
    (sent,) = mail.outbox
    (path,) = re.findall(r"http://testserver(/account/password/reset/key/\S+)", sent.body)
    guest = Client()
    form = guest.get(path)["Location"]
    guest.post(form, {"password1": NEW, "password2": NEW})
    assert User.objects.get(username="ada").check_password(NEW)
    assert remote_client.get("/").status_code == 302
    assert AuditEntry.objects.filter(action="user.set_password", target_label="ada").exists()
    assert Client().get(path).status_code == 200, "a link works once"


def test_without_a_mail_server_nobody_is_promised_mail(rows: None) -> None:
    assert "Forgot your password?" in Client().get("/login/").content.decode()
    for response in (
        Client().get("/account/password/reset/"),
        Client().post("/account/password/reset/", {"email": "ada@example.org"}),
    ):
        text = response.content.decode()
        assert "sends no email" in text
        assert "set_password" in text
    assert mail.outbox == []


def test_nobody_signs_up(rows: None) -> None:
    form = {"username": "eve", "password1": NEW, "password2": NEW}
    assert "no access" in Client().post("/account/signup/", form).content.decode()
    assert not User.objects.filter(username="eve").exists()


def test_dangerous_acts_ask_for_the_password_again_after_a_while(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = login("ada")
    session = client.session
    session[recent.SESSION_KEY] = time.time() - 3600
    session.save()
    form = {"tenant": "acme", "name": "x", "scopes": ["inference"]}
    answer = client.post("/console/keys/", form)
    assert answer["Location"].startswith("/account/reauthenticate/?next=")
    assert not ApiKey.objects.exists()
    assert client.get("/console/keys/").status_code == 200
    invalid_response = client.post(answer["Location"], {"password": "wrong"})
    assert invalid_response.status_code == 200
    client.post(answer["Location"], {"password": PASSWORD, "next": "/console/keys/"})
    assert ApiKey.objects.count() == 1, "what was asked for goes on by itself"


def test_without_redis_the_login_says_so(rows: None, settings: Any) -> None:
    settings.CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": "unix:///nowhere/redis.sock",
            "OPTIONS": {"serializer": "config.cache.JsonSerializer"},
        }
    }
    answer = Client().post("/login/", {"login": "ada", "password": PASSWORD})
    assert (answer.status_code, answer["Retry-After"]) == (503, "1")


def test_after_too_many_attempts_a_page_says_when_to_come_again(
    rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratelimit, "consume", lambda *args, **kwargs: False)
    answer = Client().post("/login/", {"login": "ada", "password": "wrong"})
    assert (answer.status_code, answer["Retry-After"]) == (429, "60")


def test_the_cache_in_redis_holds_json(live_redis: str, key_prefix: str, settings: Any) -> None:
    import redis
    from django.core.cache import caches

    options = {"serializer": "config.cache.JsonSerializer"}
    backend = "django.core.cache.backends.redis.RedisCache"
    settings.CACHES = {
        "default": {"BACKEND": backend, "LOCATION": live_redis, "KEY_PREFIX": key_prefix}
        | {"OPTIONS": options}
    }
    cache = caches["default"]
    cache.set("a", [1.5, "x"])
    cache.set("n", 1)
    assert cache.incr("n") == 2
    assert (cache.get("a"), cache.get("n"), cache.get("none")) == ([1.5, "x"], 2, None)
    client: Any = redis.Redis.from_url(live_redis)
    assert client.get(f"{key_prefix}:1:a") == b'[1.5, "x"]'
    client.close()


def test_changes_in_the_admin_ask_for_the_password_again_and_then_go_on(login: Login) -> None:
    client = login("root")
    tenant = Tenant.objects.filter(active=True).first()
    assert tenant is not None
    session = client.session
    session[recent.SESSION_KEY] = time.time() - 3600
    session.save()
    path = "/admin/tenants/tenant/"
    assert client.get(path).status_code == 200
    answer = client.post(path, {"action": "deactivate", "_selected_action": [tenant.pk]})
    assert answer["Location"].startswith("/account/reauthenticate/")
    tenant.refresh_from_db()
    assert tenant.active
    client.post(answer["Location"], {"password": PASSWORD}, follow=True)
    tenant.refresh_from_db()
    assert not tenant.active
