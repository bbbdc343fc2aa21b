"""Sessions of people who are logged in, as their browsers send them."""

from __future__ import annotations

from django.conf import settings
from django.test import Client

from tenants.models import User


def session_of(name: str) -> str:
    """The value of the session's cookie."""
    client = Client()
    client.force_login(User.objects.get(username=name))
    return client.cookies[settings.SESSION_COOKIE_NAME].value
