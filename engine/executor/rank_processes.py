"""`RankProcesses`: the other ranks' processes, as the first one sees them."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from engine.contract.errors import EngineFault
from engine.distributed.channel import Channel, ChannelClosed, RankReply, encode_message
from engine.distributed.memory import RankMemory
from engine.distributed.parallel_state import ParallelState
from engine.distributed.pipeline import StageSockets
from engine.distributed.rendezvous import stage_links, stage_sockets
from engine.executor.rank_process import BEAT_INTERVAL_S, RankArguments, StagedAdapter
from kernels.interface import RankGroup

log = logging.getLogger(__name__)

#: Looks at a rank without a beat between them, after which it's frozen: it is noticed within 2 s.
_MISSED_BEATS = 15
#: Of calls after the start, which take seconds: a rank that lives may still be stuck.
CALL_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 5.0
_POLL_S = 0.05


class RankWatch:
    """Watches processes in a thread; once one has ended or is frozen, all gathers fail.

    Attributes:
        failure: what happened, as a sentence; "": nothing.
        groups: whose gathers fail.
    """

    def __init__(self, memory: RankMemory, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.failure = ""
        self.groups: Sequence[RankGroup] = ()
        self._memory, self._processes = memory, processes
        self._finished = threading.Event()
        self._beats = [(0, 0)] * len(processes)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: processes may end now."""
        self._finished.set()

    def fail(self, reason: str) -> None:
        """Let all gathers fail, for a reason that ends the group; the first one counts."""
        self.failure = self.failure or reason
        self._memory.set_failed(True)
        for group in self.groups:
            group.fail()

    def _run(self) -> None:
        while not self._finished.wait(BEAT_INTERVAL_S):
            for index in range(len(self._processes)):
                reason = self._examine(index)
                if not reason or self._finished.is_set():
                    continue
                log.critical("%s", reason)
                self.fail(reason)
                # Whoever sends to a frozen rank would wait once its socket is full.
                for process in self._processes:
                    process.kill()
                return

    def _examine(self, index: int) -> str:
        rank, process = index + 1, self._processes[index]
        status = process.poll()
        if status is not None:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
            return f"Rank {rank} {how}."
        beats, (latest, missed) = self._memory.num_beats(rank), self._beats[index]
        # Looks are counted, not seconds: this process may have been stopped as well.
        self._beats[index] = (beats, 0 if beats != latest or not beats else missed + 1)
        if self._beats[index][1] >= _MISSED_BEATS:
            return f"Rank {rank} has given no sign of life for {_MISSED_BEATS * BEAT_INTERVAL_S} s."
        return ""


