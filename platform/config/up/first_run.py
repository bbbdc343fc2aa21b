"""First-run set-up for `manage.py up`: adapters, user, tenant, keys and the served model."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError
from django.db import transaction
from django.utils import timezone

from adapters import actions
from adapters.models import WORKING, Adapter, AdapterVersion, VersionState
from catalog import actions as catalog_actions
from catalog.checkpoint import default_name
from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from common.files import write_private
from config.embedded_redis import StartFailed
from engine.contract.errors import InvalidRequest, ModelLoadError, QuireError
from engine.contract.hub_files import resolve_source
from engine.contract.lora import CONFIG_FILE, adapter_digest, snapshot_of
from tenants import actions as tenant_actions
from tenants import api_keys
from tenants.actors import CLI_ACTOR, SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Membership, Role, Tenant, User

DEMO_WORDS = {
    "pirate": "Answers as a pirate would.",
    "butler": "Answers as a butler of the old school.",
}


@dataclass(frozen=True)
class Module:
    """One adapter of `--lora-modules`. `base`: name of its base model; "" for the served one."""

    name: str
    path: str
    base: str = ""


def parse_lora_modules(words: Sequence[str] | None) -> list[Module]:
    """Parse `NAME=PATH` or `{"name": ..., "path": ...}`. Raises `CommandError`."""
    modules = [_module(word) for word in words or ()]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise CommandError(f"--lora-modules names {name!r} twice.")
    for module in modules:
        if not Path(module.path).expanduser().exists():
            raise CommandError(f"--lora-modules {module.name}: there is no {module.path}.")
    return modules


def _module(word: str) -> Module:
    if not word.lstrip().startswith("{"):
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise CommandError(f"--lora-modules takes NAME=PATH or JSON, got {word[:100]!r}.")
        return Module(name, path)
    try:
        parsed = json.loads(word)
        values = (parsed["name"], parsed["path"], parsed.get("base_model_name") or "")
        if not all(isinstance(text, str) for text in values):
            raise TypeError
        return Module(*values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            '--lora-modules as JSON is {"name": "...", "path": "..."}, perhaps with '
            f'"base_model_name"; got {word[:200]!r}.'
        ) from error


def ensure_adapters(model: ServedModel, words: Sequence[str] | None) -> list[AdapterVersion]:
    """Add the adapters to the store; a worker validates them, then they become live. Returns the
    versions of `--lora-modules`.

    Raises `CommandError` for one of `--lora-modules` that is refused.
    """
    versions = []
    for module in parse_lora_modules(words):
        if module.base not in ("", model.name, *model.aliases):
            raise CommandError(
                f"--lora-modules {module.name} is for {module.base}, but {model.name} is served."
            )
        try:
            path = resolve_source(snapshot_of(Path(module.path).expanduser()))
            versions.append(_ensure(model, module.name, path))
        except QuireError as error:
            raise CommandError(f"--lora-modules {module.name}: {error.message}") from error
    if Path(model.source) == Path(settings.QUIRE.demo_model):
        for folder in sorted(Path(settings.QUIRE.demo_adapters).glob("*/")):
            if (folder / CONFIG_FILE).is_file():
                _ensure_demo(model, folder)
    return versions


def still_checked(versions: Sequence[AdapterVersion]) -> bool:
    """Return whether a worker is still validating one of the versions. Raises `StartFailed` if one
    was refused: a server started with an adapter is useless without it.
    """
    rows = AdapterVersion.objects.filter(pk__in=[version.pk for version in versions])
    for version in rows.filter(state=VersionState.FAILED).select_related("adapter"):
        raise StartFailed(f"--lora-modules {version.adapter.name}: {version.problem}")
    return rows.filter(state__in=WORKING).exists()


def _ensure_demo(model: ServedModel, folder: Path) -> None:
    """Add a demo adapter once, so that an operator's deletion or change is respected."""
    seen = AuditEntry.objects.filter(
        action="adapter.create", target_label=f"{model}:{folder.name}"
    ).exists()
    if not seen and not Adapter.objects.filter(tenant=None, name=folder.name).exists():
        _ensure(model, folder.name, folder)


def _ensure(model: ServedModel, name: str, path: Path) -> AdapterVersion:
    """Return the adapter version with this content; create it if there is none."""
    existing = AdapterVersion.objects.filter(
        adapter__tenant=None,
        adapter__served_model=model,
        adapter__name=name,
        digest=adapter_digest(path),
    )
    version = existing.first()
    if version is None:
        version = actions.add_from_folder(
            actor=CLI_ACTOR,
            tenant=None,
            served_model=model,
            name=name,
            path=str(path),
            description=DEMO_WORDS.get(name, ""),
            promote=True,
        )
    return version


