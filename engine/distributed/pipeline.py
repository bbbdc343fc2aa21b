"""`PipelineStage`: some layers of a model in one process, and its connections to other stages.

A stage gives the residual to the next one. The last one gives logits to all others, so that every
rank chooses the same tokens by itself.
"""

from __future__ import annotations

import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.channel import ChannelClosed
from engine.distributed.memory import RankMemory
from kernels.errors import RankError, RankTimeout

#: A stage may wait for a long prompt's layers in the stage before it.
RECEIVE_TIMEOUT_S = 300.0
#: Maximum time between two parts of a message.
_STALL_TIMEOUT_S = 10.0
#: Between looks at the failure flag.
_POLL_MS = 50
#: Attempt, rows, columns.
_HEADER = struct.Struct("<QQQ")


class TensorConnection:
    """Sends float32 matrices to one rank, or receives them from it, in order.

    What was sent before a reset is dropped by a receiver that has been reset as well.
    """

    def __init__(self, connection: socket.socket, memory: RankMemory, rank: int) -> None:
        """`rank`: on the other side."""
        self._socket, self._memory, self._rank = connection, memory, rank
        self._attempt = 0
        self._queue: queue.SimpleQueue[tuple[bytes, Tensor] | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, matrix: Tensor) -> None:
        """Send float32 [rows, columns], contiguous, which must stay as it is. Doesn't wait: two
        stages that sent to each other would wait for each other.
        """
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, name="stage", daemon=True)
            self._sender.start()
        self._queue.put((_HEADER.pack(self._attempt, *matrix.shape), matrix))

    def _send_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            header, matrix = entry
            try:
                self._socket.sendall(header)
                if matrix.numel():
                    self._socket.sendall(matrix.numpy().data.cast("B"))
            except OSError:
                return  # the other side has ended, which the first rank notices

    def receive(self, rows: int, columns: int, timeout_s: float = RECEIVE_TIMEOUT_S) -> Tensor:
        """The next matrix, float32 [rows, columns].

        Raises `RankError` where a rank has failed, and `RankTimeout`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            while not self._poll.poll(_POLL_MS):
                if self._memory.has_failed:
                    raise RankError("Another rank has failed.")
                if time.monotonic() > deadline:
                    message = f"Rank {self._rank} sent nothing for {timeout_s:g} s."
                    raise RankTimeout(self._rank, message)
            header = bytearray(_HEADER.size)
            self._fill(memoryview(header))
            attempt, num_rows, num_columns = _HEADER.unpack(header)
            matrix = torch.empty((num_rows, num_columns))
            if matrix.numel():
                self._fill(matrix.numpy().data.cast("B"))
            if attempt != self._attempt:
                continue
            if (num_rows, num_columns) != (rows, columns):
                raise RuntimeError(
                    f"Rank {self._rank} sent [{num_rows}, {num_columns}], not [{rows}, {columns}]."
                )
            return matrix

    def _fill(self, buffer: memoryview) -> None:
        """Read what is on its way, whether or not a rank has failed. Raises `ChannelClosed` where
        nothing more comes.
        """
        while buffer:
            if not self._poll.poll(_STALL_TIMEOUT_S * 1000):
                raise ChannelClosed(f"rank {self._rank} stopped in the middle of a matrix")
            count = self._socket.recv_into(buffer)
            if not count:
                raise ChannelClosed(f"rank {self._rank} has ended")
            buffer = buffer[count:]

    def reset(self) -> None:
        """Drop what was sent until now."""
        self._attempt += 1

    def close(self) -> None:
        """End the thread that sends, whose references would outlive the engine."""
        self._queue.put(None)
        with suppress(OSError):  # the other side has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._sender is not None:
            self._sender.join()
        self._socket.close()


@dataclass(frozen=True, slots=True)
class StageSockets:
    """Descriptors of a rank's connections: to the stage before and the one after it, to the rank
    that computes logits, or from it to all that take them, and to the other ranks of its stage, in
    their order, where some are on another machine.
    """

    previous: int | None = None
    next: int | None = None
    logits: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()

    @property
    def descriptors(self) -> list[int]:
        ends = (self.previous, self.next, *self.logits, *self.tensors)
        return [descriptor for descriptor in ends if descriptor is not None]


class PipelineStage:
    """Attributes:
    index, size: 0 <= index < size, the number of stages.
    partition: number of layers of each stage; (): as many each.
    """

    def __init__(
        self, memory: RankMemory, sockets: StageSockets, partition: Sequence[int] = ()
    ) -> None:
        state = memory.state
        self.index, self.size = state.stage, state.pipeline_parallel_size
        self.partition = tuple(partition)

        def connect(descriptor: int | None, rank: int) -> TensorConnection | None:
            if descriptor is None:
                return None
            return TensorConnection(socket.socket(fileno=descriptor), memory, rank)

        self._previous = connect(sockets.previous, state.rank_of(self.index - 1))
        self._next = connect(sockets.next, state.rank_of(self.index + 1))
        logits_rank = state.logits_rank
        ranks = range(logits_rank) if self.is_last else [logits_rank]
        self._logits = [
            TensorConnection(socket.socket(fileno=descriptor), memory, rank)
            for descriptor, rank in zip(sockets.logits, ranks, strict=bool(sockets.logits))
        ]

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the output layer."""
        return self.index == self.size - 1

    def send_hidden(self, hidden: Tensor) -> None:
        """Give the next stage the residual behind this one's layers, float32 [T, hidden]."""
        if self._next is None:
            raise RuntimeError("There is no stage after this one.")
        self._next.send(hidden)

    def receive_hidden(self, num_tokens: int, width: int) -> Tensor:
        """The residual before this stage's layers, float32 [T, width]. Raises `RankError`."""
        if self._previous is None:
            raise RuntimeError("There is no stage before this one.")
        return self._previous.receive(num_tokens, width)

    def send_logits(self, logits: Tensor) -> None:
        """Give all ranks of other stages the logits, float32 [R, vocabulary]."""
        if self._logits:
            copy = logits.clone()  # sampling changes them
            for connection in self._logits:
                connection.send(copy)

    def receive_logits(self, num_rows: int, vocab_size: int) -> Tensor:
        """The logits, float32 [R, vocabulary]. Raises `RankError`."""
        (connection,) = self._logits
        return connection.receive(num_rows, vocab_size)

    def reset(self) -> None:
        """Reset after a failure, as all ranks do."""
        for connection in self._connections:
            connection.reset()

    def close(self) -> None:
        """Close all connections; nothing is sent or received any more."""
        for connection in self._connections:
            connection.close()

    @property
    def _connections(self) -> list[TensorConnection]:
        ends = (self._previous, self._next, *self._logits)
        return [connection for connection in ends if connection is not None]
