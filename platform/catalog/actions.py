"""The only functions that change what is served; supervisors carry the changes out."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from django.db import transaction
from django.db.models import F, ProtectedError
from django.utils import timezone

from catalog.heartbeats import send_control
from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from catalog.signals import served_model_changed
from common.db import changed, save_valid
from common.errors import Conflict
from engine.contract.errors import InvalidRequest
from engine.contract.hub_files import resolve_source
from engine.contract.messages import SLEEP_LEVELS, SLEEP_TAGS
from tenants.actors import Actor, require_operator
from tenants.audit import log_action
from tenants.models import Tenant, User

#: States in which a replica still holds memory or streams.
LIVE_STATES = (
    ReplicaState.LOADING,
    ReplicaState.READY,
    ReplicaState.SLEEPING,
    ReplicaState.DRAINING,
)
#: A row that no supervisor refreshed for this long belongs to a dead process.
SEEN_WITHIN_S = 30.0
CHANGEABLE = frozenset(
    {"source", "settings", "num_replicas", "num_spares", "num_prefill", "num_encode"}
    | {"node", "managed", "public", "aliases", "fallbacks", "idle_minutes"}
)


@transaction.atomic
def load_model(
    *,
    actor: Actor | User,
    name: str,
    source: str = "",
    settings: Mapping[str, Any] | None = None,
    **columns: Any,
) -> ServedModel:
    """Load a model: a new one from `source`, or one that was unloaded or failed to load.

    Of several concurrent loads one wins; the others get `Conflict`, as does a load while the
    model's replicas still drain. A failed load (`last_failure`) is retried at once.

    Args:
        source: a folder or a hub id. Optional for a model in the catalogue.
        settings: of `EngineConfig`, without `model` and `served_model_name`. None: unchanged.
        columns: `num_replicas`, `num_spares`, `num_prefill`, `num_encode`, `node`, `managed`,
            `public`, `aliases`, `fallbacks`, `idle_minutes`.
    Raises: `PermissionDenied`, `InvalidRequest` with `param`, `Conflict`.
    """
    actor = require_operator(actor)
    changes: dict[str, Any] = _check_columns(columns)
    if source:
        changes["source"] = check_source(source)
    if settings is not None:
        changes["settings"] = dict(settings)
    model = ServedModel.objects.select_for_update().filter(name=name).first()
    if model is None:
        if not source:
            raise InvalidRequest(
                f"Model {name!r} not found. To add it, pass the path of its folder.", param="name"
            )
        model = ServedModel(name=name)
    elif not last_failure(model):
        _refuse_while_in_use(model)
    changed(model, {**changes, "desired_state": DesiredState.LOADED, "idle_since": None})
    save_valid(model)  # the unique name decides between two concurrent first loads
    failed = model.replicas.filter(state=ReplicaState.FAILED)
    failed.update(state=ReplicaState.PENDING, detail="", last_exit="")
    log_action(actor, "model.load", model, source=model.source, settings=model.settings)
    _announce(model)
    return model


@transaction.atomic
def unload_model(*, actor: Actor | User, model: ServedModel) -> ServedModel:
    """Drain a model's replicas and stop them. Raises `Conflict` when it isn't loaded."""
    actor = require_operator(actor)
    model = ServedModel.objects.select_for_update().get(pk=model.pk)
    if model.desired_state == DesiredState.UNLOADED:
        raise Conflict(f"{model.name} is not loaded.")
    model.desired_state, model.idle_since = DesiredState.UNLOADED, None
    model.save(update_fields=["desired_state", "idle_since", "changed_at"])
    log_action(actor, "model.unload", model)
    _announce(model)
    return model


@transaction.atomic
def update_model(*, actor: Actor | User, model: ServedModel, **changes: Any) -> ServedModel:
    """Change a model; replicas are drained and restarted if engine settings changed.

    Raises: `PermissionDenied`, `InvalidRequest` with `param`.
    """
    actor = require_operator(actor)
    changes = _check_columns(changes)
    if "source" in changes:
        changes["source"] = check_source(changes["source"])
    model = ServedModel.objects.select_for_update().get(pk=model.pk)
    difference = changed(model, changes)
    if difference:
        save_valid(model)
        log_action(actor, "model.update", model, changes=difference)
        _announce(model)
    return model


@transaction.atomic
def share_model(
    *, actor: Actor | User, model: ServedModel, tenants: Iterable[Tenant], public: bool
) -> ServedModel:
    """Share a model with everyone, or with these tenants only."""
    actor = require_operator(actor)
    model = ServedModel.objects.select_for_update().get(pk=model.pk)
    model.public = public
    model.save(update_fields=["public", "changed_at"])
    model.tenants.set(tenants)
    slugs = sorted(model.tenants.values_list("slug", flat=True))
    log_action(actor, "model.share", model, public=public, tenants=slugs)
    _announce(model)
    return model


@transaction.atomic
def delete_model(*, actor: Actor | User, model: ServedModel) -> None:
    """Delete a model from the catalogue.

    Raises `Conflict` while it's loaded or draining, is another's fallback, or has adapters.
    """
    actor = require_operator(actor)
    model = ServedModel.objects.select_for_update().get(pk=model.pk)
    if model.desired_state == DesiredState.LOADED:
        raise Conflict(f"{model.name} is loaded: unload it first.")
    _refuse_while_in_use(model)
    for other in ServedModel.objects.exclude(pk=model.pk).only("name", "fallbacks"):
        if model.name in other.fallbacks:
            raise Conflict(f"{model.name} answers in the place of {other.name}: change that first.")
    log_action(actor, "model.delete", model, source=model.source)
    transaction.on_commit(partial(served_model_changed.send, ServedModel, served_model=model))
    try:
        model.delete()
    except ProtectedError as error:
        # Adapters may be a tenant's own work: never delete them implicitly.
        adapters = cast("set[Any]", error.protected_objects)
        names = sorted({adapter.name for adapter in adapters})
        raise Conflict(
            f"{model.name} has adapters ({', '.join(names)}): delete them first."
        ) from error


def drain_replica(*, actor: Actor | User, replica: Replica) -> None:
    """Drain and stop one replica; a supervisor then restarts it. Those that share experts on a node
    are restarted together, once successors serve where the memory suffices.

    Raises: `PermissionDenied`; `Conflict` unless it's ready; `ServiceUnavailable` without Redis.
    """
    actor = require_operator(actor)
    if replica.state != ReplicaState.READY:
        raise Conflict(f"{replica.replica_id} is {replica.state}: only a ready one can be drained.")
    model, group = replica.served_model, Replica.objects.filter(pk=replica.pk)
    if model.group_settings:
        group = model.replicas.filter(host=replica.host, state=replica.state)
    with transaction.atomic():
        for member in group:
            log_action(actor, "replica.drain", member)
        if model.managed and model.group_settings:
            group.update(restart_of=F("incarnation"))
            return
        for member in group:
            send_control(member.replica_id, "drain")  # on failure audit rows are rolled back too


def sleep_model(*, actor: Actor | User, model: ServedModel, level: int = 1) -> list[Replica]:
    """Have a model's replicas release their memory; returns those that were sent the command.

    Raises: `PermissionDenied`; `InvalidRequest` with `param`; `Conflict` if no replica is in a
    suitable state; `ServiceUnavailable` without Redis.
    """
    if level not in SLEEP_LEVELS:
        raise InvalidRequest(f"level must be 1 or 2, got {level!r}.", param="level")
    if model.managed and not model.settings.get("enable_sleep_mode"):
        raise InvalidRequest(
            f"{model.name} was loaded without --enable-sleep-mode.", param="enable_sleep_mode"
        )
    return _send_command(
        actor, model, "sleep", (ReplicaState.READY, ReplicaState.SLEEPING), level=level
    )


def wake_model(
    *, actor: Actor | User, model: ServedModel, tags: Iterable[str] = ()
) -> list[Replica]:
    """Have a model's replicas allocate their memory again: those of `SLEEP_TAGS` in `tags`, or all.

    Returns the replicas that were sent the command. Raises the errors of `sleep_model`.
    """
    tags = list(tags)
    for tag in tags:
        if tag not in SLEEP_TAGS:
            raise InvalidRequest(f"{tag!r} is none of {', '.join(SLEEP_TAGS)}.", param="tags")
    return _send_command(actor, model, "wake_up", (ReplicaState.SLEEPING,), tags=tags)


def _send_command(
    actor: Actor | User,
    model: ServedModel,
    command: str,
    states: tuple[ReplicaState, ...],
    **details: Any,
) -> list[Replica]:
    actor = require_operator(actor)
    replicas = list(Replica.objects.filter(served_model=model, state__in=states))
    if not replicas:
        state_names = " or ".join(states)
        raise Conflict(f"No replica of {model.name} is {state_names}.")
    with transaction.atomic():
        for replica in replicas:
            log_action(actor, f"replica.{command}", replica, **details)
            send_control(replica.replica_id, command, **details)
    return replicas


def check_source(source: str) -> str:
    """The folder or GGUF file as an absolute path, or the hub id unchanged.

    Raises `InvalidRequest`.
    """
    if "\0" in source or not source.strip():
        raise InvalidRequest("source must be a folder or a hub id.", param="source")
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return str(resolve_source(path))
    if path.is_dir():
        if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            raise InvalidRequest(
                f"{path} is not a model folder: config.json is missing.", param="source"
            )
        return str(path.resolve())
    is_path = source.startswith(("/", ".", "~")) or source.count("/") > 1
    if is_path or path.exists():
        raise InvalidRequest(f"There is no folder {path}.", param="source")
    if any(character.isspace() for character in source):
        raise InvalidRequest(
            f"source must be a folder or a hub id; there is no folder {source!r}, and hub ids have "
            "no spaces.",
            param="source",
        )
    return source


def _check_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(columns) - CHANGEABLE):
        raise InvalidRequest(f"Unknown model setting {unknown[0]!r}.", param=unknown[0])
    return {name: value for name, value in columns.items() if value is not None}


def last_failure(model: ServedModel) -> str:
    """The last replica's error, if the model should be loaded and no replica serves it; else ""."""
    rows = list(model.replicas.all()) if model.desired_state == DesiredState.LOADED else []
    if any(row.state in LIVE_STATES and row.state != ReplicaState.LOADING for row in rows):
        return ""
    texts = [row.detail if row.state == ReplicaState.FAILED else row.last_exit for row in rows]
    return next((" ".join(text.split()) for text in texts if text), "")


def _refuse_while_in_use(model: ServedModel) -> None:
    """Raise `Conflict` for a model that is loaded or still held by a replica."""
    if model.desired_state == DesiredState.LOADED:
        ready = model.replicas.filter(state=ReplicaState.READY).exists()
        raise Conflict(f"{model.name} is {'loaded already' if ready else 'being loaded already'}.")
    recent = timezone.now() - timedelta(seconds=SEEN_WITHIN_S)
    alive = model.replicas.filter(state__in=LIVE_STATES, last_seen__gte=recent)
    busy: Replica | None = alive.first()
    if busy is not None:
        raise Conflict(
            f"{model.name} is still being unloaded ({busy.replica_id} is {busy.state}). "
            "Try again when it has stopped."
        )


def _announce(model: ServedModel) -> None:
    transaction.on_commit(partial(served_model_changed.send, ServedModel, served_model=model))