FILE = "credentials.json"
ADMIN = "admin"
TENANT = "Default"


@dataclass
class Credentials:
    """Secrets created at the first start. "" means unknown (or no longer known)."""

    admin_user: str = ""
    admin_password: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)

    @classmethod
    def read(cls, data_dir: Path) -> Credentials:
        """Read the file in the data dir; an unreadable one counts as missing."""
        try:
            stored = json.loads((data_dir / FILE).read_text(encoding="utf-8"))
            return cls(**{name: str(stored.get(name, "")) for name in cls.__dataclass_fields__})
        except (OSError, ValueError, AttributeError):
            return cls()

    def write(self, data_dir: Path) -> None:
        """Write the file with mode 0600."""
        write_private(data_dir / FILE, json.dumps(asdict(self), indent=2) + "\n")


@transaction.atomic
def ensure_credentials(data_dir: Path) -> Credentials:
    """Create an instance's user, tenant and key at its first start; read them at later ones.

    A changed password or a revoked key is not printed again. A revoked key is replaced by a new
    one, because `manage.py up` promises to print a key.
    """
    stored = Credentials.read(data_dir)
    created = Credentials()
    user = _ensure_admin(stored, created)
    tenant = _ensure_tenant(user)
    created.api_key = stored.api_key if _works(stored.api_key) else _new_key(tenant)
    if created != stored:
        created.write(data_dir)
    return created


def _ensure_admin(stored: Credentials, created: Credentials) -> User | None:
    """Return a superuser; put its password into `created` if it is new or still the stored one."""
    superusers = User.objects.filter(is_superuser=True, is_active=True).order_by("pk")
    if stored.admin_user:
        superusers = superusers.filter(username=stored.admin_user) or superusers
    user = superusers.first()
    if user is None:
        created.admin_user, created.admin_password = _free_name(), secrets.token_urlsafe(12)
        return tenant_actions.create_user(
            actor=SYSTEM_ACTOR,
            username=created.admin_user,
            password=created.admin_password,
            is_superuser=True,
        )
    created.admin_user = user.get_username()
    if stored.admin_password and user.check_password(stored.admin_password):
        created.admin_password = stored.admin_password
    return user


def _free_name() -> str:
    if not User.objects.filter(username=ADMIN).exists():
        return ADMIN
    return f"{ADMIN}-{secrets.token_hex(2)}"


def _ensure_tenant(user: User | None) -> Tenant:
    """Return the oldest active tenant, or create one."""
    tenant = Tenant.objects.filter(active=True).order_by("pk").first()
    if tenant is None:
        return tenant_actions.create_tenant(actor=SYSTEM_ACTOR, name=TENANT, owner=user)
    if user is not None and not Membership.objects.filter(user=user).exists():
        tenant_actions.add_member(actor=SYSTEM_ACTOR, tenant=tenant, user=user, role=Role.OWNER)
    return tenant


def _works(secret: str) -> bool:
    """Return whether the stored key is still valid and may be printed: operator keys may not."""
    public_id = api_keys.public_id_of(secret)
    key = ApiKey.objects.select_related("tenant").filter(public_id=public_id).first()
    if key is None or api_keys.OPERATOR in key.scopes:
        return False
    return key.state() == "active" and key.tenant.active


def _new_key(tenant: Tenant) -> str:
    return tenant_actions.create_key(
        actor=SYSTEM_ACTOR, tenant=tenant, name="Quick-start key", scopes=api_keys.DEFAULT
    ).secret


NAME = "given with --api-key"


def keys_from_environment() -> list[str]:
    """Return the keys of `QUIRE_API_KEYS`."""
    return [key.get_secret_value() for key in settings.QUIRE.api_keys]


def check_given_keys(keys: Sequence[str]) -> None:
    """Raise `InvalidRequest` for a key that is too short or too long, before anything starts."""
    for key in keys:
        api_keys.validate_operator_key(key)


def ensure_given_keys(keys: Sequence[str]) -> None:
    """Register these keys for the first tenant; an existing key is left unchanged.

    Raises: `InvalidRequest` for a key that is too short or too long.
    """
    tenant = Tenant.objects.filter(active=True).order_by("pk").first()
    for key in keys:
        existing = ApiKey.objects.filter(public_id=api_keys.lookup_id(key)).first()
        if tenant is not None and (existing is None or existing.digest != api_keys.hash_key(key)):
            tenant_actions.create_key(actor=SYSTEM_ACTOR, tenant=tenant, name=NAME, secret=key)


