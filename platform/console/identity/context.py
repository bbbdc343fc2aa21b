"""What every page may ask."""

from typing import Any

from django.conf import settings
from django.http import HttpRequest


def mail(request: HttpRequest) -> dict[str, Any]:
    """`mail_works`: whether a forgotten password can be mailed a new one."""
    return {"mail_works": bool(settings.SMTP_URL)}
