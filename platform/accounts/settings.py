"""Settings of django-allauth, and of an identity provider."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured

from common import settings as env

ROLES = ("owner", "admin", "member", "viewer")
OPERATOR = "operator"
#: Wrong passwords from one address in five minutes, whatever the names.
ADDRESS_ATTEMPTS = 40


def identity_settings(*, secure: bool) -> dict[str, object]:
    """All of them by their names. Raises ImproperlyConfigured."""
    attempts = env.integer("QUIRE_LOGIN_ATTEMPTS", 10, low=1)
    return {
        "ACCOUNT_ADAPTER": "accounts.adapters.AccountAdapter",
        "ACCOUNT_LOGIN_METHODS": {"username", "email"},
        "ACCOUNT_SIGNUP_FIELDS": ["username*", "password1*"],
        "ACCOUNT_EMAIL_VERIFICATION": "none",
        "ACCOUNT_SESSION_REMEMBER": True,
        "ACCOUNT_LOGOUT_REDIRECT_URL": "login",
        "ACCOUNT_EMAIL_UNKNOWN_ACCOUNTS": False,
        "ACCOUNT_LOGIN_ON_PASSWORD_RESET": False,
        # Guessing passwords: so many wrong ones for a name from an address, and from an address
        # for all names together, then a pause.
        "ACCOUNT_RATE_LIMITS": {
            "login": "120/m/ip",
            "login_failed": f"{max(ADDRESS_ATTEMPTS, attempts)}/5m/ip,{attempts}/5m/key",
        },
        "MFA_ADAPTER": "accounts.adapters.SecondFactorAdapter",
        "MFA_SUPPORTED_TYPES": ["totp", "webauthn", "recovery_codes"],
        "MFA_RECOVERY_CODES_SHOW_ONCE": True,
        "MFA_TOTP_ISSUER": "Quire",
        # RFC 6238, 5.2: codes are typed in near the end of their 30 seconds, and clocks differ.
        "MFA_TOTP_TOLERANCE": 1,
        "MFA_FORMS": {
            "authenticate": "accounts.forms.OneTimeCodeForm",
            "reauthenticate": "accounts.forms.ReauthOneTimeCodeForm",
        },
        "MFA_ALLOW_UNVERIFIED_EMAIL": True,
        # Without TLS browsers offer security keys on localhost alone.
        "MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN": not secure,
        "MFA_REQUIRED_ROLES": _required_roles(),
        "SOCIALACCOUNT_ADAPTER": "accounts.adapters.SocialAccountAdapter",
        "SOCIALACCOUNT_AUTO_SIGNUP": True,
        "SOCIALACCOUNT_EMAIL_AUTHENTICATION": True,
        "SOCIALACCOUNT_EMAIL_AUTHENTICATION_AUTO_CONNECT": True,
        # A form's redirect to the provider would not pass the pages' own policy.
        "SOCIALACCOUNT_LOGIN_ON_GET": True,
        "SOCIALACCOUNT_STORE_TOKENS": False,
        "SOCIALACCOUNT_PROVIDERS": {
            "openid_connect": {"APPS": _provider(), "OAUTH_PKCE_ENABLED": True}
        },
        "OIDC_GROUPS_CLAIM": env.text("QUIRE_OIDC_GROUPS_CLAIM", "groups"),
        "OIDC_ROLES": _group_roles(),
    }


def _provider() -> list[dict[str, object]]:
    issuer = env.text("QUIRE_OIDC_ISSUER", "")
    if not issuer:
        return []
    if not issuer.startswith(("https://", "http://localhost", "http://127.0.0.1")):
        raise ImproperlyConfigured("QUIRE_OIDC_ISSUER must be an https:// address.")
    client = env.text("QUIRE_OIDC_CLIENT_ID", "")
    secret = env.secret("QUIRE_OIDC_CLIENT_SECRET").strip()
    if not client or not secret:
        raise ImproperlyConfigured(
            "QUIRE_OIDC_ISSUER needs QUIRE_OIDC_CLIENT_ID and QUIRE_OIDC_CLIENT_SECRET too."
        )
    scopes = ["openid", "profile", "email", *env.words("QUIRE_OIDC_SCOPES", [])]
    return [
        {
            "provider_id": "sso",
            "name": env.text("QUIRE_OIDC_NAME", "single sign-on"),
            "client_id": client,
            "secret": secret,
            "settings": {"server_url": issuer, "scope": scopes},
        }
    ]


def _group_roles() -> dict[str, str]:
    """`group=tenant:role` or `group=operator`, comma-separated."""
    found = {}
    for word in env.words("QUIRE_OIDC_ROLES", []):
        group, equals, target = word.rpartition("=")
        tenant, colon, role = target.partition(":")
        right = target == OPERATOR or (colon and tenant and role in ROLES)
        if not equals or not group or not right:
            raise ImproperlyConfigured(
                f"QUIRE_OIDC_ROLES: {word!r} is neither group=tenant:role nor group=operator; "
                f"roles are {', '.join(ROLES)}."
            )
        found[group] = target
    return found


def _required_roles() -> list[str]:
    found = env.words("QUIRE_MFA_ROLES", [])
    for word in found:
        if word not in (OPERATOR, *ROLES):
            known = ", ".join((OPERATOR, *ROLES))
            raise ImproperlyConfigured(f"QUIRE_MFA_ROLES: {word!r} is none of {known}.")
    return found
