"""Restarting a model's replicas one after the other, so that the others serve meanwhile."""

import time
from collections.abc import Callable

from catalog.actions import drain_replica
from catalog.models import Replica, ReplicaState, ServedModel
from tenants.actors import Actor
from tenants.errors import Conflict, ServiceUnavailable
from tenants.models import User

POLL_S = 0.2


def restart_replicas(
    *,
    actor: Actor | User,
    model: ServedModel,
    timeout: float,
    wait: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Have each ready replica finish what it has, end and start anew; the next one once it's ready.

    Args:
        timeout: seconds that each may take.
        wait: for the last one, too.
        say: hears what is being done.
    Raises: `PermissionDenied`; `Conflict` where none is ready, or one can't be started again;
    `ServiceUnavailable` without Redis, or when the time is over.
    """
    ready = list(
        Replica.objects.filter(served_model=model, state=ReplicaState.READY).order_by("replica_id")
    )
    if not ready:
        raise Conflict(f"No replica of {model.name} is ready.")
    for number, replica in enumerate(ready, 1):
        drain_replica(actor=actor, replica=replica)
        say(f"{replica.replica_id} ({number} of {len(ready)}) finishes what it has.")
        if wait or number < len(ready):
            _await_successor(replica, timeout)
            say(f"{replica.replica_id} is ready again.")


def _await_successor(replica: Replica, timeout: float) -> None:
    """Block until another process serves in the replica's place."""
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
