"""`RankProcesses`: the processes of the other ranks, as the first one sees them."""

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
from typing import Any, Protocol

import msgspec

from engine.contract.errors import EngineFault
from engine.distributed.beats import (
    BEAT_INTERVAL_S,
    MAX_MISSED_POLLS,
    MAX_MISSED_POLLS_LOADING,
    BeatLink,
    MissedBeats,
)
from engine.distributed.channel import Channel, ChannelClosed, RankReply, encode_message
from engine.distributed.memory import RankMemory
from engine.distributed.parallel_state import ParallelState
from engine.distributed.pipeline import StageSockets
from engine.distributed.rendezvous import stage_links, stage_sockets
from engine.executor.rank_process import (
    JoinArguments,
    RankArguments,
    StagedAdapter,
)
from kernels.interface import RankGroup

log = logging.getLogger(__name__)

#: Timeout of calls after startup, which take seconds: a rank that is alive may still be stuck.
CALL_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 5.0
_POLL_S = 0.05


class RankHandle(Protocol):
    """A rank that was started.

    Attributes:
        pid: its process id; 0: not known here.
    """

    @property
    def pid(self) -> int: ...

    def poll(self) -> str:
        """How it has exited, as a message; "": it hasn't, or that isn't known."""

    def kill(self) -> None:
        """Kill it."""

    def on_closing(self) -> None:
        """Prepare for the closing of the connections, which makes it exit."""

    def wait(self, timeout_s: float) -> None:
        """Wait for it to exit by itself; kill it after `timeout_s`."""


