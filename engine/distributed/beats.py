"""Heartbeats of ranks. `BeatLink`: those, and failures, between the first one and one on another
machine.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from engine.distributed.channel import ChannelClosed

BEAT_INTERVAL_S = 0.1
#: Polls without a heartbeat after which a rank counts as frozen: it is noticed within 2 s.
MAX_MISSED_POLLS = 15
#: The same while it loads: a library that is being opened keeps Python from giving any.
MAX_MISSED_POLLS_LOADING = 100
#: A beat is one byte, 0 or that of a failed attempt.
_NUM_ATTEMPTS = 255


class MissedBeats:
    """Counts polls without a heartbeat of a rank.

    Polls are counted, not seconds: this process may have been suspended, too.
    """

    def __init__(self) -> None:
        self._latest = self._missed = 0

    def is_late(self, num_beats: int, max_missed: int = MAX_MISSED_POLLS) -> bool:
        """Poll. Returns whether `max_missed` had no new heartbeat; before the first one none has.

        `num_beats`: the rank's so far.
        """
        self._missed = 0 if num_beats != self._latest or not num_beats else self._missed + 1
        self._latest = num_beats
        return self._missed >= max_missed


class BeatLink:
    """One side of the link. Both send several heartbeats per second without waiting for the other.

    Attributes:
        num_beats: number of received ones.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._attempt = 0
        self.num_beats = 0

    @property
    def _failure(self) -> int:
        return self._attempt % _NUM_ATTEMPTS + 1

    def exchange(self, has_failed: bool) -> bool:
        """Send a heartbeat, and read the received ones. Returns whether the other side has also
        failed since the latest reset. Raises `ChannelClosed`.
        """
        try:
            with suppress(BlockingIOError):  # the receiver doesn't read: enough of them are queued
                self._socket.send(bytes([self._failure if has_failed else 0]))
            beats = b""
            with suppress(BlockingIOError):
                beats = self._socket.recv(4096)
                if not beats:
                    raise ChannelClosed("the other side has ended")
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        self.num_beats += len(beats)
        return self._failure in beats

    def reset(self) -> None:
        """Reset after a failure, as the other side does: earlier reports don't count."""
        self._attempt += 1

    def close(self) -> None:
        """Let the other side notice, which may wait for this one."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
