"""`python -m engine.executor.rank_process`: a rank that runs the first rank's commands.

Its argument is `RankArguments` or `JoinArguments`, as JSON. It exits when the command socket is
closed, so that no rank outlives the first one.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from engine.contract.engine_config import EngineConfig
from engine.contract.lora import AdapterRef
from engine.distributed.beats import BEAT_INTERVAL_S, BeatLink
from engine.distributed.channel import (
    Channel,
    ChannelClosed,
    RankMessage,
    RankReply,
    encode_frame,
    encode_reply,
)
from engine.distributed.memory import RankMemory
from engine.distributed.parallel_state import ParallelState
from engine.distributed.pipeline import StageSockets
from engine.distributed.rendezvous import (
    MEMORY_KEY,
    STORE_PREFIX,
    Rendezvous,
    open_store,
    rank_links,
    stage_sockets,
)
from engine.executor.abstract import Capacity
from engine.executor.uniproc_executor import find_worker_method
from engine.executor.worker import Worker
from engine.kv_transfer.rank_connector import RankConnector
from engine.kv_transfer.ranked_storage import FlushParts, PartsReply, ReadParts
from engine.lora.store import PackedAdapter
from engine.multimodal.inputs import decode_tensors
from engine.scheduler.plan import GrammarOutput, StepPlan
from engine.speculative.interface import HeadPlan
from engine.worker.interface import PendingStep
from kernels.errors import RankError

log = logging.getLogger(__name__)

#: Missed heartbeats of the first rank after which this one exits: it would have nothing to do.
MAX_MISSED_BEATS = 100
_POLL_S = 60.0


class JoinArguments(msgspec.Struct, tag=True):
    """The store through which ranks on different machines find each other."""

    host: str
    port: int
    state: ParallelState

    def join(self) -> RankArguments:
        """Connect to the other ranks. Raises `EngineFault`."""
        store = open_store(self.host, self.port)
        meeting = Rendezvous(dist.PrefixStore(STORE_PREFIX, store), self.state, self.host)
        memory = meeting.share_memory(int(meeting.read(MEMORY_KEY, 0)))
        ends = meeting.connect(rank_links(self.state))
        return RankArguments(
            self.state,
            stage_sockets(self.state, ends),
            memory.descriptor,
            ends[0, "commands"],
            ends[0, "adapters"],
            ends[0, "beats"],
        )


class RankArguments(msgspec.Struct, tag=True):
    """A rank's arguments, and its file descriptors.

    Attributes:
        stage_sockets: connections to other stages.
        memory, commands, adapters: of the shared memory, and of the sockets for steps and adapters.
        beats: of a socket for heartbeats; None: the shared memory carries them to the first rank.
        parts: of a socket for parts of KV blocks; None: on several machines there is none.
        expert_state, expert_memory: this rank's place among those of engines that share experts,
            and their memory; None: there are none.
    """

    state: ParallelState
    stage_sockets: StageSockets
    memory: int
    commands: int
    adapters: int
    beats: int | None = None
    parts: int | None = None
    expert_state: ParallelState | None = None
    expert_memory: int | None = None


class RemoteCall(msgspec.Struct):
    """A call of a worker's method."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class StagedAdapter(msgspec.Struct):
    """An adapter to read, and the number by which it is published: meanwhile the same adapter may
    be being unloaded, or loaded again.
    """

    number: int
    ref: AdapterRef


class PackedTensor(msgspec.Struct):
    """float32 [rows, columns], row by row."""

    columns: int
    data: bytes


#: Commands with replies, and the types of their bodies.
CALLS: dict[str, Any] = {
    "start": dict[str, Any],
    "load": None,
    "set_capacity": Capacity,
    "allocate_cache": None,
    "reset": None,
    "finish_reset": None,
    "sleep": int,
    "wake_up": list[str],
    "collective_rpc": RemoteCall,
    "stage_adapter": StagedAdapter,
}
#: Commands without replies: an error in a step is reported at the next reset.
CASTS: dict[str, Any] = {
    "execute": StepPlan,
    "launch": StepPlan,
    "finish": int,
    "apply_plan": StepPlan,
    "propose": HeadPlan,
    "join_forward": None,
    "send_bitmask": GrammarOutput,
    "attach": PackedTensor,
    "attach_media": bytes,
    "detach": int,
    "on_serving": None,
    "publish_adapter": int,
    "discard_adapter": int,
    "unload_adapter": str,
    "drop_host_copy": str,
}


