"""Settings of django-allauth, and of the identity provider."""

from __future__ import annotations

from common.settings import QuireSettings


def identity_settings(settings: QuireSettings) -> dict[str, object]:
    return {
        "ACCOUNT_ADAPTER": "accounts.adapters.AccountAdapter",
        "ACCOUNT_LOGIN_METHODS": {"username", "email"},
        "ACCOUNT_SIGNUP_FIELDS": ["username*", "password1*"],
        "ACCOUNT_EMAIL_VERIFICATION": "none",
        "ACCOUNT_SESSION_REMEMBER": True,
        "ACCOUNT_LOGOUT_REDIRECT_URL": "login",
        "ACCOUNT_EMAIL_UNKNOWN_ACCOUNTS": False,
        "ACCOUNT_LOGIN_ON_PASSWORD_RESET": False,
        # Against password guessing: limits of failed logins per address, and per name and address.
        "ACCOUNT_RATE_LIMITS": {
            "login": "120/m/ip",
            "login_failed": "40/5m/ip,10/5m/key",
        },
        "MFA_ADAPTER": "accounts.adapters.SecondFactorAdapter",
        "MFA_SUPPORTED_TYPES": ["totp", "webauthn", "recovery_codes"],
        "MFA_RECOVERY_CODES_SHOW_ONCE": True,
        "MFA_TOTP_ISSUER": "Quire",
        # RFC 6238, 5.2: users type codes near the end of their 30 seconds, and clocks differ.
        "MFA_TOTP_TOLERANCE": 1,
        "MFA_FORMS": {
            "authenticate": "accounts.forms.OneTimeCodeForm",
            "reauthenticate": "accounts.forms.ReauthOneTimeCodeForm",
        },
        "MFA_ALLOW_UNVERIFIED_EMAIL": True,
        # Without TLS, browsers support security keys only on localhost.
        "MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN": settings.tls == "off",
        "SOCIALACCOUNT_ADAPTER": "accounts.adapters.SocialAccountAdapter",
        "SOCIALACCOUNT_AUTO_SIGNUP": True,
        "SOCIALACCOUNT_EMAIL_AUTHENTICATION": True,
        "SOCIALACCOUNT_EMAIL_AUTHENTICATION_AUTO_CONNECT": True,
        # The pages' Content-Security-Policy would block a form that redirects to the provider.
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
