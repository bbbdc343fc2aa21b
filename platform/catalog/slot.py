"""A replica's slot in a supervisor: its process, restarts and shutdown."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from catalog.models import ReplicaState
from catalog.processes import ManagedProcess, kill_when_stopped, spawn
from catalog.replica_log import ReplicaLog
from catalog.replica_rows import state_of
from engine.contract.messages import (
    DEAD_AFTER_S,
    EXIT_CONFIG,
    EXIT_PEER_FAULT,
    LOAD_DEAD_AFTER_S,
    Heartbeat,
)
from engine.system.step_record import SharedStepRecord

logger = logging.getLogger(__name__)

#: The longest delay plus the start stay below what gateways wait for a replica (`failover_wait_s`,
#: 30 s): while crashes stop in time, streams only pause.
BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0
#: A replica that served this long is restarted without delay when it dies.
HEALTHY_AFTER_S = 10.0
#: Extra time beyond a replica's drain timeout before it is killed.
KILL_AFTER_S = 10.0
#: A ready replica without a heartbeat for this long is killed, too: it is swapped out, or hangs.
SILENT_AFTER_S = 10.0
#: Maximum age of the exits that are counted.
EXITS_WITHIN_S = 3600.0
STOPPED_BY_SIGNAL = "was frozen by a signal and killed"


def backoff(failures: int) -> float:
    """Seconds to wait before the next start after this many consecutive failures."""
    return min(BACKOFF_S * 2 ** max(failures - 1, 0), MAX_BACKOFF_S) if failures else 0.0


def describe_exit(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


class ReplicaSlot:
    """The process of one replica and its successors.

    Args:
        command: its process; a changed command for the same replica id gets a new slot.
        served_model_id, model_name: its row in the catalogue. config: when that last changed.
        log: stores the end of its output; None: only our own standard error gets it.
        group: of replicas that start and end together; "": it is on its own.
    """

    def __init__(
        self,
        replica_id: str,
        served_model_id: int,
        command: Sequence[str],
        *,
        drain_seconds: float,
        model_name: str = "",
        cwd: str | None = None,
        asked: datetime | None = None,
        clock: Callable[[], float] = time.monotonic,
        log: ReplicaLog | None = None,
        environment: Mapping[str, str] | None = None,
        group: str = "",
    ) -> None:
        self.replica_id, self.served_model_id = replica_id, served_model_id
        self.model_name, self.group = model_name, group
        self.command, self.cwd, self.config = list(command), cwd, asked
        self.process: ManagedProcess | None = None
        #: Shared record that the process writes before each step.
        self.record: SharedStepRecord | None = None
        self.last_pid = 0
        #: Placeholder incarnation of a process that hasn't sent a heartbeat yet.
        self.pending_incarnation = ""
        #: Whether its process ended because of another one of its group.
        self.exited_by_peer = False
        self.restarts = self.failures = 0
        self.exit_detail = self.last_exit = ""
        self._exit_times: list[float] = []
        self._log, self._killed_because = log, ""
        self._environment = dict(environment or {})
        self.ready_since: float | None = None
        self._clock, self._drain_seconds = clock, drain_seconds
        self._next_start = clock()
        self._kill_at: float | None = None
        self._beat_at, self._beaten = 0.0, clock()

    @property
    def stopping(self) -> bool:
        """Whether it was asked to exit."""
        return self._kill_at is not None

    @property
    def exits_last_hour(self) -> int:
        """Number of unexpected exits."""
        since = self._clock() - EXITS_WITHIN_S
        self._exit_times = [moment for moment in self._exit_times if moment > since]
        return len(self._exit_times)

    @property
    def is_stopped(self) -> bool:
        """Whether it was asked to exit and has."""
        return self.stopping and self.process is None

    def update_config(self, asked: datetime | None) -> None:
        """Skip the delay before the next start: an operator may have loaded the model again."""
        if asked != self.config and self.process is None:
            self.failures, self.exit_detail = 0, ""
            self._next_start = self._clock()
        self.config = asked

    def is_due(self, occupied: bool) -> bool:
        """Whether none runs, a delay is over and no other node has the id."""
        if self.process is not None or self.stopping or self._clock() < self._next_start:
            return False
        if occupied:
            self.exit_detail = "another process serves under this replica id"
        return not occupied

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process, which `is_due`, with `environment` beside its own."""
        try:
            self.process = self._spawn(environment)
        except (OSError, subprocess.SubprocessError) as error:
            # For example no memory for another process: the existing ones keep running.
            self._record_exit(f"can't be started: {error}")
            return
        if self.last_pid:
            self.restarts += 1
        self.last_pid = self.process.pid
        self.pending_incarnation = f"coming-{uuid.uuid4().hex}"
        self.exit_detail, self.ready_since = "", None
        logger.info("replica %s starts as process %d", self.replica_id, self.last_pid)

    def _spawn(self, more: Mapping[str, str]) -> ManagedProcess:
        """Start the process; its standard error goes through the log, if there is one."""
        record = SharedStepRecord.create()
        ours, its = os.pipe() if self._log is not None else (None, None)
        # Behind a pipe it can't detect that a person is watching.
        env = {"QUIRE_TERMINAL": "1"} if its is not None and os.isatty(2) else {}
        env = {**self._environment, **more, **env}
        try:
            process = spawn(
                self.command,
                name=self.replica_id,
                cwd=self.cwd,
                env=env | (record.environment if record is not None else {}),
                stderr=its,
                pass_fds=(record.fd,) if record is not None else (),
                # Streams survive a killed engine; an unsupervised one would hold the memory.
                death_signal=signal.SIGKILL,
            )
        except BaseException:
            if ours is not None:
                os.close(ours)
            raise
        finally:
            if its is not None:
                os.close(its)
        self.record = record
        kill_when_stopped(process)
        if self._log is not None and ours is not None:
            self._log.write(f"process {process.pid} starts")
            self._log.forward(ours)
        return process

    def drain(self) -> None:
        """Ask the process to finish its requests and exit."""
        if self.stopping:
            return
        self._kill_at = self._clock() + self._drain_seconds + KILL_AFTER_S
        if self.process is not None:
            self.process.terminate()

    def check(self) -> bool:
        """Handle an exit, and return whether there was one; kill a process whose drain overruns."""
        if self.process is None:
            return False
        status = self.process.poll()
        if status is None:
            if self._kill_at is not None and self._clock() > self._kill_at:
                logger.warning("replica %s did not drain in time; killed", self.replica_id)
                self._kill_at = self._clock() + KILL_AFTER_S
                self.process.kill()
            return False
        reason = STOPPED_BY_SIGNAL if self.process.was_frozen else describe_exit(status)
        if self.record is not None and (fault := self.record.read_fault()):
            reason += f": {fault}"
        self.process = self.record = None
        self.exited_by_peer = status == EXIT_PEER_FAULT
        if not self.stopping:
            self._record_exit(self._killed_because or reason, starts_again=status != EXIT_CONFIG)
        elif status not in (0, -signal.SIGTERM):  # its row may be removed with it
            logger.warning("replica %s %s while it ended", self.replica_id, reason)
        return True

    def kill(self) -> None:
        """Kill the process and its group now."""
        self.drain()
        if self.process is not None:
            self.process.kill()
            self.process = None

    def state(self, heartbeat: Heartbeat | None) -> tuple[ReplicaState, str]:
        """The state to display: the process decides, then its heartbeat."""
        if self.process is None:
            if self.stopping:
                return ReplicaState.STOPPED, ""
            return (
                ReplicaState.FAILED if self.failures else ReplicaState.PENDING,
                self.exit_detail,
            )
        current = heartbeat if heartbeat and heartbeat.pid == self.process.pid else None
        if self.stopping:
            return ReplicaState.DRAINING, ""
        if current is None:
            return ReplicaState.LOADING, ""
        if current.state == "ready" and self.ready_since is None:
            self.ready_since = self._clock()
        return state_of(current), current.detail

    def kill_if_stalled(self, heartbeat: Heartbeat | None, now: float) -> None:
        """Kill a process whose engine has made no step for a while; it is restarted.

        Args:
            now: seconds since the epoch, by the clock that wrote the heartbeat.
        """
        if self.process is None or heartbeat is None or heartbeat.pid != self.process.pid:
            return
        stalled = now - heartbeat.progress_at
        limits = {"ready": DEAD_AFTER_S, "loading": LOAD_DEAD_AFTER_S}
        if stalled > limits.get(heartbeat.state, float("inf")):
            reason = f"stood still for {stalled:.0f} s and was killed"
            self._kill(f"{reason}. {heartbeat.detail}" if heartbeat.detail else reason)

    def kill_if_silent(self, heartbeat: Heartbeat | None) -> None:
        """Kill a process that served and has stopped sending heartbeats; it is restarted.

        `heartbeat`: the latest in Redis. While Redis is down, call `reset_failures` instead.
        """
        beat_at = heartbeat.at if heartbeat is not None else self._beat_at
        now = self._clock()
        if beat_at != self._beat_at or self.process is None or self.ready_since is None:
            self._beat_at, self._beaten = beat_at, now
        elif now - self._beaten > SILENT_AFTER_S and not self.stopping:
            self._kill(f"was silent for {SILENT_AFTER_S:.0f} s and was killed")

    def kill_with_group(self, *, acquits: bool) -> None:
        """Kill a process whose group has lost another one; `acquits`: for which none of its own
        requests is the cause.
        """
        if acquits and self.record is not None:
            self.record.acquit()
        self._kill("was killed: another replica that shares its experts has ended")

    def _kill(self, reason: str) -> None:
        """Kill an unhealthy process and its group; the reason precedes its exit status."""
        if self._killed_because:
            return  # already exiting
        logger.error("replica %s %s", self.replica_id, reason)
        self._killed_because = reason
        if self.process is not None:
            self.process.kill()

    def reset_failures(self) -> None:
        """Restart the silence timeout: while Redis is down no replica can be heard."""
        self._beaten = self._clock()

    def record_failure(self, detail: str) -> None:
        """Store a replica's own description of its failure."""
        self.exit_detail = self.last_exit = detail

    def _record_exit(self, reason: str, *, starts_again: bool = True) -> None:
        """`ended`: a description of the exit."""
        healthy = (
            self.ready_since is not None and self._clock() - self.ready_since >= HEALTHY_AFTER_S
        )
        self.failures = 0 if healthy else self.failures + 1
        self._exit_times.append(self._clock())
        wait = backoff(self.failures) if starts_again else math.inf
        self._next_start = self._clock() + wait
        self._killed_because = ""
        self.exit_detail = self.last_exit = f"the replica {reason}"
        then = (
            f"it starts again in {wait:.1f} s"
            if starts_again
            else "its settings are refused, so it starts again when the model is changed or loaded"
        )
        if self._log is not None:
            self._log.write(f"{self.exit_detail}; {then}")
        logger.warning("replica %s %s; %s", self.replica_id, reason, then)