class LocalRank:
    """A process on this machine."""

    def __init__(
        self, arguments: RankArguments | JoinArguments, descriptors: Sequence[int] = ()
    ) -> None:
        """`descriptors`: file descriptors that it inherits. Raises OSError."""
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "engine.executor.rank_process"),
                msgspec.json.encode(arguments).decode(),
            ],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            # A terminal's interrupt is for the first rank, which stops the others. A session of
            # its own would do that, too, but Linux may schedule a session as one (autogroup).
            process_group=0,
        )
        self.pid = self._process.pid

    def poll(self) -> str:
        status = self._process.poll()
        if status is None:
            return ""
        return f"was ended by signal {-status}" if status < 0 else f"ended with {status}"

    def kill(self) -> None:
        self._process.kill()

    def on_closing(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RankWatch:
    """Watches ranks in a thread; once one has exited or is frozen, all collectives fail.

    Attributes:
        failure: what happened, as a sentence; "": nothing.
        groups: rank groups whose collectives fail then.
        loads: whether ranks are loading the model, and may give no sign of life for longer.
    """

    def __init__(
        self,
        memory: RankMemory,
        handles: Sequence[RankHandle],
        channels: Sequence[Channel],
        links: Sequence[BeatLink],
    ) -> None:
        """`links`: to each rank; empty if the shared memory carries their heartbeats."""
        self.failure = ""
        self.groups: Sequence[RankGroup] = ()
        self.loads = True
        self._memory, self._handles = memory, handles
        self._channels, self._links = channels, links
        self._finished = threading.Event()
        self._missed = [MissedBeats() for _ in handles]
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread: processes may exit now."""
        self._finished.set()

    def fail(self, reason: str) -> None:
        """Fail all collectives, for a reason that ends the group; only the first reason counts."""
        self.failure = self.failure or reason
        self._fail_gathers()

    def _fail_gathers(self) -> None:
        self._memory.set_failed(True)
        for group in self.groups:
            group.fail()

    def _run(self) -> None:
        while not self._finished.wait(BEAT_INTERVAL_S):
            for index in range(len(self._handles)):
                reason = self._examine(index)
                if not reason or self._finished.is_set():
                    continue
                log.critical("%s", reason)
                self.fail(reason)
                # Otherwise sends to a frozen rank would block once its socket is full.
                for handle in self._handles:
                    handle.kill()
                for channel in self._channels:
                    channel.shutdown()
                return

    def _examine(self, index: int) -> str:
        rank = index + 1
        try:
            if self._links and self._links[index].exchange(self._memory.has_failed):
                self._fail_gathers()
        except ChannelClosed:
            return f"Rank {rank} {self._handles[index].poll() or 'has ended'}."
        if reason := self._handles[index].poll():
            return f"Rank {rank} {reason}."
        beats = self._links[index].num_beats if self._links else self._memory.num_beats(rank)
        max_missed = MAX_MISSED_POLLS_LOADING if self.loads else MAX_MISSED_POLLS
        if self._missed[index].is_late(beats, max_missed):
            seconds = max_missed * BEAT_INTERVAL_S
            return f"Rank {rank} has given no sign of life for {seconds} s."
        return ""


class RankProcesses:
    """Starts the ranks 1 to size - 1, sends them commands and stops them.

    Attributes:
        memory: shared with the other ranks on this machine.
        local_ranks: the ranks on this machine.
        part_channels: to the ranks from 1 on, for parts of KV blocks; empty if some are on another
            machine.
        stage_sockets: of the first rank.

    Raises OSError if the system refuses a process or the memory.
    """

    part_channels: Sequence[Channel] = ()

    def __init__(
        self, state: ParallelState, num_bytes: int, expert_memory: RankMemory | None = None
    ) -> None:
        """`num_bytes`: size of the memory that the kernels of a stage share. `expert_memory`: see
        `Worker`; of the first rank.
        """
        self.memory = RankMemory.create(state, num_bytes)
        self.local_ranks = list(range(state.world_size))
        sockets = connect_stages(state)
        self.stage_sockets = sockets[0]
        handles: list[RankHandle] = []
        channels: list[Channel] = []
        adapter_channels: list[Channel] = []
        part_channels: list[Channel] = []
        descriptors: tuple[int, ...]
        for rank in range(1, state.world_size):
            ours, theirs = socket.socketpair()
            our_adapters, their_adapters = socket.socketpair()
            our_parts, their_parts = socket.socketpair()
            descriptors = self.memory.descriptor, theirs.fileno(), their_adapters.fileno()
            arguments = RankArguments(
                replace(state, rank=rank), sockets[rank], *descriptors, parts=their_parts.fileno()
            )
            descriptors = *descriptors, their_parts.fileno()
            if expert_memory is not None:
                first = expert_memory.state
                arguments.expert_state = replace(first, rank=first.rank + rank)
                arguments.expert_memory = expert_memory.descriptor
                descriptors = *descriptors, expert_memory.descriptor
            with theirs, their_adapters, their_parts:
                handles.append(LocalRank(arguments, (*descriptors, *sockets[rank].descriptors)))
            channels.append(Channel(ours))
            adapter_channels.append(Channel(our_adapters))
            part_channels.append(Channel(our_parts))
            for descriptor in sockets[rank].descriptors:
                os.close(descriptor)
        self.part_channels = part_channels
        self._begin(handles, channels, adapter_channels)

    def _begin(
        self,
        handles: list[RankHandle],
        channels: list[Channel],
        adapter_channels: list[Channel],
        links: list[BeatLink] | None = None,
    ) -> None:
        """Watch the ranks. `links`: see `RankWatch`."""
        self._handles, self._links = handles, links or []
        self._channels, self._adapter_channels = channels, adapter_channels
        self._adapter_lock = threading.Lock()
        all_channels = (*channels, *adapter_channels, *self.part_channels)
        self.watch = RankWatch(self.memory, handles, all_channels, self._links)
        self._finalizer = weakref.finalize(
            self,
            _end,
            self.watch,
            (*all_channels, *self._links),
            handles,
            self.memory.descriptor,
        )

    def start(self, settings: Sequence[dict[str, Any]]) -> None:
        """Create a worker in each rank from 1 on, with its settings."""
        for channel, mapping in zip(self._channels, settings, strict=True):
            channel.send(encode_message("start", mapping))

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes of ranks 1 and higher."""
        return [handle.pid for handle in self._handles]

    def broadcast(self, command: str, body: Any = None) -> None:
        """Send a command to all ranks. Raises `EngineFault` if one has exited."""
        self._send(self._channels, encode_message(command, body))

    def stage_adapter(self, adapter: StagedAdapter) -> None:
        """Read an adapter on all ranks while steps run. May be called from any thread. Raises as
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
        """Collect all ranks' replies to a command.

        Raises the error that a rank raised, and `EngineFault` if one has exited or doesn't reply in
        time; None: without a limit while they are alive.
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

    def finish_reset(self) -> None:
        """Clear the failure on ranks that don't share memory with this one."""
        if self._links:
            self.broadcast("finish_reset")
            self.collect("finish_reset")
        for link in self._links:
            link.reset()

    def close(self) -> None:
        """Stop the ranks; kill those that don't exit by themselves."""
        self._finalizer()


def connect_stages(state: ParallelState) -> list[StageSockets]:
    """Each rank's connections to other stages, in this process; see `stage_links`."""
    descriptors: list[dict[tuple[int, str], int]] = [{} for _ in range(state.world_size)]
    for source, target, kind in stage_links(state):
        ours, theirs = (end.detach() for end in socket.socketpair())
        descriptors[source][target, kind] = ours
        descriptors[target][source, kind] = theirs
    return [stage_sockets(replace(state, rank=rank), ends) for rank, ends in enumerate(descriptors)]


def _end(
    watch: RankWatch,
    connections: Sequence[Channel | BeatLink],
    handles: Sequence[RankHandle],
    descriptor: int,
) -> None:
    watch.stop()
    for handle in handles:
        handle.on_closing()
    for connection in connections:
        connection.close()
    for handle in handles:
        # A suspended process doesn't read that its socket is closed.
        handle.wait(0.0 if watch.failure else _END_TIMEOUT_S)
    os.close(descriptor)
