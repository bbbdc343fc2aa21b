"""Settings of django-allauth, and of an identity provider."""

from __future__ import annotations

from common.settings import QuireSettings

#: Wrong passwords from one address in five minutes, whatever the names.
ADDRESS_ATTEMPTS = 40


def identity_settings(settings: QuireSettings) -> dict[str, object]:
    """All of them by their names."""
    attempts = settings.login_attempts
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
        "MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN": settings.tls == "off",
        "SOCIALACCOUNT_ADAPTER": "accounts.adapters.SocialAccountAdapter",
        "SOCIALACCOUNT_AUTO_SIGNUP": True,
        "SOCIALACCOUNT_EMAIL_AUTHENTICATION": True,
        "SOCIALACCOUNT_EMAIL_AUTHENTICATION_AUTO_CONNECT": True,
        # A form's redirect to the provider would not pass the pages' own policy.
        "SOCIALACCOUNT_LOGIN_ON_GET": True,
        "SOCIALACCOUNT_STORE_TOKENS": False,
        "SOCIALACCOUNT_PROVIDERS": {
            "openid_connect": {"APPS": _providers(settings), "OAUTH_PKCE_ENABLED": True}
        },
    }


def _providers(settings: QuireSettings) -> list[dict[str, object]]:
    if not settings.oidc_issuer:
        return []
    return [
        {
            "provider_id": "sso",
            "name": settings.oidc_name,
            "client_id": settings.oidc_client_id,
            "secret": settings.oidc_client_secret.get_secret_value(),
            "settings": {
                "server_url": settings.oidc_issuer,
                "scope": ["openid", "profile", "email", *settings.oidc_scopes],
            },
        }
    ]
