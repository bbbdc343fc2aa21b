"""Checks that single sign-on users still belong to their groups.

Groups are applied at each sign-in, but someone who has left doesn't sign in again. If the provider
issues a refresh token, workers query it every few minutes and apply its answer at once. Otherwise
sessions end after `SESSION`, so that users must sign in again.
"""

from __future__ import annotations

import functools
import logging
from datetime import timedelta
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests
from allauth.account.signals import user_logged_in
from allauth.socialaccount import app_settings
from allauth.socialaccount.adapter import get_adapter
from allauth.socialaccount.models import SocialAccount, SocialLogin, SocialToken
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from celery.exceptions import SoftTimeLimitExceeded
from cryptography.fernet import InvalidToken
from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.dispatch import receiver
from django.http import HttpRequest
from django.utils import timezone
from requests.adapters import HTTPAdapter

from common.one_time import fernet_for
from common.outbound_http import Address, CircuitBreaker, Target, check_url, resolve
from common.task_queue import send_task_best_effort
from engine.contract.errors import QuireError
from tenants.actions.keys import end_sessions
from tenants.actions.users import SSO_ACTOR, sync_roles_from_groups
from tenants.audit import log_action
from tenants.models import User

logger = logging.getLogger(__name__)

PROVIDER = "sso"
#: Interval between checks of a user's groups: how long someone who has left may keep access.
EVERY = timedelta(minutes=5)
#: Lifetime of the session of a user without a refresh token.
SESSION = timedelta(hours=12)
#: The scope for refresh tokens that outlive the session at the provider.
OFFLINE = "offline_access"
TOKEN_PARTS = ("userinfo", "id_token")
CHECK = "console.check_user"
#: Interval at which workers look for users whose check is due.
POLL_INTERVAL_S = 60.0
CHECKS_PER_S = 10
MAX_CHECKS = int(CHECKS_PER_S * POLL_INTERVAL_S)
#: Errors about a single user; the provider itself has answered.
_ABOUT_ONE = (OAuth2Error, QuireError, ValueError, KeyError)
#: Pauses requests to a provider that doesn't answer; its users keep their roles meanwhile.
breaker = CircuitBreaker("identity")


def groups_in(data: dict[str, Any]) -> set[str]:
    """Return the groups in the ID token and the user info."""
    groups: set[str] = set()
    for part in TOKEN_PARTS:
        named = (data.get(part) or {}).get(settings.QUIRE.oidc_groups_claim)
        if isinstance(named, str):
            groups.add(named)
        elif isinstance(named, list):
            groups.update(name for name in named if isinstance(name, str))
    return groups


def store_refresh_token(sociallogin: SocialLogin) -> None:
    """Store the encrypted refresh token. The account must have been saved."""
    secret = sociallogin.token.token_secret if sociallogin.token else ""
    SocialToken.objects.filter(account=sociallogin.account).delete()
    if secret:
        sealed = _box().encrypt(secret.encode()).decode()
        due = timezone.now() + EVERY
        SocialToken.objects.create(
            account=sociallogin.account, token="", token_secret=sealed, expires_at=due
        )


@receiver(user_logged_in, dispatch_uid="accounts.group_sync")
def _bound_session(request: HttpRequest, user: User, **details: Any) -> None:
    """Limit the session's lifetime if there is no refresh token."""
    login = details.get("sociallogin")
    if login is not None and not SocialToken.objects.filter(account=login.account).exists():
        request.session.set_expiry(timezone.now() + SESSION)


def check_due_users() -> int:
    """Queue the checks that are due, at most as many as fit before the next call."""
    due = [] if breaker.is_open else list(_due().values_list("pk", flat=True)[:MAX_CHECKS])
    for pk in due:
        send_task_best_effort(CHECK, pk, expires=POLL_INTERVAL_S)
    return len(due)


def check_user(pk: int) -> None:
    """Check the user of a token if that is due and the provider is available. May block."""
    token = _due().filter(pk=pk).first()
    if token is None or breaker.is_open:
        return
    mine = SocialToken.objects.filter(pk=pk, expires_at=token.expires_at)
    if not mine.update(expires_at=timezone.now() + EVERY):  # another worker has claimed it
        return
    breaker.attempt()
    try:
        _check(token)
    except (requests.RequestException, SoftTimeLimitExceeded) as error:
        logger.warning("The provider couldn't say who %s is: %r", token.account.user, error)
        return
    except _ABOUT_ONE as error:
        logger.warning("The provider couldn't say who %s is: %s", token.account.user, error)
    breaker.succeed()


def _due() -> QuerySet[SocialToken]:
    return SocialToken.objects.filter(expires_at__lte=timezone.now()).order_by("expires_at")


