"""The nodes page: the hosts of replicas and what runs on each, for operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from catalog import live_status, model_details
from catalog.access import access_catalog
from catalog.models import Replica, ReplicaState, ServedModel
from console.views.home import Host, this_host
from engine.contract.errors import QuireError
from engine.contract.messages import Heartbeat
from tenants.models import User
from tenants.sessions import UserRequest


@dataclass(frozen=True)
class NodeReplica:
    """A replica's row; `row` is None until its supervisor wrote one.

    Attributes:
        beat: its heartbeat; None for one that isn't running.
        model: None for a model that isn't in the catalogue.
        num_cores: cores that its process used on average since it started.
    """

    replica_id: str
    state: str
    model: ServedModel | None
    row: Replica | None = None
    beat: Heartbeat | None = None
    started_at: datetime | None = None
    num_cores: float | None = None

    @property
    def kv_percent(self) -> float:
        """Used part of the KV cache."""
        return 100 * self.beat.stats.kv_cache_usage_perc if self.beat else 0.0


@dataclass
class Node:
    """A host. `host`: its hardware, known of the gateway's own alone."""

    name: str
    host: Host | None = None
    replicas: list[NodeReplica] = field(default_factory=list)

    @property
    def resident_bytes(self) -> int:
        """Memory of its replicas' processes."""
        return sum(replica.beat.process.resident_bytes for replica in self.replicas if replica.beat)


@require_safe
@never_cache
@login_required
def nodes(request: UserRequest) -> HttpResponse:
    """All hosts, by name."""
    try:
        context = {"nodes": get_nodes(request.user)}
    except QuireError as error:
        return render(request, "console/nodes.html", {"error": error}, status=error.status)
    return render(request, "console/nodes.html", context)


def get_nodes(user: User) -> list[Node]:
    """The gateway's host and those of replicas that run, start or failed. Raises
    `PermissionDenied` for all but operators.
    """
    models = {model.name: model for model in access_catalog(user)}
    host = this_host()
    by_name = {host.name: Node(host.name, host)}
    for replica_host, replica in _replicas(models):
        by_name.setdefault(replica_host, Node(replica_host)).replicas.append(replica)
    return sorted(by_name.values(), key=lambda node: node.name)


def _replicas(models: dict[str, ServedModel]) -> list[tuple[str, NodeReplica]]:
    """Hosts and replicas, by replica id."""
    beats = {beat.replica_id: beat for beat in model_details.get_heartbeats()}
    rows = {
        row.replica_id: row
        for row in Replica.objects.select_related("served_model")
        if row.state != ReplicaState.STOPPED or row.replica_id in beats
    }
    replicas = []
    for replica_id in sorted(beats.keys() | rows.keys()):
        row, beat = rows.get(replica_id), beats.get(replica_id)
        if beat is not None:
            model = models.get(beat.model.name)
            replicas.append((beat.host, _running_replica(beat, row, model)))
        elif row is not None:
            model = row.served_model
            replicas.append((row.host, NodeReplica(replica_id, row.state, model, row)))
    return replicas


def _running_replica(
    beat: Heartbeat, row: Replica | None, model: ServedModel | None
) -> NodeReplica:
    start_time, cpu_seconds = beat.process.start_time, beat.process.cpu_seconds
    age_s = beat.at - start_time
    return NodeReplica(
        replica_id=beat.replica_id,
        state=live_status.state_of(beat),
        model=model,
        row=row,
        beat=beat,
        started_at=datetime.fromtimestamp(start_time, UTC) if start_time else None,
        num_cores=cpu_seconds / age_s if start_time and age_s > 0 else None,
    )
