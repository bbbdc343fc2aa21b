"""`RequestAdmission`: requests wait here for what must come before the scheduler may know of
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine.contract.errors import EnginePaused, QuireError
from engine.scheduler.request import Request, SequenceStatus

# -- `PauseMode`: how an engine stands still, for whoever lets requests in and runs its steps.


class PauseMode:
    """Whether an engine is paused, and how: one of `PAUSE_MODES`, or "" while it isn't.

    `refusal` is what a request is told that may not come in.
    """

    def __init__(self, refusal: str) -> None:
        self._mode, self._refusal = "", refusal

    def __bool__(self) -> bool:
        """Whether it is paused at all."""
        return bool(self._mode)

    @property
    def is_frozen(self) -> bool:
        """Whether not even a step may run."""
        return self._mode == "keep"

    def check_accepts_requests(self) -> None:
        """Raise `EnginePaused` unless a new request may come in."""
        if self._mode in ("abort", "wait"):
            raise EnginePaused(self._refusal)


#: How long a step waits for what must come first when there is nothing else to do.
WAIT_S = 0.01


class AdmissionGate(Protocol):
    """Something that has to be there before a request runs: an adapter, a grammar."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for it."""

    @property
    def has_pending(self) -> bool:
        """Whether `poll_ready` may bring something."""

    def admit(self, request: Request) -> bool:
        """Take a request in; False when it must wait: its sequences are `WAITING_FOR_ADMISSION`
        then.

        Raises `QuireError` where it can't be served.
        """

    def poll_ready(self, timeout_s: float) -> list[tuple[Request, QuireError | None]]:
        """Requests that needn't wait for it any more, and why those that can't be served can't.

        Waits up to `timeout_s` for the first.
        """


class RequestAdmission:
    """Leads requests past one prerequisite after the other, in their order."""

    def __init__(self, *prerequisites: AdmissionGate) -> None:
        self._prerequisites = prerequisites

    @property
    def num_waiting(self) -> int:
        """Requests that haven't come to the scheduler yet."""
        return sum(prerequisite.num_waiting for prerequisite in self._prerequisites)

    @property
    def has_pending(self) -> bool:
        """Whether `poll_ready` may bring something."""
        return any(prerequisite.has_pending for prerequisite in self._prerequisites)

    def admit(self, request: Request) -> bool:
        """Whether a new request has to wait for nothing. Raises as `AdmissionGate.admit`."""
        return _pass_gates(request, self._prerequisites)

    def poll_ready(self, idle: Callable[[], bool]) -> Iterator[tuple[Request, QuireError | None]]:
        """Requests that have to wait for nothing any more, and why others can't be served.

        `idle`: whether there is nothing else to do; then it waits a little for the first.
        """
        for index, prerequisite in enumerate(self._prerequisites):
            if not prerequisite.has_pending:
                continue
            for request, error in prerequisite.poll_ready(WAIT_S if idle() else 0.0):
                try:
                    if error is not None or _pass_gates(request, self._prerequisites[index + 1 :]):
                        yield request, error
                except QuireError as refusal:
                    _reject(request)
                    yield request, refusal


def _pass_gates(request: Request, prerequisites: Sequence[AdmissionGate]) -> bool:
    return all(prerequisite.admit(request) for prerequisite in prerequisites)


def _reject(request: Request) -> None:
    """The scheduler doesn't get to know a request's sequences after all."""
    for sequence in request.sequences:
        if not sequence.finished:
            sequence.status = SequenceStatus.WAITING_FOR_ADMISSION