def _check(token: SocialToken) -> None:
    account: SocialAccount = token.account
    try:
        secret = _box().decrypt(token.token_secret.encode()).decode()
    except InvalidToken:  # the secret key was replaced: the token can't be decrypted
        _sign_out(token)
        return
    provider = OpenIDConnectOAuth2Adapter(None, PROVIDER)
    answer = _refreshed(provider, secret)
    if answer is None:
        _handle_revoked(token)
        return
    if new_token := answer.get("refresh_token"):
        SocialToken.objects.filter(pk=token.pk).update(
            token_secret=_box().encrypt(str(new_token).encode()).decode()
        )
    data = _user_info(provider, answer)
    if any(part.get("sub") not in (None, account.uid) for part in data.values()):
        raise ValueError("the provider speaks of somebody else")
    if not _provider_lists_groups(account, data):
        logger.warning("The provider names no groups of %s between sign-ins.", account.user)
        return
    sync_roles_from_groups(
        user=account.user, groups=groups_in(data), roles=settings.QUIRE.oidc_roles
    )


def _refreshed(provider: OpenIDConnectOAuth2Adapter, secret: str) -> dict[str, Any] | None:
    """Return new tokens; None if the provider has revoked this one. Raises RequestException."""
    app = provider.get_provider().app
    form = {"grant_type": "refresh_token", "refresh_token": secret}
    auth = (app.client_id, app.secret) if provider.basic_auth else None
    if auth is None:
        form |= {"client_id": app.client_id, "client_secret": app.secret}
    with get_adapter().get_requests_session() as session:
        answer = session.post(provider.access_token_url, data=form, auth=auth)
    refreshed: dict[str, Any] = {}
    if answer.status_code in (HTTPStatus.OK, HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED):
        refreshed = dict(answer.json())
    if refreshed.get("error") == "invalid_grant":
        return None
    answer.raise_for_status()
    return refreshed


def _user_info(provider: OpenIDConnectOAuth2Adapter, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the provider's current claims about the user, by source."""
    data = {"userinfo": provider._fetch_user_info(answer["access_token"])}
    if signed := answer.get("id_token"):
        provider.did_fetch_access_token = True
        data["id_token"] = provider._decode_id_token(provider.get_provider().app, signed)
    return data


def _provider_lists_groups(account: SocialAccount, data: dict[str, Any]) -> bool:
    """Return whether missing groups mean that the user has none: the answer includes a source that
    contained groups at sign-in.

    Some providers put groups only into the ID token, and omit it when tokens are refreshed.
    """
    claim = settings.QUIRE.oidc_groups_claim
    parts = {part for part in TOKEN_PARTS if claim in (account.extra_data.get(part) or {})}
    return bool(groups_in(data)) or not parts or bool(parts & data.keys())


def _handle_revoked(token: SocialToken) -> None:
    """Handle a token that the provider rejects: the user has left, or the token has expired.

    Offline tokens only end with the user's access. Others also end with the session at the
    provider: the user then signs in again, which updates their groups.
    """
    user = token.account.user
    app = get_adapter().get_app(None, provider=PROVIDER)
    if OFFLINE in app.settings.get("scope", ()):
        with transaction.atomic():
            sync_roles_from_groups(user=user, groups=(), roles=settings.QUIRE.oidc_roles)
            _sign_out(token)
    else:
        _sign_out(token)


@transaction.atomic
def _sign_out(token: SocialToken) -> None:
    user = token.account.user
    log_action(SSO_ACTOR, "sign_on.end", user)
    end_sessions(user)
    token.delete()


def _box() -> Any:
    return fernet_for("sign-on tokens")


# The provider's discovery document names its other URLs, so these are untrusted too: their hosts
# are resolved once and must be public (or in `QUIRE_EGRESS_NETWORKS`), and redirects aren't
# followed.

#: Allowed loopback hosts of a provider, if the operator has configured one of them as the issuer.
LOOPBACK = ("localhost", "127.0.0.1")


class ProviderSession(requests.Session):
    """A session that also raises `requests.RequestException` for forbidden addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False
        self.max_redirects = 0
        timed = functools.partial(super().request, timeout=app_settings.REQUESTS_TIMEOUT)
        self.request = timed  # type: ignore[method-assign]

    def get_adapter(self, url: str | bytes) -> HTTPAdapter:
        """Return an adapter that connects to the checked address."""
        try:
            target = check_url(str(url))
            local = target.host in LOOPBACK and target.host in _issuers()
            return _Pinned(target, target.host if local else resolve(target.host, target.port))
        except QuireError as error:
            logger.error("The identity provider can't be asked: %s", error.message)
            raise requests.ConnectionError(error.message) from error


def _issuers() -> set[str]:
    """Return the hosts of the issuers that the operator has configured."""
    apps: list[dict[str, Any]] = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"]
    return {urlsplit(app["settings"]["server_url"]).hostname or "" for app in apps}


class _Pinned(HTTPAdapter):
    """Connects to a checked address; the host name is used for TLS and the `Host` header."""

    def __init__(self, target: Target, address: Address | str) -> None:
        self._target, self._address = target, str(address)
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Verify the certificate against the host name."""
        if self._target.scheme == "https":
            kwargs |= {"server_hostname": self._target.host, "assert_hostname": self._target.host}
        super().init_poolmanager(*args, **kwargs)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> Any:
        """Send the request to the address instead of the host name."""
        parts = urlsplit(str(request.url))
        request.headers["Host"] = parts.netloc
        host = f"[{self._address}]" if ":" in self._address else self._address
        request.url = urlunsplit(parts._replace(netloc=f"{host}:{self._target.port}"))
        return super().send(request, *args, **kwargs)
