from typing import Any

from catalog import actions
from catalog.models import DesiredState, ReplicaState, ServedModel
from common.commands import QuireCommand


class Command(QuireCommand):
    help = "List models with the state of their replicas."

    def handle(self, *args: Any, **options: Any) -> None:
        models = ServedModel.objects.prefetch_related("replicas", "tenants")
        self.table(
            ("NAME", "STATE", "REPLICAS", "CONTEXT", "FOR", "SOURCE"),
            [
                (
                    model.name,
                    state(model),
                    replicas(model),
                    model.max_model_len or "?",
                    "everyone" if model.public else ",".join(t.slug for t in model.tenants.all()),
                    model.source,
                )
                for model in models
            ],
        )
        for model in models:
            for replica in model.replicas.all():
                if replica.detail:
                    self.print_hint(f"{replica.replica_id}: {replica.detail}")


def state(model: ServedModel) -> str:
    """Actual state of a model; "failed" and "loading" models should be loaded, too."""
    if model.desired_state != DesiredState.LOADED:
        return str(model.desired_state)
    if model.idle_since is not None:
        return "idle"
    if actions.last_failure(model):
        return "failed"
    states = {replica.state for replica in model.replicas.all()}
    return "loaded" if states & {ReplicaState.READY, ReplicaState.SLEEPING} else "loading"


def replicas(model: ServedModel) -> str:
    """Such as `1 ready, 1 loading`."""
    states: dict[str, int] = {}
    for replica in model.replicas.all():
        states[replica.state] = states.get(replica.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
