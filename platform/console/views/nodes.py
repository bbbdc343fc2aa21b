"""The operators' page of nodes: the hosts of replicas and what runs on each."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone

from catalog import live_status, model_details
from catalog.access import access_catalog
from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from catalog.replica_rows import LOST
from console.views.base import page_view
from console.views.home import Host, this_host
from engine.contract.errors import QuireError
from engine.contract.messages import Heartbeat
from history.alerts import MIN_FREE_SHARE
from tenants.models import User
from tenants.sessions import UserRequest

#: How long the replica of a loaded model is listed after it was lost.
LOST_FOR = timedelta(days=1)


@dataclass(frozen=True)
class Problem:
    """A problem of a node. `since`: None if unknown."""

    text: str
    since: datetime | None = None


@dataclass(frozen=True)
class NodeReplica:
    """A replica. `row`: its database row, None until its supervisor has written it.

    Attributes:
        beat: its heartbeat; None if it isn't running.
        model: None for a model that isn't in the catalogue.
        num_cores: average number of cores used by its process since it started.
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
        """Used percentage of the KV cache."""
        return 100 * self.beat.stats.kv_cache_usage_perc if self.beat else 0.0

    @property
    def problem(self) -> Problem | None:
        """The replica's most important problem, if any."""
        if self.state == "silent":
            return Problem(f"{self.replica_id} is silent", self.row.last_seen if self.row else None)
        if self.state == "failed":
            return Problem(
                f"{self.replica_id} failed", self.row.last_ready_at if self.row else None
            )
        if self.beat is None:
            return None
        if self.state == "stalled":
            since = datetime.fromtimestamp(self.beat.progress_at, UTC)
            return Problem(f"{self.replica_id} makes no progress", since)
        waiting = self.beat.stats.num_requests_waiting
        if waiting and self.kv_percent > 100 * (1 - MIN_FREE_SHARE):
            return Problem(f"the KV cache of {self.replica_id} is full, {waiting} waiting")
        return None


@dataclass
class Node:
    """A host. `host`: its hardware, known only for the gateway's own host."""

    name: str
    host: Host | None = None
    replicas: list[NodeReplica] = field(default_factory=list)

    @property
    def resident_bytes(self) -> int:
        """Resident memory of its replicas' processes, in bytes."""
        return sum(replica.beat.process.resident_bytes for replica in self.replicas if replica.beat)

    @property
    def problems(self) -> list[Problem]:
        """The host's problems: silence, failed or full replicas, a full disk or memory."""
        if self.host is None and all(replica.state == "silent" for replica in self.replicas):
            times = [replica.row.last_seen for replica in self.replicas if replica.row]
            return [Problem("silent", max(filter(None, times), default=None))]
        problems = [replica.problem for replica in self.replicas if replica.problem]
        if self.host is not None:
            sizes = {
                "disk": (self.host.free_disk, self.host.total_disk),
                "memory": (self.host.free_memory, self.host.total_memory),
            }
            problems += [
                Problem(f"{100 * free / total:.1f} % of the {name} is free")
                for name, (free, total) in sizes.items()
                if free < MIN_FREE_SHARE * total
            ]
        return problems


@page_view
def nodes(request: UserRequest) -> HttpResponse:
    """List all hosts by name."""
    try:
        hosts = get_nodes(request.user)
    except QuireError as error:
        return render(request, "console/nodes.html", {"error": error}, status=error.status)
    context = {"nodes": hosts, "num_bad": sum(bool(node.problems) for node in hosts)}
    return render(request, "console/nodes.html", context)


def get_nodes(user: User) -> list[Node]:
    """Return the gateway's host and those of running, starting or failed replicas. Raises
    `PermissionDenied` unless the user is an operator.
    """
    models = {model.name: model for model in access_catalog(user)}
    host = this_host()
    by_name = {host.name: Node(host.name, host)}
    for replica_host, replica in _replicas(models):
        by_name.setdefault(replica_host, Node(replica_host)).replicas.append(replica)
    return sorted(by_name.values(), key=lambda node: node.name)


def _replicas(models: dict[str, ServedModel]) -> list[tuple[str, NodeReplica]]:
    """Return (host, replica) pairs, sorted by replica id."""
    beats = {beat.replica_id: beat for beat in model_details.get_heartbeats()}
    rows = {
        row.replica_id: row
        for row in Replica.objects.select_related("served_model")
        if row.state != ReplicaState.STOPPED or row.replica_id in beats or _is_lost(row)
    }
    replicas = []
    for replica_id in sorted(beats.keys() | rows.keys()):
        row, beat = rows.get(replica_id), beats.get(replica_id)
        if beat is not None:
            model = models.get(beat.model.name)
            replicas.append((beat.host, _running_replica(beat, row, model)))
        elif row is not None:
            model = row.served_model
            is_silent = row.state == ReplicaState.READY or _is_lost(row)
            state = "silent" if is_silent else row.state
            replicas.append((row.host, NodeReplica(replica_id, state, model, row)))
    return replicas


def _is_lost(row: Replica) -> bool:
    """Return whether a loaded model's replica was lost recently, for example with its host."""
    return (
        (row.state, row.detail) == (ReplicaState.STOPPED, LOST)
        and row.served_model.desired_state == DesiredState.LOADED
        and row.last_seen is not None
        and row.last_seen > timezone.now() - LOST_FOR
    )


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
