"""Mail settings from a single URL.

Web processes hand mails to a worker (`accounts.mail_backend`), so no request waits for a mail
server.
"""

from urllib.parse import unquote, urlsplit

PORTS = {"smtp": 25, "smtps": 465, "smtp+starttls": 587}
TIMEOUT_S = 10


def mail_settings(url: str, sender: str) -> dict[str, object]:
    """Return Django's settings for `smtp://user:password@host:port`; without a URL no mail is sent.

    `smtps://` uses TLS from the start, `smtp+starttls://` uses STARTTLS.
    """
    if not url:
        return {"EMAIL_BACKEND": "django.core.mail.backends.dummy.EmailBackend"}
    parts = urlsplit(url)
    return {
        "EMAIL_BACKEND": "accounts.mail_backend.QueuedBackend",
        "EMAIL_HOST": parts.hostname,
        "EMAIL_PORT": parts.port or PORTS[parts.scheme],
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_SSL": parts.scheme == "smtps",
        "EMAIL_USE_TLS": parts.scheme == "smtp+starttls",
        "EMAIL_TIMEOUT": TIMEOUT_S,
        "DEFAULT_FROM_EMAIL": sender,
        "SERVER_EMAIL": sender,
    }
