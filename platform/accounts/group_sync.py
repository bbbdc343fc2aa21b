"""Whether people who came by single sign-on still are in their groups.

Groups are applied at each sign-in, but somebody who is let go doesn't sign in again. Where the
provider gives a refresh token, workers ask it every few minutes, and what it says holds at once.
Where it gives none, sessions end after `SESSION`, so that people sign in anew.
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
#: How long until groups are asked for again, and so how long somebody who was let go stays.
EVERY = timedelta(minutes=5)
#: How long a session lasts whose person can't be asked for.
SESSION = timedelta(hours=12)
#: The scope that gives refresh tokens that outlive the session at the provider.
OFFLINE = "offline_access"
TOKEN_PARTS = ("userinfo", "id_token")
CHECK = "console.check_user"
#: How often workers look whose time has come.
POLL_INTERVAL_S = 60.0
CHECKS_PER_S = 10
MAX_CHECKS = int(CHECKS_PER_S * POLL_INTERVAL_S)
#: What is wrong with one person; the provider has answered.
_ABOUT_ONE = (OAuth2Error, QuireError, ValueError, KeyError)
#: A provider that doesn't answer is left in peace: its people keep what they have meanwhile.
breaker = CircuitBreaker("identity")


def groups_in(data: dict[str, Any]) -> set[str]:
    """The groups that the provider names, in the id token or the user's own data."""
    groups: set[str] = set()
    for part in TOKEN_PARTS:
        named = (data.get(part) or {}).get(settings.QUIRE.oidc_groups_claim)
        if isinstance(named, str):
            groups.add(named)
        elif isinstance(named, list):
            groups.update(name for name in named if isinstance(name, str))
    return groups


def store_refresh_token(sociallogin: SocialLogin) -> None:
    """Keep what the provider can be asked with again, encrypted. For an account that is saved."""
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
    """End the session by itself where there is no refresh token."""
    login = details.get("sociallogin")
    if login is not None and not SocialToken.objects.filter(account=login.account).exists():
        request.session.set_expiry(timezone.now() + SESSION)


def check_due_users() -> int:
    """Have workers ask for those whose time has come, as many as they can until the next call."""
    due = [] if breaker.is_open else list(_due().values_list("pk", flat=True)[:MAX_CHECKS])
    for pk in due:
        send_task_best_effort(CHECK, pk, expires=POLL_INTERVAL_S)
    return len(due)


def check_user(pk: int) -> None:
    """Ask for the person of a token, if their time has come and the provider answers. May block."""
    token = _due().filter(pk=pk).first()
    if token is None or breaker.is_open:
        return
    mine = SocialToken.objects.filter(pk=pk, expires_at=token.expires_at)
    if not mine.update(expires_at=timezone.now() + EVERY):  # another worker asks
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
    except InvalidToken:  # the secret key was replaced
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
    """New tokens; None when the provider takes this one no more. Raises RequestException."""
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
    """The provider's current claims about the user, by their source."""
    data = {"userinfo": provider._fetch_user_info(answer["access_token"])}
    if signed := answer.get("id_token"):
        provider.did_fetch_access_token = True
        data["id_token"] = provider._decode_id_token(provider.get_provider().app, signed)
    return data


def _provider_lists_groups(account: SocialAccount, data: dict[str, Any]) -> bool:
    """Whether no groups means none: they are named where they were at the sign-in.

    Some providers put them into the id token alone, and send none when they are asked again.
    """
    claim = settings.QUIRE.oidc_groups_claim
    parts = {part for part in TOKEN_PARTS if claim in (account.extra_data.get(part) or {})}
    return bool(groups_in(data)) or not parts or bool(parts & data.keys())


def _handle_revoked(token: SocialToken) -> None:
    """The provider takes the token no more: the person was let go, or it only ended by time.

    Tokens for offline access end with the right to come. Others end with the session at the
    provider: then the person signs in anew, and that says what their groups are.
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
    log_action(actor=SSO_ACTOR, action="sign_on.end", target=user)
    end_sessions(user)
    token.delete()


def _box() -> Any:
    return fernet_for("sign-on tokens")


# The provider's discovery document names its other URLs, so those are untrusted too: their hosts
# are resolved once and must be public (or in `QUIRE_EGRESS_NETWORKS`), and redirects aren't
# followed.

#: Where a provider may run beside this process, when the operator has named it so.
LOOPBACK = ("localhost", "127.0.0.1")


class ProviderSession(requests.Session):
    """Raises `requests.RequestException` for what may not be asked, too."""

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False
        self.max_redirects = 0
        timed = functools.partial(super().request, timeout=app_settings.REQUESTS_TIMEOUT)
        self.request = timed  # type: ignore[method-assign]

    def get_adapter(self, url: str | bytes) -> HTTPAdapter:
        """An adapter that connects to the checked address."""
        try:
            target = check_url(str(url))
            local = target.host in LOOPBACK and target.host in _issuers()
            return _Pinned(target, target.host if local else resolve(target.host, target.port))
        except QuireError as error:
            logger.error("The identity provider can't be asked: %s", error.message)
            raise requests.ConnectionError(error.message) from error


def _issuers() -> set[str]:
    """Hosts of the providers that the operator has named."""
    apps: list[dict[str, Any]] = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"]
    return {urlsplit(app["settings"]["server_url"]).hostname or "" for app in apps}


class _Pinned(HTTPAdapter):
    """Connects to a checked address; the name is for the certificate and the `Host` header."""

    def __init__(self, target: Target, address: Address | str) -> None:
        self._target, self._address = target, str(address)
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """The certificate is the name's."""
        if self._target.scheme == "https":
            kwargs |= {"server_hostname": self._target.host, "assert_hostname": self._target.host}
        super().init_poolmanager(*args, **kwargs)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> Any:
        """Send with the address in place of the name."""
        parts = urlsplit(str(request.url))
        request.headers["Host"] = parts.netloc
        host = f"[{self._address}]" if ":" in self._address else self._address
        request.url = urlunsplit(parts._replace(netloc=f"{host}:{self._target.port}"))
        return super().send(request, *args, **kwargs)