class RankProcesses:
    """Starts the ranks 1 to size - 1, sends them commands and ends them.

    Raises OSError where the system refuses a process or the memory.
    """

    def __init__(self, state: ParallelState, num_bytes: int) -> None:
        """`num_bytes`: of shared memory for the kernels of a stage."""
        self.memory = RankMemory.create(state, num_bytes)
        #: Those of the first rank.
        self.stage_sockets = StageSockets()
        self._channels: list[Channel] = []
        self._adapter_channels: list[Channel] = []
        self._adapter_lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        sockets = connect_stages(state)
        self.stage_sockets = sockets[0]
        for rank in range(1, state.world_size):
            self._start(replace(state, rank=rank), sockets[rank])
            for descriptor in sockets[rank].descriptors:
                os.close(descriptor)
        self.watch = RankWatch(self.memory, self._processes)
        self._finalizer = weakref.finalize(
            self,
            _end,
            self.watch,
            self._channels,
            self._adapter_channels,
            self._processes,
            self.memory.descriptor,
        )

    def _start(self, state: ParallelState, sockets: StageSockets) -> None:
        ours, theirs = socket.socketpair()
        our_adapters, their_adapters = socket.socketpair()
        descriptors = self.memory.descriptor, theirs.fileno(), their_adapters.fileno()
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs, their_adapters:
            self._processes.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "engine.executor.rank_process"),
                        msgspec.json.encode(RankArguments(state, sockets, *descriptors)).decode(),
                    ],
                    pass_fds=(*descriptors, *sockets.descriptors),
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                    # An interrupt of a terminal is for the first rank, which ends the others.
                    start_new_session=True,
                )
            )
        self._channels.append(Channel(ours))
        self._adapter_channels.append(Channel(our_adapters))

    def start(self, settings: Sequence[dict[str, Any]]) -> None:
        """Have each rank from 1 on make a worker by its settings."""
        for channel, mapping in zip(self._channels, settings, strict=True):
            channel.send(encode_message("start", mapping))

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks from 1 on."""
        return [process.pid for process in self._processes]

    def broadcast(self, command: str, body: Any = None) -> None:
        """Send a command to all ranks. Raises `EngineFault` where one has ended."""
        self._send(self._channels, encode_message(command, body))

    def stage_adapter(self, adapter: StagedAdapter) -> None:
        """Have all ranks read an adapter while steps run. Any thread may call it. Raises as
        `collect`.
        """
        command = "stage_adapter"
        with self._adapter_lock:
            self._send(self._adapter_channels, encode_message(command, adapter))
            self._collect(self._adapter_channels, command, CALL_TIMEOUT_S)

    def _send(self, channels: Sequence[Channel], frame: bytes) -> None:
        for rank, channel in enumerate(channels, 1):
            try:
                channel.send(frame)
            except ChannelClosed as error:
                self.watch.fail(f"Rank {rank} has ended.")
                raise EngineFault(self.watch.failure) from error

    def collect(self, command: str, timeout_s: float | None = CALL_TIMEOUT_S) -> list[RankReply]:
        """All ranks' replies to a command.

        Raises what a rank raised, and `EngineFault` where one has ended or doesn't reply in time;
        None: as long as they live.
        """
        return self._collect(self._channels, command, timeout_s)

    def _collect(
        self, channels: Sequence[Channel], command: str, timeout_s: float | None
    ) -> list[RankReply]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        replies = [
            self._reply(rank, channel, command, deadline)
            for rank, channel in enumerate(channels, 1)
        ]
        for rank, reply in enumerate(replies, 1):
            if reply.error:
                raise reply.to_error(rank)
        return replies

    def _reply(
        self, rank: int, channel: Channel, command: str, deadline: float | None
    ) -> RankReply:
        while True:
            try:
                data = channel.receive(_POLL_S)
            except ChannelClosed as error:
                self.watch.fail(f"Rank {rank} ended during {command}.")
                raise EngineFault(self.watch.failure) from error
            if data is not None:
                return msgspec.msgpack.decode(data, type=RankReply)
            if self.watch.failure:
                raise EngineFault(f"{self.watch.failure} It was to do {command}.")
            if deadline is not None and time.monotonic() > deadline:
                self.watch.fail(f"Rank {rank} did not finish {command} in time.")
                raise EngineFault(self.watch.failure)

    def close(self) -> None:
        """End the ranks, by force where they don't end by themselves."""
        self._finalizer()


def connect_stages(state: ParallelState) -> list[StageSockets]:
    """Each rank's connections to those of other stages, in this process; see `stage_links`."""
    descriptors: list[dict[tuple[int, str], int]] = [{} for _ in range(state.world_size)]
    for source, target, kind in stage_links(state):
        ours, theirs = (end.detach() for end in socket.socketpair())
        descriptors[source][target, kind] = ours
        descriptors[target][source, kind] = theirs
    return [stage_sockets(replace(state, rank=rank), ends) for rank, ends in enumerate(descriptors)]


def _end(
    watch: RankWatch,
    channels: Sequence[Channel],
    adapter_channels: Sequence[Channel],
    processes: Sequence[subprocess.Popen[bytes]],
    descriptor: int,
) -> None:
    watch.stop()
    for channel in (*channels, *adapter_channels):
        channel.close()
    for process in processes:
        try:
            # One that is stopped doesn't read that its socket is closed.
            process.wait(0.0 if watch.failure else _END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    os.close(descriptor)