DEMO, VISION_DEMO = "quire-demo", "quire-demo-vision"


@dataclass(frozen=True)
class StartupModel:
    """The model that this start waits for, and its previous row in the catalogue, if any.

    `unloaded`: what earlier starts had left loaded beside it.
    """

    model: ServedModel
    previous_row: ServedModel | None
    unloaded: list[ServedModel] = field(default_factory=list)

    def unload_other_models(self) -> str:
        """Unload what earlier starts left loaded beside the model; returns the names."""
        loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED, managed=True)
        for row in loaded.exclude(pk=self.model.pk).order_by("pk"):
            self.unloaded.append(catalog_actions.unload_model(actor=CLI_ACTOR, model=row))
        return ", ".join(row.name for row in self.unloaded)

    def undo(self) -> None:
        """Revert the requested state of a model that can't be served; otherwise every later start
        would try to load it again. Those load what was unloaded for it.
        """
        for row in self.unloaded:
            catalog_actions.load_model(actor=CLI_ACTOR, name=row.name)
        previous = self.previous_row
        if previous is not None and previous.desired_state == DesiredState.LOADED:
            earlier = {"source": previous.source, "settings": previous.settings}
            try:
                catalog_actions.update_model(actor=CLI_ACTOR, model=self.model, **earlier)
            except InvalidRequest:  # its folder was removed in the meantime
                pass
            else:
                return
        catalog_actions.unload_model(actor=CLI_ACTOR, model=self.model)


def ensure_model(
    source: str | None, names: list[str], engine: dict[str, Any], **columns: int | None
) -> StartupModel:
    """Request the model to wait for: the named one, one from the catalogue, or the bundled demo.

    Args:
        source, names: `--model` and `--served-model-name`; further names become aliases.
        columns: `num_replicas`, `num_spares`, `num_prefill`, `num_encode`; None keeps the
            current value.
        engine: other engine settings from the command line; they replace the model's settings.
    Raises: `QuireError`s of the catalogue; `ModelLoadError` when the demo model is missing.
    """
    clear_stale_replicas()
    name = names[0] if names else None
    if source:
        name = name or default_name(source)
    else:
        loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED, managed=True)
        model = (loaded.filter(name=name) if name else loaded).order_by("pk").first()
        if model is None:
            source, name = str(_demo_model()), name or DEMO
        else:
            name = model.name
    existing = ServedModel.objects.filter(name=name).first()
    aliases = names[1:] if names else None
    return StartupModel(_loaded(name, source, engine, {"aliases": aliases, **columns}), existing)


def clear_stale_replicas() -> None:
    """Mark replicas that a killed supervisor left as stopped: we hold the data dir exclusively."""
    alive = Replica.objects.filter(
        state__in=catalog_actions.LIVE_STATES, served_model__managed=True
    )
    alive.filter(served_model__node="").update(state=ReplicaState.STOPPED, last_seen=timezone.now())


def _loaded(
    name: str, source: str | None, engine: dict[str, Any], columns: dict[str, Any]
) -> ServedModel:
    model = ServedModel.objects.filter(name=name).first()
    if model is None or model.desired_state == DesiredState.UNLOADED:
        return catalog_actions.load_model(
            actor=CLI_ACTOR,
            name=name,
            source=source or "",
            settings=engine or None,
            **columns,
        )
    changes = dict(columns)
    if source:
        changes["source"] = source
    if engine or source:
        changes["settings"] = engine
    return catalog_actions.update_model(actor=CLI_ACTOR, model=model, **changes)


def ensure_vision_demo() -> None:
    """Load the demo vision model once, so that an operator's unloading or deletion of it is
    respected.
    """
    folder: Path = settings.QUIRE.demo_vision_model
    earlier_loads = AuditEntry.objects.filter(action="model.load", target_label=VISION_DEMO)
    names = {name for model in ServedModel.objects.all() for name in (model.name, *model.aliases)}
    if (
        (folder / "config.json").is_file()
        and VISION_DEMO not in names
        and not earlier_loads.exists()
    ):
        # Its vision encoder doesn't run on GPUs.
        catalog_actions.load_model(
            actor=CLI_ACTOR, name=VISION_DEMO, source=str(folder), settings={"device": "cpu"}
        )


def _demo_model() -> Path:
    folder: Path = settings.QUIRE.demo_model
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"The bundled demo model is not in {folder}. Name another with --model FOLDER."
        )
    return folder
