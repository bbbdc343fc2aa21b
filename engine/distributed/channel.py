"""`Channel`: messages between the first rank and another one, over a socket.

A frame is its length in four bytes and a `RankMessage` in MessagePack.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import msgspec

from engine.contract.errors import (
    ConfigError,
    EngineFault,
    InvalidRequest,
    ModelLoadError,
    QuireError,
)

_LENGTH = struct.Struct("<I")
_ERRORS: dict[str, type[QuireError]] = {
    error.__name__: error for error in (ConfigError, EngineFault, InvalidRequest, ModelLoadError)
}


class RankMessage(msgspec.Struct, array_like=True):
    """A command; its name determines its type."""

    command: str
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class RankReply(msgspec.Struct, array_like=True):
    """A rank's reply to a command.

    Attributes:
        error: error message; "": it succeeded.
        kind: the error's class, if the first rank should raise the same.
        param: of the error.
        failed_steps: steps that failed since the latest reset.
        result: of a remote procedure call.
    """

    error: str = ""
    kind: str = ""
    param: str | None = None
    failed_steps: list[int] = []
    result: Any = None

    @classmethod
    def from_error(cls, error: Exception) -> RankReply:
        """The reply of a command that raised."""
        if isinstance(error, QuireError):
            return cls(error.message, type(error).__name__, error.param)
        return cls(f"{type(error).__name__}: {error}")

    def to_error(self, rank: int) -> QuireError:
        """The error to raise in the first rank."""
        kind = _ERRORS.get(self.kind, EngineFault)
        return kind(f"Rank {rank}: {self.error}", param=self.param)


class ChannelClosed(ConnectionError):
    """The other side has exited."""


class Channel:
    """One side of a channel. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        # A timeout of the socket would also apply to `send` in another thread.
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._received = bytearray()

    def send(self, frame: bytes) -> None:
        """Send the result of `encode_message`, `encode_reply` or `encode_frame`. Raises
        `ChannelClosed`.
        """
        try:
            with self._lock:
                self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; None if it hasn't arrived in time. Raises `ChannelClosed`."""
        while True:
            if len(self._received) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
                if len(self._received) >= end:
                    message = bytes(self._received[_LENGTH.size : end])
                    del self._received[:end]
                    return message
            if not self._poll.poll(timeout_s * 1000):
                return None
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the other side has ended")
            self._received += data

    def shutdown(self) -> None:
        """End all waits here, in any thread, for a side that may never answer."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, which notifies the other side."""
        self._socket.close()


def encode_message(command: str, body: Any = None) -> bytes:
    """The frame of a command."""
    return encode_frame(RankMessage(command, msgspec.Raw(msgspec.msgpack.encode(body))))


def encode_reply(reply: RankReply) -> bytes:
    """The frame of a reply."""
    return encode_frame(reply)


def encode_frame(message: msgspec.Struct) -> bytes:
    """The frame of a message of any class."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data
