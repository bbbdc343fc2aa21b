"""Creating, retiring and deleting adapters and their versions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from django.db import transaction
from django.db.models import Max, Q

from adapters import archive, store
from adapters.actions.base import announce, locked_adapter, locked_version, require
from adapters.models import (
    PASSED,
    Adapter,
    AdapterAlias,
    AdapterUpload,
    AdapterVersion,
    VersionState,
)
from adapters.signals import version_waits
from adapters.sources import check_path, check_repository
from catalog.access import access_served_models
from catalog.models import ServedModel
from common.db import save_valid
from common.errors import Conflict, NotFound, PermissionDenied, ServiceUnavailable
from common.object_storage import OnBytes
from tenants.actors import Actor, require_operator, to_actor
from tenants.audit import log_action
from tenants.models import ActorKind, Role, Tenant, User

Stage = Callable[[Path], None]


def add_from_folder(
    *,
    actor: Actor | User,
    tenant: Tenant | None,
    served_model: ServedModel,
    name: str,
    path: str,
    description: str = "",
    promote: bool = False,
    on_progress: Callable[[float], None] | None = None,
) -> AdapterVersion:
    """Add a version from a folder or GGUF file on the server, which is copied.

    For operators: a folder on the server may hold anybody's files. `promote`: make it live once its
    check has passed. `on_progress`: called with the fraction that is copied and, with an object
    storage, uploaded.

    Raises: `PermissionDenied`; `InvalidRequest` with `param`, `AdapterTooLarge`; `Conflict` if the
    adapter already has this content.
    """
    actor = require_operator(actor)
    source = check_path(path, anywhere=actor.kind == ActorKind.COMMAND)
    on_bytes = store.transfer_progress(source, on_progress) if on_progress else None
    return add_staged(
        actor=actor,
        tenant=tenant,
        served_model=served_model,
        name=name,
        source=str(source),
        stage=lambda staged: archive.stage_folder(
            source, staged, store.max_adapter_bytes(), on_bytes
        ),
        on_bytes=on_bytes,
        description=description,
        promote=promote,
    )


@transaction.atomic
def add_from_hub(
    *,
    actor: Actor | User,
    tenant: Tenant | None,
    served_model: ServedModel,
    name: str,
    repository: str,
    description: str = "",
    promote: bool = False,
) -> AdapterVersion:
    """Add a version from the hub, `owner/name` or `owner/name@revision`; a worker downloads it.

    Raises the errors of `add_from_folder`, but is also allowed for admins of the tenant.
    """
    actor = to_actor(actor)
    require(actor, tenant, Role.ADMIN)
    check_repository(repository)
    adapter = _adapter(actor, tenant, served_model, name, description)
    version = _version(actor, adapter, f"hub:{repository}", promote=promote)
    log_action(actor, "adapter.fetch", version, tenant=tenant, source=version.source)
    return version


def add_staged(
    *,
    actor: Actor | User,
    tenant: Tenant | None,
    served_model: ServedModel,
    name: str,
    source: str,
    stage: Stage,
    description: str = "",
    promote: bool = False,
    upload: AdapterUpload | None = None,
    on_bytes: OnBytes | None = None,
) -> AdapterVersion:
    """Add a version from the files that `stage` puts into an empty folder. A worker checks it next.

    `upload`: its upload, whose reserved bytes it takes over. Raises: the errors of `stage` and of
    `add_from_folder`; allowed for members of the tenant.
    """
    actor = to_actor(actor)
    require(actor, tenant, Role.MEMBER)
    check_model(tenant, served_model)
    digest, size = staged_content(stage, on_bytes)
    with transaction.atomic():
        adapter = _adapter(actor, tenant, served_model, name, description)
        if upload is not None and not AdapterUpload.objects.filter(pk=upload.pk).delete()[0]:
            raise NotFound("Upload not found.")
        store.check(tenant, size)
        version = _version(actor, adapter, source, digest=digest, num_bytes=size, promote=promote)
        log_action(
            actor, "adapter.add", version, tenant=tenant, sha256=digest, bytes=size, source=source
        )
    if not store.has_content(digest):  # a sweep removed it just before the row was created
        raise Conflict("The adapter was removed while it was added. Try again.")
    return version


def staged_content(stage: Stage, on_bytes: OnBytes | None = None) -> tuple[str, int]:
    """Store the content that `stage` writes into a folder; return its digest and bytes.

    `on_bytes`: called with the sizes of chunks as they are sent to the object storage.
    """
    staged = store.staging_dir()
    try:
        stage(staged)
        return store.store_content(staged, on_bytes)
    except OSError as error:
        raise ServiceUnavailable(f"The adapter can't be stored: {error.strerror}.") from error
    finally:
        archive.remove_staging(staged)


@transaction.atomic
def revalidate_version(*, actor: Actor | User, version: AdapterVersion) -> AdapterVersion:
    """Check a version again, for example a failed or retired one.

    Raises: `NotFound`, `PermissionDenied`; `Conflict` for one that is live or being processed.
    """
    actor = to_actor(actor)
    version = locked_version(version)
    require(actor, version.adapter.tenant, Role.MEMBER)
    again = (VersionState.FAILED, VersionState.READY, VersionState.RETIRED)
    if version.state not in again:
        raise Conflict(f"{version} is {version.get_state_display().lower()}.")
    version.state = VersionState.UPLOADED
    version.report = {}
    version.save(update_fields=["state", "report"])
    log_action(actor, "adapter.check", version, tenant=version.adapter.tenant)
    _enqueue_validation(version)
    return version


@transaction.atomic
def retire_version(*, actor: Actor | User, version: AdapterVersion) -> AdapterVersion:
    """Keep a version, but prevent promotion. Raises `Conflict` if it's live or being processed."""
    actor = to_actor(actor)
    version = locked_version(version)
    require(actor, version.adapter.tenant, Role.ADMIN)
    if version.state not in (VersionState.READY, VersionState.FAILED):
        raise Conflict(f"{version} is {version.get_state_display().lower()}.")
    version.state = VersionState.RETIRED
    version.save(update_fields=["state"])
    AdapterAlias.objects.filter(previous=version).update(previous=None)
    log_action(actor, "adapter.retire", version, tenant=version.adapter.tenant)
    announce(version.adapter)
    return version


