"""When a replica is started again."""

import signal
import sys
import threading
import time
import weakref
from datetime import UTC, datetime
from unittest.mock import Mock, patch

import pytest
from django.conf import settings

from catalog.heartbeats import watch_process_exit
from catalog.models import ReplicaState
from catalog.slot import HEALTHY_AFTER_S, MAX_BACKOFF_S, ReplicaSlot, backoff
from catalog.supervisor import Supervisor
from engine.contract.messages import (
    DEAD_AFTER_S,
    EXIT_CONFIG,
    EXIT_PEER_FAULT,
    LOAD_DEAD_AFTER_S,
    Heartbeat,
    ModelInfo,
)
from engine.system.step_record import SharedStepWriter

pytestmark = pytest.mark.system


class Clock:
    """Time that tests turn by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def slot_with(code: str, clock: Clock) -> ReplicaSlot:
    return ReplicaSlot("r", 1, [sys.executable, "-c", code], drain_seconds=1.0, clock=clock)


def start_if_due(slot: ReplicaSlot, *, occupied: bool) -> None:
    if slot.is_due(occupied):
        slot.start({})


def beat(slot: ReplicaSlot, state: str, progress_at: float = 0.0) -> Heartbeat:
    model = ModelInfo(name="m", path="", max_model_len=1, vocab_size=1, dtype="float32")
    return Heartbeat(
        replica_id="r",
        incarnation="i",
        state=state,
        model=model,
        at=progress_at,
        progress_at=progress_at,
        pid=slot.last_pid,
    )


def run_until_dead(slot: ReplicaSlot) -> None:
    assert slot.process is not None
    assert slot.process.wait(60) is not None
    slot.check()


def test_fault_57_the_wait_doubles_up_to_its_bound() -> None:
    assert [backoff(n) for n in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert backoff(1000) == MAX_BACKOFF_S
    assert settings.QUIRE.failover_wait_s >= 2 * MAX_BACKOFF_S  # and a start has the rest


def test_a_process_that_cant_be_started_is_tried_again_later(clock: Clock) -> None:
    slot = ReplicaSlot("r", 1, ["/no/such/program"], drain_seconds=1.0, clock=clock)
    start_if_due(slot, occupied=False)  # one of many replicas: the others must not end for it
    state, detail = slot.state(None)
    assert state is ReplicaState.FAILED
    assert "can't be started" in detail
    assert slot.process is None
    slot.command = [sys.executable, "-c", ""]
    start_if_due(slot, occupied=False)
    assert slot.process is None
    clock.now += backoff(1)
    start_if_due(slot, occupied=False)
    run_until_dead(slot)


@pytest.mark.parametrize(("status", "acquits"), [(EXIT_PEER_FAULT, False), (1, True)])
def test_of_a_group_that_a_late_replica_has_ended_its_requests_are_the_cause(
    clock: Clock, status: int, acquits: bool
) -> None:
    slots = [slot_with(f"raise SystemExit({status})", clock), slot_with("input()", clock)]
    for slot in slots:
        slot.start({})
    record = slots[1].record
    assert record is not None
    SharedStepWriter("i", record.fd).write(["late"])
    run_until_dead(slots[0])
    supervisor = Mock(spec=Supervisor)
    supervisor._beats = {}
    with patch("catalog.supervisor.is_starting_silently", return_value=False):
        Supervisor._start_group(supervisor, slots)
    run_until_dead(slots[1])
    last = record.read()
    assert last is not None
    assert last.request_ids == ([] if acquits else ["late"])


def test_a_replica_that_failed_starts_at_once_when_its_model_is_asked_for_again(
    clock: Clock,
) -> None:
    slot = slot_with("raise SystemExit(1)", clock)
    for _ in range(4):
        start_if_due(slot, occupied=False)
        run_until_dead(slot)
        clock.now += MAX_BACKOFF_S
    start_if_due(slot, occupied=False)
    run_until_dead(slot)
    slot.update_config(None)  # nobody has
    start_if_due(slot, occupied=False)
    assert slot.process is None
    assert slot.state(None)[0] == ReplicaState.FAILED
    slot.update_config(datetime.now(UTC))
    assert slot.state(None) == (ReplicaState.PENDING, "")
    start_if_due(slot, occupied=False)
    assert slot.process is not None
    run_until_dead(slot)


def test_what_a_replica_says_of_its_end_is_shown(clock: Clock) -> None:
    slot = slot_with(
        "from engine.system.step_record import SharedStepWriter as Writer; "
        "Writer.inherited('x').write_fault('Rank 1 was ended by signal 9.'); raise SystemExit(70)",
        clock,
    )
    start_if_due(slot, occupied=False)
    run_until_dead(slot)
    assert slot.last_exit == "the replica exited with status 70: Rank 1 was ended by signal 9."


def test_fault_101_an_end_that_its_watcher_has_seen_already_is_noticed(clock: Clock) -> None:
    slot = slot_with("raise SystemExit(1)", clock)
    start_if_due(slot, occupied=False)
    assert slot.process is not None
    assert slot.record is not None
    # Nothing of the replica stands in Redis: the watcher reads the record and says nothing.
    redis = Mock(get=Mock(return_value=None))
    watch_process_exit(slot.process, "r", redis, "", slot.record)
    for thread in threading.enumerate():  # it may have ended already
        if thread.name == f"watch-{slot.last_pid}":
            thread.join()
    redis.get.assert_called_once()
    record = weakref.ref(slot.record)
    run_until_dead(slot)
    assert slot.last_exit == "the replica exited with status 1"
    assert record() is None  # its memory is released


def test_a_replica_that_dies_early_waits_longer_each_time(clock: Clock) -> None:
    slot = slot_with("raise SystemExit(1)", clock)
    for failures in (1, 2, 3):
        start_if_due(slot, occupied=False)
        run_until_dead(slot)
        assert slot.failures == failures
        assert slot.state(None) == (ReplicaState.FAILED, "the replica exited with status 1")
        start_if_due(slot, occupied=False)
        assert slot.process is None
        clock.now += backoff(failures) + 0.01
    assert slot.restarts == 2
    assert slot.exits_last_hour == 3
    clock.now += 3600
    assert slot.exits_last_hour == 0


def test_refused_settings_are_not_tried_again_before_they_change(clock: Clock) -> None:
    slot = slot_with(f"raise SystemExit({EXIT_CONFIG})", clock)
    start_if_due(slot, occupied=False)
    run_until_dead(slot)
    clock.now += 100 * MAX_BACKOFF_S
    start_if_due(slot, occupied=False)
    assert slot.process is None
    assert slot.state(None)[0] is ReplicaState.FAILED
    slot.update_config(datetime.now(UTC))
    start_if_due(slot, occupied=False)
    assert slot.process is not None
    run_until_dead(slot)


def test_one_that_served_for_a_while_starts_at_once(clock: Clock) -> None:
    slot = slot_with("import time; time.sleep(600)", clock)
    start_if_due(slot, occupied=False)
    assert slot.state(beat(slot, "ready"))[0] == ReplicaState.READY
    clock.now += HEALTHY_AFTER_S
    assert slot.process is not None
    slot.process.kill()
    slot.check()
    assert slot.state(None) == (ReplicaState.PENDING, "the replica was killed by SIGKILL")
    start_if_due(slot, occupied=False)
    assert slot.process is not None
    slot.kill()


def test_a_heartbeat_of_an_earlier_process_says_nothing(clock: Clock) -> None:
    slot = slot_with("import time; time.sleep(600)", clock)
    start_if_due(slot, occupied=False)
    old = beat(slot, "ready")
    old.pid += 1
    assert slot.state(old)[0] == ReplicaState.LOADING
    slot.kill()


def test_nothing_starts_where_another_process_serves(clock: Clock) -> None:
    slot = slot_with("pass", clock)
    start_if_due(slot, occupied=True)
    assert slot.process is None
    assert "another process" in slot.state(None)[1]


def test_one_that_overstays_its_drain_is_killed(clock: Clock) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    slot = slot_with(code, clock)
    start_if_due(slot, occupied=False)
    slot.drain()
    assert slot.state(None)[0] == ReplicaState.DRAINING
    clock.now += 100
    slot.check()
    run_until_dead(slot)
    assert slot.is_stopped
    start_if_due(slot, occupied=False)
    assert slot.process is None


def test_an_exit_that_was_asked_for_and_went_wrong_is_logged(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    slot = slot_with(code, clock)
    start_if_due(slot, occupied=False)
    assert slot.process is not None
    assert slot.process.wait(60) == -signal.SIGSEGV
    slot.drain()  # it is told to end, and has crashed meanwhile
    slot.check()
    assert slot.is_stopped
    assert f"replica {slot.replica_id} was killed by SIGSEGV while it ended" in caplog.text


def test_fault_27_a_replica_whose_engine_stands_still_is_killed(clock: Clock) -> None:
    slot = slot_with("import time; time.sleep(600)", clock)
    start_if_due(slot, occupied=False)
    now = time.time()
    slot.kill_if_stalled(beat(slot, "ready", now - DEAD_AFTER_S + 1), now)
    slot.kill_if_stalled(beat(slot, "loading", now - 10 * DEAD_AFTER_S), now)
    assert slot.process is not None
    assert slot.process.poll() is None
    slot.kill_if_stalled(beat(slot, "ready", now - DEAD_AFTER_S - 1), now)
    run_until_dead(slot)
    assert slot.process is None


def test_a_replica_that_hangs_while_it_loads_is_killed_and_the_call_is_named(clock: Clock) -> None:
    slot = slot_with("import time; time.sleep(600)", clock)
    start_if_due(slot, occupied=False)
    now = time.time()
    heartbeat = beat(slot, "loading", now - LOAD_DEAD_AFTER_S - 1)
    heartbeat.detail = "The device toy has been in make_runner for 1801 s."
    slot.kill_if_stalled(heartbeat, now)
    run_until_dead(slot)
    assert "killed. The device toy has been in make_runner for 1801 s." in slot.exit_detail
