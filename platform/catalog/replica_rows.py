"""Mirroring the states of replicas into their rows, for display."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import transaction
from django.utils import timezone

from catalog.actions import LIVE_STATES, SEEN_WITHIN_S
from catalog.models import Replica, ReplicaState, ServedModel
from engine.contract.messages import Heartbeat

#: `last_seen` is written this often when nothing else changed.
REFRESH = timedelta(seconds=5)
#: Detail of a replica that vanished, for example with its host.
LOST = "was not seen any more"


def state_of(beat: Heartbeat) -> ReplicaState:
    """A heartbeat's state; an unknown one counts as failed."""
    return ReplicaState(beat.state) if beat.state in ReplicaState.values else ReplicaState.FAILED


@dataclass(frozen=True)
class ReplicaSnapshot:
    """A replica's current state."""

    replica_id: str
    served_model_id: int
    state: ReplicaState
    detail: str = ""
    pid: int | None = None
    host: str = ""
    incarnation: str = ""
    restarts: int = 0
    exits_last_hour: int = 0
    last_exit: str = ""

    @classmethod
    def of_heartbeat(cls, beat: Heartbeat, served_model_id: int) -> "ReplicaSnapshot":
        """A replica that no supervisor here runs."""
        return cls(
            replica_id=beat.replica_id,
            served_model_id=served_model_id,
            state=state_of(beat),
            detail=beat.detail,
            pid=beat.pid or None,
            host=beat.host,
            incarnation=beat.incarnation,
        )


@transaction.atomic
def sync_replica_rows(sightings: list[ReplicaSnapshot], context_lengths: dict[int, int]) -> None:
    """Update the rows, and mark replicas that weren't seen for a while as stopped.

    Args:
        context_lengths: {served model's id: `max_model_len` that its replicas report}.
    """
    rows = {row.replica_id: row for row in Replica.objects.all()}
    models = set(ServedModel.objects.values_list("pk", flat=True))
    for sighting in sightings:
        if sighting.served_model_id in models:  # otherwise it was just deleted
            _write(rows.get(sighting.replica_id), sighting)
    for served_model_id, length in context_lengths.items():
        outdated = ServedModel.objects.filter(pk=served_model_id).exclude(max_model_len=length)
        outdated.update(max_model_len=length)
    seen = {sighting.replica_id for sighting in sightings}
    long_ago = timezone.now() - timedelta(seconds=SEEN_WITHIN_S)
    # Failed ones too: the supervisor that would restart them is gone with its machine.
    lost = Replica.objects.filter(
        state__in=(*LIVE_STATES, ReplicaState.FAILED), last_seen__lt=long_ago
    )
    lost.exclude(replica_id__in=seen).update(state=ReplicaState.STOPPED, detail=LOST)


def _write(row: Replica | None, sighting: ReplicaSnapshot) -> None:
    """Insert or update one row if anything changed."""
    values = {
        "served_model_id": sighting.served_model_id,
        "state": sighting.state,
        "detail": sighting.detail,
        "pid": sighting.pid,
        "host": sighting.host,
        "incarnation": sighting.incarnation,
        "restarts": sighting.restarts,
        "exits_last_hour": sighting.exits_last_hour,
        "last_exit": sighting.last_exit,
    }
    if row is None:
        row = Replica(replica_id=sighting.replica_id, last_seen=None)
    stale = row.last_seen is None or timezone.now() - row.last_seen > REFRESH
    if row.pk is None or stale or any(getattr(row, k) != v for k, v in values.items()):
        for name, value in values.items():
            setattr(row, name, value)
        row.last_seen = datetime.now(UTC)
        if sighting.state == ReplicaState.READY:
            row.last_ready_at = row.last_seen
        # An operator may have asked for a restart meanwhile.
        names = [*values, "last_seen", "last_ready_at", "changed_at"]
        row.save(update_fields=names if row.pk else None)
