"""What the tests of adapters share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters import actions, cards
from adapters import version_jobs as work
from adapters.models import AdapterVersion, VersionState
from catalog.models import DesiredState, ServedModel
from tenants.models import Tenant
from tests.adapter_files import adapter_bytes


def served(name: str = "base", **columns: Any) -> ServedModel:
    """A loaded model that everybody may use."""
    return ServedModel.objects.create(
        name=name, source="/m", desired_state=DesiredState.LOADED, managed=False, **columns
    )


def write(
    staged: Path, seed: int = 0, extra_files: Mapping[str, bytes] | None = None, **config: Any
) -> None:
    """An adapter's files into an empty folder; `extra_files`: more of them."""
    for name, content in {**adapter_bytes(seed, **config), **(extra_files or {})}.items():
        (staged / name).write_bytes(content)


def added(
    actor: Any,
    tenant: Tenant | None,
    model: ServedModel,
    name: str = "tone",
    seed: int = 0,
    promote: bool = False,
    **config: Any,
) -> AdapterVersion:
    """A version that waits for its check."""
    return actions.add_staged(
        actor=actor,
        tenant=tenant,
        served_model=model,
        name=name,
        source="upload",
        stage=lambda staged: write(staged, seed, **config),
        promote=promote,
    )


def checked(*args: Any, **kwargs: Any) -> AdapterVersion:
    """A version as it is when its check has ended."""
    version = added(*args, **kwargs)
    work.process_version(version.pk)
    version.refresh_from_db()
    cards.forget()
    return version


def ready(*args: Any, **kwargs: Any) -> AdapterVersion:
    """A version as if its check had passed."""
    version = added(*args, **kwargs)
    AdapterVersion.objects.filter(pk=version.pk).update(
        state=VersionState.READY,
        rank=8,
        report={"ok": True, "probe": {"prompts": 4, "max_difference": 1e-6, "passed": True}},
    )
    version.refresh_from_db()
    return version
