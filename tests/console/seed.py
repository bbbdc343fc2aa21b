"""Rows for a live server: run as a process of its own on a data dir with tables and no rows.

Two tenants. Ada belongs to Acme and may use the public models and Acme's; Olga belongs to Rival;
root runs the installation. Tom, Kim and Lea are members of Acme. What it writes is JSON: the values
of session cookies by name, and a key of Acme's.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

import django

PASSWORD = "a quiet page of ink"
#: The product takes a log-in for recent for 300 s. Theirs is, as long as tests run.
LATER_S = 3600


def main() -> None:
    """Make the rows."""
    django.setup()
    from tests.console.rows import make_rows

    make_rows()
    make_colleagues()
    names = ("ada", "olga", "nobody", "root", "lea", "noah")
    print(json.dumps({"sessions": {name: logged_in(name) for name in names}, "key": make_key()}))


def make_colleagues() -> None:
    """Tom, Kim, Lea and Noah, who is removed: members of Acme's with the password of all."""
    from tenants import actions
    from tenants.actors import SYSTEM_ACTOR
    from tenants.models import Role, Tenant, User

    acme, password = Tenant.objects.get(slug="acme"), User.objects.get(username="ada").password
    for name in ("tom", "kim", "lea", "noah"):
        user = User.objects.create_user(name, f"{name}@example.org")
        User.objects.filter(pk=user.pk).update(password=password)
        actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=Role.MEMBER)


def make_key() -> str:
    """The secret of a key of Acme's."""
    from tenants import actions
    from tenants.actors import SYSTEM_ACTOR
    from tenants.models import Tenant

    acme = Tenant.objects.get(slug="acme")
    return str(actions.create_key(actor=SYSTEM_ACTOR, tenant=acme, name="program").secret)


def logged_in(name: str) -> str:
    """This user's session cookie as name=value. To log in with a password in a browser takes a
    second of a core; that it works is shown in `test_identity` and `test_keyboard`.
    """
    from django.conf import settings
    from django.contrib.sessions.backends.db import SessionStore

    from accounts.reauthentication import SESSION_KEY
    from tests.console.sessions import session_of

    session = SessionStore(session_of(name))
    session[SESSION_KEY] += LATER_S
    session.save()
    return f"{settings.SESSION_COOKIE_NAME}={session.session_key}"


if __name__ == "__main__":
    main()
