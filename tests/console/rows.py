"""The rows that the console's tests look at."""

from __future__ import annotations

from django.contrib.auth.hashers import make_password

from catalog.models import DesiredState, ServedModel
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant, User
from tests.console.seed import PASSWORD

#: name: (public, tenants by slug, loaded)
MODELS = {
    "quill": (True, (), True),
    "acme-private": (False, ("acme",), True),
    "rival-private": (False, ("rival",), True),
    "shelved": (True, (), False),
}


def make_rows() -> None:
    """Users, tenants, models; through the product's own actions where there are some."""
    ada = User.objects.create_user("ada", "ada@example.org")
    olga = User.objects.create_user("olga", "olga@example.org")
    User.objects.create_user("nobody", "nobody@example.org")
    User.objects.create_superuser("root", "root@example.org")
    User.objects.update(password=make_password(PASSWORD))  # which is slow on purpose
    tenants = {
        "acme": actions.create_tenant(actor=SYSTEM_ACTOR, name="Acme", owner=ada),
        "rival": actions.create_tenant(actor=SYSTEM_ACTOR, name="Rival", owner=olga),
    }
    make_models(tenants)


def make_models(tenants: dict[str, Tenant]) -> None:
    """The served models of `MODELS`; nothing runs them but what a test starts."""
    for name, (public, slugs, loaded) in MODELS.items():
        state = DesiredState.LOADED if loaded else DesiredState.UNLOADED
        model = ServedModel.objects.create(
            name=name, source=f"/models/{name}", public=public, managed=False, desired_state=state
        )
        model.tenants.set(tenants[slug] for slug in slugs)
