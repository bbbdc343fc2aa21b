"""Numbers of replicas, as operators change them through the data plane."""

from __future__ import annotations

from catalog import actions
from catalog.models import DesiredState, ServedModel
from common.errors import NotFound
from engine.contract.errors import InvalidRequest
from tenants.access import access_key_actor


def scale_model(*, key_id: int | None, name: str, num_replicas: int) -> str:
    """Change a loaded model's number of replicas per node; returns its name. "": the only model.

    Raises: `NotFound`, `InvalidRequest` if several are loaded, `PermissionDenied`.
    """
    actor = access_key_actor(key_id)
    loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED)
    models = list((loaded.filter(name=name) if name else loaded)[:2])
    if not models:
        raise NotFound(f"Model {name[:200]!r} isn't loaded.", param="model")
    if len(models) > 1:
        raise InvalidRequest("Several models are served: name one in 'model'.", param="model")
    actions.update_model(actor=actor, model=models[0], num_replicas=num_replicas)
    return models[0].name


def num_replicas_by_model() -> dict[str, int]:
    """The number of replicas per node, by loaded model."""
    loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED)
    return dict(loaded.values_list("name", "num_replicas"))
