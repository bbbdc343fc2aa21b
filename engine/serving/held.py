"""Saying before each step whose requests it holds, should it be the last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.contract.step_record import StepRecorder
from engine.scheduler import Request, Sequence


class HeldRequests:
    """What the engine is at: the steps under way, adapters that are read, a request that comes in.

    A request that merely waits, for its turn or for room, isn't held.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        #: Of the list that was written last; None: it wasn't of a step.
        self._sequences: list[Sequence] | None = None

    @property
    def ids(self) -> list[str]:
        """The requests, in no order."""
        return self._recorder.held

    def begin_step(self, under_way: list[Sequence], reading: Iterable[Request]) -> None:
        """A step begins: sequences of all that are under way, requests whose adapter is read."""
        ids = [request.request_id for request in reading]
        # Decodes are the same from step to step, mostly.
        if not ids and under_way == self._sequences:
            return
        self._recorder.write([*dict.fromkeys(ids), *_unlike(ids, under_way)])
        self._sequences = None if ids else under_way

    def take_in(self, request_id: str, under_way: list[Sequence]) -> None:
        """A request comes in, beside the steps under way."""
        self._recorder.write([request_id, *_unlike([request_id], under_way)])
        self._sequences = None


def _unlike(ids: list[str], sequences: list[Sequence]) -> Iterator[str]:
    """The sequences' requests, each once, without those."""
    known = set(ids)
    for sequence in sequences:
        request_id = sequence.request.message.request_id
        if request_id not in known:
            known.add(request_id)
            yield request_id
