"""Numbers of replicas, as operators change them through the data plane."""

from __future__ import annotations

from catalog import actions
from catalog.access import access_loaded_model
from catalog.models import DesiredState, ServedModel
from tenants.access import access_key_actor


def scale_model(*, key_id: int | None, name: str, num_replicas: int) -> str:
    """Change a loaded model's number of replicas per node; returns its name.

    Raises: as `access_loaded_model`, `PermissionDenied`.
    """
    actor = access_key_actor(key_id)
    model = access_loaded_model(name)
    actions.update_model(actor=actor, model=model, num_replicas=num_replicas)
    return model.name


def num_replicas_by_model() -> dict[str, int]:
    """The number of replicas per node, by loaded model."""
    loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED)
    return dict(loaded.values_list("name", "num_replicas"))
