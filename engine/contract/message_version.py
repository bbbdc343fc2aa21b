"""The version of messages between gateways and replicas. Torch-free.

A release is compatible with those of the previous and the next version, in both directions, so that
gateways and replicas can be replaced one after the other:

- A new field has a default, which isn't sent. Unknown fields are ignored.
- Sampling parameters, which change a result, are never ignored: a replica that doesn't know one
  refuses the request with an error.
- Changes that the other side must know about raise the version.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine.contract.errors import EngineFault
from engine.contract.messages import decoded
from engine.contract.sampling_params import MAX_N

#: Messages without a version have version 1, the first.
MESSAGE_VERSION = 1


def is_compatible(version: int) -> bool:
    """Whether this release supports messages of a version: at most one more or less than its
    own.
    """
    return abs(version - MESSAGE_VERSION) <= 1


_OutputCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_N)]


class _NumOutputs(msgspec.Struct):
    """The sampling parameters that determine how many outputs end."""

    n: _OutputCount = 1
    best_of: _OutputCount | None = None


class UnreadableRequest(msgspec.Struct, kw_only=True):
    """The readable part of an `EngineRequest` of another release that can't be decoded. Never sent.

    Attributes:
        problem: why it can't be decoded.
    """

    request_id: str
    gateway_id: str
    sampling: _NumOutputs = msgspec.field(default_factory=_NumOutputs)
    message_version: int = 1
    problem: str = ""

    @property
    def error(self) -> EngineFault:
        """The error for its client."""
        return EngineFault(
            f"The replica can't read this request: {self.problem}. The gateway writes messages of "
            f"version {self.message_version}, the replica reads those of version "
            f"{MESSAGE_VERSION}: update the older one.",
            code="unreadable_request",
        )

    @property
    def num_sequences(self) -> int:
        """Number of outputs that the gateway waits for."""
        return self.sampling.best_of or self.sampling.n


_unreadable_decoder = msgspec.msgpack.Decoder(UnreadableRequest)


def decode_unreadable_request(data: bytes, problem: str) -> UnreadableRequest:
    """The sender of a message that `decode_inbox` refuses. Raises as `decode_inbox` if none
    waits.
    """
    request = decoded(_unreadable_decoder, data)
    request.problem = problem
    return request
