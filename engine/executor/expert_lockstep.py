"""`ExpertLockstep`: engines that share a model's experts run their forward passes together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from engine.contract.errors import ConfigError, EngineFault, PeerFault
from engine.devices.threads import JoinedThread
from engine.distributed.beats import BEAT_INTERVAL_S, MissedBeats
from engine.distributed.memory import GATHER_TIMEOUT_S, RankMemory
from engine.distributed.parallel_state import DATA_PARAM
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

    An executor begins each step that computes by `begin_step`, before any rank may compute it: so
    all ranks of this engine run steps and others' passes in one order.

    Attributes:
        failure: what ended the group, as a sentence; "": nothing.
        is_late: whether this engine's latest step computed for longer than the others wait: then it
            is what ended the group, and one of its requests may be the cause.
    """

    def __init__(
        self,
        join_pass: Callable[[], None],
        group: RankGroup,
        memory: RankMemory,
        ranks_per_engine: int = 1,
    ) -> None:
        """`join_pass`: takes part in a forward pass of others. `memory`: of the group."""
        self.failure, self._is_peers, self.is_late = "", True, False
        #: Whether a step of this engine failed by itself; None: none has failed.
        self._failed_locally: bool | None = None
        self._began_at = self._waited_s = 0.0
        self._join_pass, self._group, self._memory = join_pass, group, memory
        self._ranks_per_engine = ranks_per_engine
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

    def begin_step(self) -> None:
        """Wait until this engine takes part in no pass of others, nor will before the step ends."""
        with self._turn:
            self._num_steps += 1
            self._group.interrupt()
            self._turn.wait_for(lambda: not self._joins)

    def __enter__(self) -> None:
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
            is_peers = self._is_peers and not self.is_late and not self._failed_locally
            raise (PeerFault if is_peers else EngineFault)(self.failure)

    def end_by(self, error: Exception, reason: str) -> NoReturn:
        """End the group by a step's error, with this sentence. Raises as `check`.

        Only the first one tells whose fault it is: others follow from it.
        """
        if self._failed_locally is None:
            self._failed_locally = not isinstance(error, RankError)
            if self._failed_locally:  # whatever has been noticed since
                self.failure = reason
        self._fail(reason)
        self.check()
        raise EngineFault(reason)

    def refuse_sleep(self) -> None:
        """Raise `ConfigError`."""
        raise ConfigError(
            f"enable_sleep_mode can't be used where {DATA_PARAM} shares experts: other engines "
            "need those of this one.",
            param="enable_sleep_mode",
        )

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
        first_ranks = range(0, size, self._ranks_per_engine)  # each watches the others of its own
        missed = {rank: MissedBeats() for rank in first_ranks if rank != this_rank}
        while not self._closed.wait(BEAT_INTERVAL_S):
            self._memory.beat()
            for rank, counter in missed.items():
                if counter.is_late(self._memory.num_beats(rank)) and not self.failure:
                    self._fail(f"Rank {rank} of the experts has given no sign of life.")

    def _join_passes(self) -> None:
        while not self._closed.is_set():
            with self._turn:
                # A step that has begun never computes where its preparation, or one before, failed.
                self._turn.wait_for(lambda: self._closed.is_set() or not self._num_steps)
                stepped, self._has_stepped = self._has_stepped, False
                if self._has_turn() or (stepped and self._turn.wait_for(self._has_turn, _PAUSE_S)):
                    continue
                self._joins = True
            try:
                while self._group.listen():
                    self._join_pass()
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
