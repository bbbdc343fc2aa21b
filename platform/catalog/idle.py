"""Models that are stopped when idle and started again by the next request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from django.db import DatabaseError, InterfaceError, transaction
from django.utils import timezone

from catalog.models import DesiredState, ReplicaState, ServedModel
from catalog.signals import served_model_changed
from common.db import run_in_db_thread
from common.errors import ServiceUnavailable
from engine.contract.messages import Heartbeat
from tenants.actors import SYSTEM_ACTOR
from tenants.audit import log_action

#: A supervisor starts a model within a second, on a busy machine later.
PICKED_UP = timedelta(seconds=10)


class IdleMonitor:
    """How long each model has been idle, by its replicas' heartbeats."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Name -> when its work counters last changed, and their values then.
        self._seen: dict[str, tuple[float, tuple[int, ...]]] = {}

    def idle_seconds(self, name: str, beats: Iterable[Heartbeat]) -> float:
        """Seconds for which all replicas of the model have been ready and idle; else 0."""
        model_beats = [beat for beat in beats if beat.model.name == name]
        if not model_beats or any(beat.state != "ready" or _busy(beat) for beat in model_beats):
            self._seen.pop(name, None)
            return 0.0
        work = tuple(
            beat.stats.steps_total
            for beat in sorted(model_beats, key=lambda beat: (beat.replica_id, beat.incarnation))
        )
        since, previous = self._seen.get(name, (self._clock(), ()))
        if work != previous:
            since = self._clock()
        self._seen[name] = since, work
        return self._clock() - since


def _busy(beat: Heartbeat) -> bool:
    return bool(beat.stats.num_requests_running or beat.stats.num_requests_waiting)


@transaction.atomic
def unload_idle_model(model: ServedModel) -> bool:
    """Stop the model's replicas until the next request; returns whether anything changed."""
    row = ServedModel.objects.select_for_update().filter(pk=model.pk).first()
    if row is None or row.idle_since is not None or row.desired_state != DesiredState.LOADED:
        return False
    row.idle_since = timezone.now()
    row.save(update_fields=["idle_since", "changed_at"])
    log_action(SYSTEM_ACTOR, "model.idle", row, minutes=row.idle_minutes)
    transaction.on_commit(lambda: _tell(row))
    return True


async def wake_model_for_request(name: str) -> bool:
    """Start a model that was stopped when idle; returns whether it's worth waiting for.

    Callers also wait if another one has started it. Raises `ServiceUnavailable`.
    """
    return await run_in_db_thread(_wake, name)


def _wake(name: str) -> bool:
    try:
        with transaction.atomic():
            rows = ServedModel.objects.select_for_update()
            row = rows.filter(name=name, desired_state=DesiredState.LOADED).first()
            if row is None:
                return False
            if row.scales_from_zero:
                return True
            if row.idle_since is None:
                return _is_starting(row)
            row.idle_since = None
            row.save(update_fields=["idle_since", "changed_at"])
            log_action(SYSTEM_ACTOR, "model.wake", row)
            transaction.on_commit(lambda: _tell(row))
            return True
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable("The model catalogue is unavailable. Try again later.") from error


def _is_starting(row: ServedModel) -> bool:
    states = set(row.replicas.values_list("state", flat=True))
    if ReplicaState.FAILED in states:
        return False
    just_now = timezone.now() - row.changed_at < PICKED_UP
    return just_now or bool(states & {ReplicaState.PENDING, ReplicaState.LOADING})


def _tell(model: ServedModel) -> None:
    served_model_changed.send(ServedModel, served_model=model)