class RankProcess:
    """A rank other than the first. Each command is a method of the same name."""

    def __init__(self, arguments: RankArguments) -> None:
        self._channel, self._adapters = (
            Channel(socket.socket(fileno=descriptor))
            for descriptor in (arguments.commands, arguments.adapters)
        )
        self._memory = RankMemory.open(arguments.memory, arguments.state)
        self._beats = None
        if arguments.beats is not None:
            self._beats = BeatLink(socket.socket(fileno=arguments.beats))
        self._parts = None
        if arguments.parts is not None:
            self._parts = Channel(socket.socket(fileno=arguments.parts))
        self._expert_memory = None
        if arguments.expert_state is not None and arguments.expert_memory is not None:
            self._expert_memory = RankMemory.open(arguments.expert_memory, arguments.expert_state)
        self._stage_sockets = arguments.stage_sockets
        #: Launched steps by number, with several pipeline stages.
        self._launched: dict[int, PendingStep] = {}
        self._commands: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        self._failed_steps: list[int] = []
        self._staged: dict[int, PackedAdapter] = {}
        self.worker: Worker | None = None

    def run(self) -> None:
        """Run commands until the first rank exits."""
        threading.Thread(target=self._receive, name="commands", daemon=True).start()
        threading.Thread(target=self._stage_adapters, name="adapters", daemon=True).start()
        if self._beats is not None:
            threading.Thread(
                target=self._exchange_beats, args=(self._beats,), name="beats", daemon=True
            ).start()
        if self._parts is not None:
            threading.Thread(
                target=self._serve_parts, args=(self._parts,), name="parts", daemon=True
            ).start()
        while True:
            message = self._commands.get()
            if message.command in CASTS:
                self._cast(message.command, _decode(message))
            else:
                self._channel.send(self._call(message))

    def _call(self, message: RankMessage) -> bytes:
        """Run a command that has a reply; returns the reply's frame."""
        try:
            reply = getattr(self, message.command)(*_decode(message)) or RankReply()
        except Exception as error:  # sent to the first rank, which raises it
            log.exception("%s failed", message.command)
            reply = RankReply.from_error(error)
        return encode_reply(reply)

    def _stage_adapters(self) -> None:
        """Read adapters while steps run; the first rank decides from which step on they may be
        used.
        """
        while True:
            try:
                data = self._adapters.receive(_POLL_S)
                if data is not None:
                    message = msgspec.msgpack.decode(data, type=RankMessage)
                    self._adapters.send(self._call(message))
            except ChannelClosed:
                return  # the other channel is closed, too, which ends the process

    def _serve_parts(self, channel: Channel) -> None:
        """Read and write parts of KV blocks while steps run."""

        def reply(answer: PartsReply) -> None:
            with suppress(ChannelClosed):  # the first rank has ended
                channel.send(encode_frame(answer))

        try:
            while True:
                if (data := channel.receive(_POLL_S)) is None:
                    continue
                call = msgspec.msgpack.decode(data, type=ReadParts | FlushParts)
                transfer = self._loaded.kv_transfer
                if transfer is not None and isinstance(transfer.connector, RankConnector):
                    transfer.connector.serve(call, reply)
        except ChannelClosed:
            return  # the other channels are closed, too, which ends the process

    def _exchange_beats(self, link: BeatLink) -> None:
        """Exchange heartbeats with the first rank, and report failures in both directions."""
        latest, missed = 0, 0
        while missed < MAX_MISSED_BEATS:
            try:
                if link.exchange(self._memory.has_failed) and self.worker is not None:
                    self.worker.fail_ranks()
            except ChannelClosed:
                os._exit(0)
            missed = missed + 1 if link.num_beats == latest else 0
            latest = link.num_beats
            time.sleep(BEAT_INTERVAL_S)
        log.critical("The first rank has given no sign of life.")
        os._exit(1)

    def _receive(self) -> None:
        """Read commands and send heartbeats; bitmasks overtake the step that waits for them."""
        while True:
            self._memory.beat()
            try:
                data = self._channel.receive(BEAT_INTERVAL_S)
            except ChannelClosed:
                os._exit(0)  # the other thread may be in the middle of a step
            if data is None:
                continue
            message = msgspec.msgpack.decode(data, type=RankMessage)
            if message.command == "send_bitmask":
                self._loaded.send_bitmask(*_decode(message))
            else:
                self._commands.put(message)

    @property
    def _loaded(self) -> Worker:
        if self.worker is None:
            raise RuntimeError("There is no worker yet.")
        return self.worker

    def _cast(self, command: str, body: tuple[Any, ...]) -> None:
        try:
            getattr(self, command)(*body)
        except Exception as error:  # reported at the next reset, by the step's number
            log.exception("%s failed", command)
            if self._expert_memory is not None and not isinstance(error, RankError):
                # No reset follows, see `MultiprocExecutor.resume`. The first rank must notice that
                # one of its own is the cause, not an engine that shares experts with it.
                os._exit(1)
            if body and isinstance(body[0], StepPlan):
                self._failed_steps.append(body[0].step)
            elif command == "finish":
                self._failed_steps.append(body[0])
            self._loaded.fail_ranks()

    def start(self, settings: dict[str, Any]) -> None:
        self.worker = Worker(
            EngineConfig(**settings), self._memory, self._stage_sockets, self._expert_memory
        )

    def load(self) -> None:
        self._loaded.load(lambda done, total: None)

    def set_capacity(self, capacity: Capacity) -> None:
        self._loaded.set_capacity(capacity)

    def allocate_cache(self) -> None:
        self._loaded.allocate_cache()

    def on_serving(self) -> None:
        self._loaded.on_serving()

    def execute(self, plan: StepPlan) -> None:
        self._loaded.execute(plan)

    def launch(self, plan: StepPlan) -> None:
        """Run a step that the first rank runs in a thread; after a failure it's only prepared."""
        inputs = self._loaded.prepare(plan)
        if self._failed_steps:
            self._failed_steps.append(plan.step)
            return
        launched = self._loaded.launch(plan, inputs)
        if self._loaded.stage is None:
            launched.finish()
        else:
            self._launched[plan.step] = launched

    def finish(self, step: int) -> None:
        """Finish a launched step of several stages: sample its tokens."""
        if (launched := self._launched.pop(step, None)) is not None:
            launched.finish()

    def apply_plan(self, plan: StepPlan) -> None:
        self._loaded.prepare(plan)

    def attach(self, tensor: PackedTensor) -> None:
        values = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32)
        self._loaded.attach(values.view(-1, tensor.columns))

    def attach_media(self, data: bytes) -> None:
        self._loaded.attach(decode_tensors(data))

    def propose(self, plan: HeadPlan) -> None:
        self._loaded.drafts.propose(plan)

    def join_forward(self) -> None:
        self._loaded.join_forward()

    def detach(self, handle: int) -> None:
        self._loaded.detach(handle)

    def stage_adapter(self, adapter: StagedAdapter) -> None:
        self._staged[adapter.number] = self._loaded.adapters.stage(adapter.ref)

    def publish_adapter(self, number: int) -> None:
        self._loaded.adapters.publish(self._staged.pop(number))

    def discard_adapter(self, number: int) -> None:
        self._staged.pop(number, None)

    def unload_adapter(self, digest: str) -> None:
        self._loaded.adapters.unload(digest)

    def drop_host_copy(self, digest: str) -> None:
        self._loaded.adapters.drop_host_copy(digest)

    def reset(self) -> RankReply:
        worker, failed = self._loaded, self._failed_steps
        self._failed_steps = []
        self._launched.clear()
        worker.reset()
        worker.reset_ranks()
        return RankReply(failed_steps=failed)

    def finish_reset(self) -> None:
        """Clear the failure on this machine, too: all ranks have been reset."""
        self._memory.set_failed(False)
        if self._loaded.ranks is not None:
            self._loaded.ranks.forget_failure()
        if self._beats is not None:
            self._beats.reset()

    def sleep(self, level: int) -> None:
        self._loaded.sleep(level)

    def wake_up(self, tags: list[str]) -> None:
        self._loaded.wake_up(tags)

    def collective_rpc(self, call: RemoteCall) -> RankReply:
        method = find_worker_method(call.method)
        return RankReply(result=method(self._loaded, *call.args, **call.kwargs))


def _decode(message: RankMessage) -> tuple[Any, ...]:
    """A command's arguments."""
    kind = (CALLS | CASTS)[message.command]
    return () if kind is None else (msgspec.msgpack.decode(message.body, type=kind),)


def main(argv: list[str]) -> None:
    """See the module."""
    run_rank(msgspec.json.decode(argv[0], type=RankArguments | JoinArguments))


def run_rank(arguments: RankArguments | JoinArguments) -> None:
    """Be a rank until the first one exits. Raises `EngineFault` if the ranks can't connect."""
    rank = arguments.state.rank
    logging.basicConfig(
        level=logging.WARNING, format=f"rank {rank} %(levelname)s %(name)s: %(message)s"
    )
    if isinstance(arguments, JoinArguments):
        arguments = arguments.join()
    try:
        RankProcess(arguments).run()
    except ChannelClosed:
        return


if __name__ == "__main__":
    main(sys.argv[1:])
