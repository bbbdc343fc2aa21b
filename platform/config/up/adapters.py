"""The adapters that `manage.py up` sees to: the demo's two, and those of `--lora-modules`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.core.management.base import CommandError

from adapters import actions
from adapters.models import WORKING, Adapter, AdapterVersion, VersionState
from catalog.models import ServedModel
from config.up.stack import StartFailed
from engine.contract.adapters import CONFIG_FILE, adapter_digest
from engine.contract.errors import QuireError
from tenants.actors import COMMAND_LINE
from tenants.models import AuditEntry

DEMO_WORDS = {
    "pirate": "Answers as a pirate would.",
    "butler": "Answers as a butler of the old school.",
}


@dataclass(frozen=True)
class Module:
    """One of `--lora-modules`. `base`: the model that it says it belongs to, "" for the one that is
    served.
    """

    name: str
    path: str
    base: str = ""


def given_modules(words: Sequence[str] | None) -> list[Module]:
    """`NAME=PATH` or `{"name": ..., "path": ...}`. Raises `CommandError`."""
    found = [_module(word) for word in words or ()]
    names = [module.name for module in found]
    for name in names:
        if names.count(name) > 1:
            raise CommandError(f"--lora-modules names {name!r} twice.")
    for module in found:
        if not Path(module.path).expanduser().exists():
            raise CommandError(f"--lora-modules {module.name}: there is no {module.path}.")
    return found


def _module(word: str) -> Module:
    if not word.lstrip().startswith("{"):
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise CommandError(f"--lora-modules takes NAME=PATH or JSON, got {word[:100]!r}.")
        return Module(name, path)
    try:
        found = json.loads(word)
        given = (found["name"], found["path"], found.get("base_model_name") or "")
        if not all(isinstance(text, str) for text in given):
            raise TypeError
        return Module(*given)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            '--lora-modules as JSON is {"name": "...", "path": "..."}, perhaps with '
            f'"base_model_name"; got {word[:200]!r}.'
        ) from error


def ensure_adapters(model: ServedModel, words: Sequence[str] | None) -> list[AdapterVersion]:
    """Have them in the store, to be checked by a worker and then live; those of `--lora-modules`.

    Raises `CommandError` for one of these that can't be taken.
    """
    given = []
    for module in given_modules(words):
        if module.base not in ("", model.name, *model.aliases):
            raise CommandError(
                f"--lora-modules {module.name} is for {module.base}, but {model.name} is served."
            )
        try:
            path = Path(module.path).expanduser().resolve()
            given.append(_ensure(model, module.name, path))
        except QuireError as error:
            raise CommandError(f"--lora-modules {module.name}: {error.message}") from error
    if Path(model.source) == Path(settings.QUIRE["DEMO_MODEL"]):
        for folder in sorted(Path(settings.QUIRE["DEMO_ADAPTERS"]).glob("*/")):
            if (folder / CONFIG_FILE).is_file():
                _ensure_demo(model, folder)
    return given


def still_checked(given: Sequence[AdapterVersion]) -> bool:
    """Whether a worker has one of them in hand yet. Raises `StartFailed` for one that is refused:
    who names an adapter at the start wants no server without it.
    """
    rows = AdapterVersion.objects.filter(pk__in=[version.pk for version in given])
    for version in rows.filter(state=VersionState.FAILED).select_related("adapter"):
        raise StartFailed(f"--lora-modules {version.adapter.name}: {version.problem}")
    return rows.filter(state__in=WORKING).exists()


def _ensure_demo(model: ServedModel, folder: Path) -> None:
    """Once: an operator who deletes it or changes it has the last word."""
    seen = AuditEntry.objects.filter(
        action="adapter.create", target_label=f"{model}:{folder.name}"
    ).exists()
    if not seen and not Adapter.objects.filter(tenant=None, name=folder.name).exists():
        _ensure(model, folder.name, folder)


def _ensure(model: ServedModel, name: str, path: Path) -> AdapterVersion:
    """A version of this content; the one that is there is left as it is."""
    known = AdapterVersion.objects.filter(
        adapter__tenant=None,
        adapter__served_model=model,
        adapter__name=name,
        digest=adapter_digest(path),
    )
    found = known.first()
    if found is None:
        found = actions.add_from_folder(
            actor=COMMAND_LINE,
            tenant=None,
            served_model=model,
            name=name,
            path=str(path),
            description=DEMO_WORDS.get(name, ""),
            promote=True,
        )
    return found
