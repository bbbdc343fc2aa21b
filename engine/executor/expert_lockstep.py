"""`ExpertLockstep`: engines that share a model's experts run their forward passes together."""

from __future__ import annotations

import logging
import threading
import time

from engine.contract.errors import EngineFault, PeerFault
from engine.devices.threads import JoinedThread
from engine.distributed.beats import BEAT_INTERVAL_S, MissedBeats
from engine.distributed.memory import GATHER_TIMEOUT_S, RankMemory
from engine.executor.worker import Worker
from kernels.errors import RankError
from kernels.interface import RankGroup

log = logging.getLogger(__name__)

#: Longer than what an engine with work does between two steps.
_PAUSE_S = 0.002
#: An engine that is closed leaves when no other has begun a pass for so long.
_LEAVE_S = 1.0
_POLL_S = 0.05


class ExpertLockstep:
    """A context in which this engine's steps compute; outside of it, it joins the others' passes.

    Every forward pass is one of all engines, because any of them may need any expert: one without
    sequences takes part with no tokens. A wave of passes begins with the first step of any engine
    and ends when none has work, without anyone who counts them: whoever has no step of its own
    sleeps until another one waits for it.

    Attributes:
        failure: what ended the group, as a sentence; "": nothing.
        is_late: whether this engine's latest step computed for longer than the others wait: then it
            is what ended the group, and one of its requests may be the cause.
    """

    def __init__(self, worker: Worker, group: RankGroup, memory: RankMemory) -> None:
        """`memory`: of the group."""
        self.failure, self._is_peers, self.is_late = "", True, False
        self._began_at = self._waited_s = 0.0
        self._worker, self._group, self._memory = worker, group, memory
        self._turn = threading.Condition()
        self._num_steps, self._has_stepped, self._joins = 0, False, False
        self._latest_pass = 0.0
        self._closed = threading.Event()
        self._threads = [
            JoinedThread(self._watch, name="expert-beats", tell_end=self._stop),
            JoinedThread(self._join_passes, name="expert-passes", tell_end=self._stop),
        ]

    def watch(self) -> None:
        """Send heartbeats, and expect those of the others, from now on."""
        self._threads[0].start()

    def join(self) -> None:
        """Join the others' passes from now on: the model can run, here and there."""
        self._threads[1].start()

    def __enter__(self) -> None:
        with self._turn:
            self._num_steps += 1
            self._group.interrupt()
            self._turn.wait_for(lambda: not self._joins)
            self._began_at, self._waited_s = time.monotonic(), self._group.waited_s

    def __exit__(self, *error: object) -> None:
        waited_s = self._group.waited_s - self._waited_s
        with self._turn:
            self.is_late = time.monotonic() - self._began_at - waited_s > GATHER_TIMEOUT_S
            self._num_steps -= 1
            self._has_stepped = True
            self._turn.notify_all()

    def check(self) -> None:
        """Raise `EngineFault` once an engine of the group has ended: `PeerFault` if another."""
        if self.failure:
            is_peers = self._is_peers and not self.is_late
            raise (PeerFault if is_peers else EngineFault)(self.failure)

    def close(self) -> None:
        """Leave the group at the end of a wave."""
        joins = self._threads[1].is_alive()
        while joins and not self.failure and time.monotonic() < self._latest_pass + _LEAVE_S:
            time.sleep(_POLL_S)
        self._stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _stop(self) -> None:
        self._closed.set()
        self._group.interrupt()
        with self._turn:
            self._turn.notify_all()

    def _fail(self, reason: str, *, is_peers: bool = True) -> None:
        if not self.failure:
            self._is_peers, self.failure = is_peers, reason
        self._memory.set_failed(True)
        self._group.fail()

    def _watch(self) -> None:
        size, this_rank = self._group.size, self._group.rank
        missed = {rank: MissedBeats() for rank in range(size) if rank != this_rank}
        while not self._closed.wait(BEAT_INTERVAL_S):
            self._memory.beat()
            for rank, counter in missed.items():
                if counter.is_late(self._memory.num_beats(rank)) and not self.failure:
                    self._fail(f"Rank {rank} of the experts has given no sign of life.")

    def _join_passes(self) -> None:
        while not self._closed.is_set():
            with self._turn:
                self._turn.wait_for(lambda: not self._num_steps)
                stepped, self._has_stepped = self._has_stepped, False
                if stepped and self._turn.wait_for(self._has_turn, _PAUSE_S):
                    continue
                self._joins = True
            try:
                while self._group.listen():
                    self._worker.join_forward()
                    self._latest_pass = time.monotonic()
            except Exception as error:  # of a rank that others wait for
                is_peers = isinstance(error, RankError)
                if not is_peers:
                    log.exception("This engine can't take part in a pass of others")
                self._fail(f"A rank of the experts has failed: {error}.", is_peers=is_peers)
                return
            finally:
                with self._turn:
                    self._joins = False
                    self._turn.notify_all()

    def _has_turn(self) -> bool:
        """Whether a step of this engine waits or runs, or nothing is to be run any more."""
        return self._num_steps > 0 or self._closed.is_set()