@transaction.atomic
def delete_version(*, actor: Actor | User, version: AdapterVersion) -> None:
    """Delete a version; its content is removed an hour later. Raises `Conflict` while it's live."""
    actor = to_actor(actor)
    version = locked_version(version)
    require(actor, version.adapter.tenant, Role.ADMIN)
    if version.state == VersionState.LIVE:
        raise Conflict(f"{version} is live: promote another one, or take the adapter offline.")
    log_action(
        actor,
        "adapter.delete_version",
        version,
        tenant=version.adapter.tenant,
        sha256=version.digest,
    )
    store.mark_used(version.digest)
    version.delete()
    announce(version.adapter)


@transaction.atomic
def delete_adapter(*, actor: Actor | User, adapter: Adapter) -> None:
    """Delete an adapter with all versions. Raises `Conflict` while one is live."""
    actor = to_actor(actor)
    adapter = locked_adapter(adapter)
    require(actor, adapter.tenant, Role.ADMIN)
    if adapter.versions.filter(state=VersionState.LIVE).exists():
        raise Conflict(f"{adapter} is live: take it offline first.")
    digests = list(adapter.versions.exclude(digest="").values_list("digest", flat=True))
    log_action(actor, "adapter.delete", adapter, tenant=adapter.tenant, digests=digests)
    for digest in digests:
        store.mark_used(digest)
    announce(adapter)
    adapter.aliases.all().delete()
    adapter.delete()


def check_model(tenant: Tenant | None, served_model: ServedModel) -> None:
    """Raise `NotFound` for a model that the tenant may not use."""
    if tenant is not None and not access_served_models(tenant).filter(pk=served_model.pk).exists():
        raise NotFound(f"Model {served_model.name!r} not found.", param="model")


def check_free(tenant: Tenant | None, name: str, param: str = "name") -> None:
    """Raise `Conflict` if a model that the tenant may use has the name; `param`: its field."""
    models = ServedModel.objects.all() if tenant is None else access_served_models(tenant)
    exists = models.filter(Q(name=name)).exists()
    if exists or any(name in aliases for aliases in models.values_list("aliases", flat=True)):
        raise Conflict(
            f"{name} is the name of a model: give the adapter another name.", param=param
        )


def _adapter(
    actor: Actor, tenant: Tenant | None, served_model: ServedModel, name: str, description: str
) -> Adapter:
    """The adapter of this name, created if missing. Its row is locked."""
    check_model(tenant, served_model)
    existing = Adapter.objects.filter(tenant=tenant, served_model=served_model, name=name).first()
    if existing is not None:
        return locked_adapter(existing)
    check_free(tenant, name)
    adapter = Adapter(tenant=tenant, served_model=served_model, name=name, description=description)
    save_valid(adapter)
    alias = AdapterAlias(adapter=adapter, tenant=tenant, served_model=served_model, name=name)
    save_valid(alias)
    log_action(actor, "adapter.create", adapter, tenant=tenant)
    return locked_adapter(adapter)


def _version(
    actor: Actor,
    adapter: Adapter,
    source: str,
    *,
    digest: str = "",
    num_bytes: int = 0,
    promote: bool = False,
) -> AdapterVersion:
    if promote:
        check_promoter(actor, adapter)
    same = adapter.versions.filter(digest=digest).first() if digest else None
    if same is not None:
        raise Conflict(f"Version {same.number} of {adapter} has exactly this content.")
    last = adapter.versions.aggregate(last=Max("number"))["last"] or 0
    version = AdapterVersion(
        adapter=adapter,
        number=last + 1,
        digest=digest,
        num_bytes=num_bytes,
        source=source,
        promote_to=adapter.name if promote else "",
        created_by=actor.label[:200],
    )
    save_valid(version)
    _enqueue_validation(version)
    return version


def check_promoter(actor: Actor, adapter: Adapter) -> None:
    """Raise `PermissionDenied` unless the actor may make versions live."""
    try:
        require(actor, adapter.tenant, Role.ADMIN)
    except PermissionDenied as error:
        raise PermissionDenied(
            "Only admins make adapters live: leave out `promote` and ask an admin.", param="promote"
        ) from error


def _enqueue_validation(version: AdapterVersion) -> None:
    transaction.on_commit(partial(version_waits.send, AdapterVersion, version=version))


def referenced_digests(digests: Collection[str]) -> set[str]:
    """Those of the digests that a version has."""
    versions = AdapterVersion.objects.filter(digest__in=digests).order_by()
    return set(versions.values_list("digest", flat=True))


def latest_valid_version(adapter: Adapter) -> AdapterVersion | None:
    """The newest version that can be promoted."""
    return adapter.versions.filter(state__in=PASSED).order_by("-number").first()


def no_valid_version_error(adapter: Adapter) -> Conflict:
    """The error of a promotion without a valid version."""
    return Conflict(f"{adapter} has no version whose check has passed.")
