"""Rolling restarts, and waiting for a model to be served or to be gone."""

import time
from collections.abc import Callable

from catalog.actions import drain_replica
from catalog.live_status import live_replicas
from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from common.errors import Conflict, ServiceUnavailable
from common.installation import PROGRAM
from tenants.actors import Actor
from tenants.models import User

POLL_S = 0.2


def rolling_restart(
    *,
    actor: Actor | User,
    model: ServedModel,
    timeout: float,
    wait: bool = True,
    on_progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Drain and restart the ready replicas one at a time, each after the previous one is ready;
    those of a node that share experts at once.

    Args:
        timeout: maximum seconds per replica.
        wait: also wait for the last replica.
        on_progress: called with a description of each step.
    Raises: `PermissionDenied`; `Conflict` if none is ready, or one can't be restarted;
    `ServiceUnavailable` without Redis, or on timeout.
    """
    ready = list(
        Replica.objects.filter(served_model=model, state=ReplicaState.READY).order_by("replica_id")
    )
    if not ready:
        raise Conflict(f"No replica of {model.name} is ready.")
    groups: dict[str, list[Replica]] = {}
    for replica in ready:
        key = replica.host if model.group_settings else replica.replica_id
        groups.setdefault(key, []).append(replica)
    number = 0
    for group in groups.values():
        drain_replica(actor=actor, replica=group[0])
        for replica in group:
            number += 1
            on_progress(f"{replica.replica_id} ({number} of {len(ready)}) finishes what it has.")
        if wait or number < len(ready):
            if model.managed and model.group_settings:
                _wait_for_successors(group, timeout)
                on_progress(f"{len(group)} others are ready.")
                continue
            for replica in group:
                _wait_for_replacement(replica, timeout)
                on_progress(f"{replica.replica_id} is ready again.")


def _wait_for_successors(group: list[Replica], timeout: float) -> None:
    """Block until as many new processes serve on the node of replicas that share experts."""
    deadline = time.monotonic() + timeout
    old = {replica.incarnation for replica in group}
    while True:
        rows = list(group[0].served_model.replicas.filter(host=group[0].host))
        if not rows:
            raise Conflict(f"{group[0].replica_id} was removed in the meantime.")
        ready = [row for row in rows if row.state == ReplicaState.READY]
        serving = [row for row in ready if row.incarnation in old]
        if len(ready) - len(serving) >= len(group):
            return
        if not all(row.restart_of for row in serving):
            raise Conflict("Their successors can't be started; the replicas serve on.")
        if all(row.state == ReplicaState.FAILED for row in rows):  # restarted in their place
            reason = " ".join(rows[0].detail.split())
            raise Conflict(f"{rows[0].replica_id} can't be started again: {reason}")
        if time.monotonic() > deadline:
            raise ServiceUnavailable(f"Their successors are not ready after {timeout:.0f} s.")
        time.sleep(POLL_S)


def _wait_for_replacement(replica: Replica, timeout: float) -> None:
    """Block until a new process serves under the replica's id."""
    deadline = time.monotonic() + timeout
    while True:
        now = Replica.objects.filter(pk=replica.pk).first()
        if now is None:
            raise Conflict(f"{replica.replica_id} was removed in the meantime.")
        if now.state == ReplicaState.READY and now.incarnation != replica.incarnation:
            return
        if now.state == ReplicaState.FAILED and now.restarts > replica.restarts:
            reason = " ".join(now.detail.split())
            raise Conflict(f"{replica.replica_id} can't be started again: {reason}")
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"{replica.replica_id} is not ready again after {timeout:.0f} s, but {now.state}."
            )
        time.sleep(POLL_S)


#: A supervisor starts a new model within a second; after this long there is none.
PICKED_UP_S = 15.0
#: Until a supervisor has read the new desired state, rows may describe the previous load.
SEEN_S = 1.5


def wait_until_ready(
    model: ServedModel,
    timeout: float,
    say: Callable[[str], None] = lambda text: None,
    on_fraction: Callable[[float], None] | None = None,
) -> None:
    """Block until a replica serves the model.

    Args:
        say: called with each change.
        on_fraction: called with the loaded fraction of the most advanced replica.

    Raises: `Conflict` if its replicas fail or it's unloaded meanwhile, `ServiceUnavailable` if no
    supervisor starts it or on timeout.
    """
    started, warned, last = time.monotonic(), False, ""
    while True:
        rows = _rows(model)
        if any(row.state == ReplicaState.READY for row in rows):
            return
        failed = [row for row in rows if row.state == ReplicaState.FAILED]
        waited = time.monotonic() - started
        if failed and len(failed) == len(rows) and waited > SEEN_S:
            reason = " ".join(failed[0].detail.split())
            raise Conflict(f"{model.name} can't be loaded: {reason}")
        if not ServedModel.objects.filter(pk=model.pk, desired_state=DesiredState.LOADED).exists():
            raise Conflict(f"{model.name} was unloaded meanwhile.")
        alive = [row for row in rows if row.state != ReplicaState.STOPPED]
        if not alive and waited > PICKED_UP_S and not warned:
            say(f"No supervisor has taken it up: is `{PROGRAM} up` or `supervise` running?")
            warned = True
        if waited > timeout:
            raise ServiceUnavailable(f"{model.name} is not ready after {timeout:.0f} s.")
        now = ", ".join(f"{row.replica_id} is {row.state}" for row in alive)
        if now and now != last:
            say(now)
            last = now
        if on_fraction is not None:
            beats = [beat for beat in live_replicas() if beat.model.name == model.name]
            on_fraction(max((beat.load_progress for beat in beats), default=0.0))
        time.sleep(POLL_S)


def wait_for_state(replicas: list[Replica], state: ReplicaState, timeout: float) -> None:
    """Block until all replicas are in the state. Raises `ServiceUnavailable` on timeout."""
    deadline = time.monotonic() + timeout
    names = [replica.replica_id for replica in replicas]
    while pending := list(Replica.objects.filter(replica_id__in=names).exclude(state=state)):
        if time.monotonic() > deadline:
            row = pending[0]
            raise ServiceUnavailable(
                f"{row.replica_id} is {row.state}, not {state}, after {timeout:.0f} s."
            )
        time.sleep(POLL_S)


def wait_until_gone(model: ServedModel, timeout: float) -> None:
    """Block until no replica holds the model. Raises `ServiceUnavailable` on timeout."""
    deadline = time.monotonic() + timeout
    stopped_states = (ReplicaState.STOPPED, ReplicaState.FAILED)
    while any(row.state not in stopped_states for row in _rows(model)):
        if time.monotonic() > deadline:
            raise ServiceUnavailable(f"{model.name} still drains after {timeout:.0f} s.")
        time.sleep(POLL_S)


def _rows(model: ServedModel) -> list[Replica]:
    return list(Replica.objects.filter(served_model=model))
