"""Loading and unloading shared adapters through vLLM's two endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from adapters import actions
from adapters.models import PASSED, Adapter, AdapterVersion, VersionState
from adapters.sources import check_path
from catalog.access import access_loaded_model
from engine.contract.errors import InvalidRequest
from engine.contract.lora import adapter_digest
from tenants.access import access_key_actor


@dataclass(frozen=True)
class Loaded:
    """A version that will be made live. `pk`: its row."""

    pk: int


def begin_load(*, key_id: int | None, name: str, path: str, model: str, in_place: bool) -> Loaded:
    """Store the files at `path` as a version of the shared adapter `name`, made live when checked.

    Raises: `InvalidRequest` if one of this name is live already, unless `in_place`; the errors of
    `add_from_folder`.
    """
    actor, base = access_key_actor(key_id), access_loaded_model(model)
    source = check_path(path)
    digest = adapter_digest(source)
    rows = Adapter.objects.filter(tenant=None, served_model=base, name=name)
    adapter = rows.first()
    live = _live(adapter) if adapter is not None else None
    if live is not None and not in_place:
        raise InvalidRequest(_loaded_already(name, live, digest), param="lora_name")
    existing = adapter.versions.filter(digest=digest).first() if adapter is not None else None
    if existing is None:
        existing = actions.add_from_folder(
            actor=actor, tenant=None, served_model=base, name=name, path=path, promote=True
        )
    elif existing.state in PASSED:
        actions.promote(actor=actor, version=existing)
    elif existing.state in (VersionState.FAILED, VersionState.RETIRED):
        existing.promote_to = name
        existing.save(update_fields=["promote_to"])
        actions.revalidate_version(actor=actor, version=existing)
    return Loaded(existing.pk)


def state_of(loaded: Loaded) -> tuple[str, str]:
    """A version's state, and why it was refused."""
    version = AdapterVersion.objects.filter(pk=loaded.pk).first()
    return ("deleted", "") if version is None else (version.state, version.problem)


def unload(*, key_id: int | None, name: str, model: str) -> bool:
    """Take the shared adapter's names offline; returns whether it was live."""
    actor = access_key_actor(key_id)
    rows = Adapter.objects.filter(tenant=None, name=name)
    rows = rows.filter(served_model__name=model) if model else rows
    live = [adapter for adapter in rows if _live(adapter) is not None]
    for adapter in live:
        actions.take_offline(actor=actor, adapter=adapter)
    return bool(live)


def _live(adapter: Adapter) -> AdapterVersion | None:
    alias = adapter.aliases.select_related("version").filter(name=adapter.name).first()
    return alias.version if alias is not None else None


def _loaded_already(name: str, live: AdapterVersion, digest: str) -> str:
    text = f"The lora adapter '{name}' has already been loaded."
    if live.digest == digest:
        return text
    return (
        f"{text} The files have changed since: {live.digest[:12]} goes on being served. Set "
        "load_inplace to true to serve what is there now."
    )
