"""A model that nobody asks for lets go of its replicas."""

from __future__ import annotations

from typing import Any

import pytest

from catalog import actions
from catalog.idle import IdleMonitor, unload_idle_model
from catalog.models import DesiredState, ServedModel
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry
from tests.console.beats import heartbeat


class Clock:
    """Time that tests turn by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def beat(steps: int, **fields: Any) -> Any:
    stats = {"steps_total": steps, "num_requests_running": fields.pop("running", 0)}
    return heartbeat("q-0", "quill", stats=stats, **fields)


def test_idleness_is_counted_from_the_last_step() -> None:
    clock, idle_times = Clock(), []
    watch = IdleMonitor(clock)
    for steps, running, state in (
        (5, 0, "ready"),
        (5, 0, "ready"),
        (9, 0, "ready"),
        (9, 0, "ready"),
        (9, 1, "ready"),
        (9, 0, "ready"),
        (9, 0, "loading"),
    ):
        idle_times.append(watch.idle_seconds("quill", [beat(steps, running=running, state=state)]))
        clock.now += 10
    assert idle_times == [0, 10, 0, 10, 0, 0, 0]
    assert watch.idle_seconds("quill", []) == 0


def test_work_of_any_replica_counts_and_a_new_one_begins_anew() -> None:
    clock = Clock()
    watch = IdleMonitor(clock)
    both = [beat(1), heartbeat("q-1", "quill", stats={"steps_total": 1})]
    watch.idle_seconds("quill", both)
    clock.now += 30
    assert watch.idle_seconds("quill", both) == 30
    assert watch.idle_seconds("quill", both[:1]) == 0


@pytest.mark.django_db
def test_letting_go_is_written_down_once_and_a_load_ends_it() -> None:
    model = ServedModel.objects.create(
        name="quill", source="q", desired_state=DesiredState.LOADED, idle_minutes=1
    )
    assert unload_idle_model(model)
    assert not unload_idle_model(model)
    model.refresh_from_db()
    assert model.idle_since is not None
    assert AuditEntry.objects.get(action="model.idle").details == {"minutes": 1}
    actions.unload_model(actor=SYSTEM_ACTOR, model=model)
    model.refresh_from_db()
    assert model.idle_since is None
    assert not unload_idle_model(model)
