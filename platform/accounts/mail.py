"""How mail is sent, from one address that says it all.

Pages hand mails to a worker (`accounts.mail_backend`), so that nobody waits for a mail server.
"""

from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

from common.redaction import check_address

SCHEMES = {"smtp": 25, "smtps": 465, "smtp+starttls": 587}
TIMEOUT_S = 10


def mail_settings(url: str, sender: str) -> dict[str, object]:
    """Django's settings for `smtp://user:password@host:port`; nothing is sent without a URL.

    `smtps://` speaks TLS from the start, `smtp+starttls://` asks for it.
    """
    if not url:
        return {"EMAIL_BACKEND": "django.core.mail.backends.dummy.EmailBackend"}
    check_address("QUIRE_SMTP_URL", url)
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ImproperlyConfigured(f"QUIRE_SMTP_URL must start with {known} and name a host.")
    if not sender:
        raise ImproperlyConfigured("QUIRE_MAIL_FROM must be set where QUIRE_SMTP_URL is.")
    return {
        "EMAIL_BACKEND": "accounts.mail_backend.QueuedBackend",
        "EMAIL_HOST": parts.hostname,
        "EMAIL_PORT": parts.port or SCHEMES[parts.scheme],
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_SSL": parts.scheme == "smtps",
        "EMAIL_USE_TLS": parts.scheme == "smtp+starttls",
        "EMAIL_TIMEOUT": TIMEOUT_S,
        "DEFAULT_FROM_EMAIL": sender,
        "SERVER_EMAIL": sender,
    }
