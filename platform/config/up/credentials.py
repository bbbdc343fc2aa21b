"""The first user, tenant and key of an instance, and where their secrets are kept for its owner."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from django.db import transaction

from config.datadir import write_private
from tenants import actions, scopes
from tenants import secrets as key_text
from tenants.actors import SYSTEM
from tenants.models import ApiKey, Membership, Role, Tenant, User

FILE = "credentials.json"
ADMIN = "admin"
TENANT = "Default"


@dataclass
class Credentials:
    """Secrets of the first start. "" stands for what isn't known (any more)."""

    admin_user: str = ""
    admin_password: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)

    @classmethod
    def read(cls, data_dir: Path) -> Credentials:
        """What is in the data dir; a file that can't be read counts as none."""
        try:
            found = json.loads((data_dir / FILE).read_text(encoding="utf-8"))
            return cls(**{name: str(found.get(name, "")) for name in cls.__dataclass_fields__})
        except (OSError, ValueError, AttributeError):
            return cls()

    def write(self, data_dir: Path) -> None:
        """Keep them with mode 0600."""
        write_private(data_dir / FILE, json.dumps(asdict(self), indent=2) + "\n")


@transaction.atomic
def ensure_credentials(data_dir: Path) -> Credentials:
    """Make what an instance needs at its first start, and read it at every other.

    A password that was changed or a key that was revoked is not shown again; a revoked key gets a
    successor, as `manage.py up` promises one.
    """
    known = Credentials.read(data_dir)
    found = Credentials()
    user = _ensure_admin(known, found)
    tenant = _ensure_tenant(user)
    found.api_key = known.api_key if _works(known.api_key) else _new_key(tenant)
    if found != known:
        found.write(data_dir)
    return found


def _ensure_admin(known: Credentials, found: Credentials) -> User | None:
    """A superuser; its password where we know it."""
    superusers = User.objects.filter(is_superuser=True, is_active=True).order_by("pk")
    if known.admin_user:
        superusers = superusers.filter(username=known.admin_user) or superusers
    user = superusers.first()
    if user is None:
        found.admin_user, found.admin_password = _free_name(), secrets.token_urlsafe(12)
        return actions.create_user(
            actor=SYSTEM,
            username=found.admin_user,
            password=found.admin_password,
            is_superuser=True,
        )
    found.admin_user = user.get_username()
    if known.admin_password and user.check_password(known.admin_password):
        found.admin_password = known.admin_password
    return user


def _free_name() -> str:
    if not User.objects.filter(username=ADMIN).exists():
        return ADMIN
    return f"{ADMIN}-{secrets.token_hex(2)}"


def _ensure_tenant(user: User | None) -> Tenant:
    """The oldest active tenant, or a first one."""
    tenant = Tenant.objects.filter(active=True).order_by("pk").first()
    if tenant is None:
        return actions.create_tenant(actor=SYSTEM, name=TENANT, owner=user)
    if user is not None and not Membership.objects.filter(user=user).exists():
        actions.add_member(actor=SYSTEM, tenant=tenant, user=user, role=Role.OWNER)
    return tenant


def _works(secret: str) -> bool:
    """Whether a key that we kept may still be used, and may be printed: operators' may not."""
    public_id = key_text.public_id_of(secret)
    key = ApiKey.objects.select_related("tenant").filter(public_id=public_id).first()
    if key is None or scopes.OPERATOR in key.scopes:
        return False
    return key.state() == "active" and key.tenant.active


def _new_key(tenant: Tenant) -> str:
    return actions.create_key(
        actor=SYSTEM, tenant=tenant, name="made by manage.py up", scopes=scopes.DEFAULT
    ).secret
