"""Which model `manage.py up` serves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.utils import timezone

from catalog import actions
from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from engine.contract.errors import InvalidRequest, ModelLoadError
from tenants.actors import COMMAND_LINE

DEMO = "quire-demo"


@dataclass(frozen=True)
class Wanted:
    """The model that this start waits for, and how the catalogue had it before (None: not)."""

    model: ServedModel
    before: ServedModel | None

    def take_back(self) -> None:
        """Undo the wish for a model that can't be served, or every later start would try it too."""
        before = self.before
        if before is not None and before.desired_state == DesiredState.LOADED:
            earlier = {"source": before.source, "settings": before.settings}
            try:
                actions.update_model(actor=COMMAND_LINE, model=self.model, **earlier)
            except InvalidRequest:  # its folder has gone meanwhile
                pass
            else:
                return
        actions.unload_model(actor=COMMAND_LINE, model=self.model)


def ensure_model(
    source: str | None, names: list[str], engine: dict[str, Any], **columns: int | None
) -> Wanted:
    """The model to wait for: the one named, else one of the catalogue, else the bundled demo.

    Args:
        source, names: `--model` and `--served-model-name`; names after the first are others of the
            same model.
        columns: `num_replicas` and `num_spares`; None: as they were.
        engine: other engine settings from the command line; they replace the model's own.
    Raises: `QuireError`s of the catalogue; `ModelLoadError` when the demo model is missing.
    """
    forget_the_dead()
    name = names[0] if names else None
    if source:
        name = name or Path(source).expanduser().resolve().name
    else:
        loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED, managed=True)
        found = (loaded.filter(name=name) if name else loaded).order_by("pk").first()
        if found is None:
            source, name = str(_demo_model()), name or DEMO
        else:
            name = found.name
    before = ServedModel.objects.filter(name=name).first()
    aliases = names[1:] if names else None
    return Wanted(_loaded(name, source, engine, {"aliases": aliases, **columns}), before)


def forget_the_dead() -> None:
    """Correct rows of replicas that a killed supervisor left: we hold the data dir alone."""
    alive = Replica.objects.filter(state__in=actions.ALIVE, served_model__managed=True)
    alive.filter(served_model__node="").update(state=ReplicaState.STOPPED, last_seen=timezone.now())


def _loaded(
    name: str, source: str | None, engine: dict[str, Any], columns: dict[str, Any]
) -> ServedModel:
    model = ServedModel.objects.filter(name=name).first()
    if model is None or model.desired_state == DesiredState.UNLOADED:
        return actions.load_model(
            actor=COMMAND_LINE,
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
    return actions.update_model(actor=COMMAND_LINE, model=model, **changes)


def _demo_model() -> Path:
    folder: Path = settings.QUIRE["DEMO_MODEL"]
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"The bundled demo model is not in {folder}. Name another with --model FOLDER."
        )
    return folder
