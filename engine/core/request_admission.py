"""`RequestAdmission`: requests wait here for their prerequisites before they are scheduled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from engine.contract.errors import EnginePaused, QuireError
from engine.scheduler.request import Request, SequenceStatus

# -- `PauseMode`: whether the engine admits requests and runs steps while paused.


class PauseMode:
    """Whether an engine is paused, and how: one of `PAUSE_MODES`, or "" while it isn't.

    `refusal` is the error message for requests that aren't admitted.
    """

    def __init__(self, refusal: str) -> None:
        self._mode, self._refusal = "", refusal

    def __bool__(self) -> bool:
        return bool(self._mode)

    @property
    def is_frozen(self) -> bool:
        """Whether steps are stopped, too."""
        return self._mode == "keep"

    def check_accepts_requests(self) -> None:
        """Raise `EnginePaused` unless new requests are admitted."""
        if self._mode in ("abort", "wait"):
            raise EnginePaused(self._refusal)


#: How long a step waits for prerequisites when there is nothing else to do.
WAIT_S = 0.01


class AdmissionGate(Protocol):
    """A prerequisite of requests: an adapter, a grammar."""

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for it."""

    @property
    def has_pending(self) -> bool:
        """Whether `poll_ready` may return something."""

    @property
    def is_preparing(self) -> bool:
        """Whether a request's wait ends without a further step: something is being loaded."""

    def admit(self, request: Request) -> bool:
        """Admit a request; False if it must wait: its sequences are `WAITING_FOR_ADMISSION` then.

        Raises `QuireError` if it can't be served.
        """

    def poll_ready(self, timeout_s: float) -> list[tuple[Request, QuireError | None]]:
        """Requests whose wait is over, each with its error if it can't be served.

        Waits up to `timeout_s` for the first.
        """


class RequestAdmission:
    """Passes requests through one gate after the other, in order.

    `waits_for_all`: whatever is being prepared is waited for, and requests pass in the order of
    their arrival, so that who goes first doesn't depend on time.
    """

    def __init__(self, *prerequisites: AdmissionGate, waits_for_all: bool = False) -> None:
        self._prerequisites, self._waits_for_all = prerequisites, waits_for_all

    @property
    def num_waiting(self) -> int:
        """Number of requests that haven't reached the scheduler yet."""
        return sum(prerequisite.num_waiting for prerequisite in self._prerequisites)

    @property
    def has_pending(self) -> bool:
        """Whether `poll_ready` may return something."""
        return any(prerequisite.has_pending for prerequisite in self._prerequisites)

    def admit(self, request: Request) -> bool:
        """Whether a new request needn't wait at all. Raises as `AdmissionGate.admit`."""
        return _pass_gates(request, self._prerequisites)

    def poll_ready(self, idle: Callable[[], bool]) -> Iterable[tuple[Request, QuireError | None]]:
        """Requests that have passed all gates, and the errors of those that can't be served.

        `idle`: tells whether there is nothing else to do; then it waits a little for the first.
        """
        if not self._waits_for_all:
            return self._poll(idle)
        ready = list(self._poll(lambda: True))
        while any(prerequisite.is_preparing for prerequisite in self._prerequisites):
            ready += self._poll(lambda: True)
        return sorted(ready, key=lambda entry: entry[0].sequences[0].seq_id)

    def _poll(self, idle: Callable[[], bool]) -> Iterator[tuple[Request, QuireError | None]]:
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
    """Withdraw a request whose sequences never reached the scheduler."""
    for sequence in request.sequences:
        if not sequence.finished:
            sequence.status = SequenceStatus.WAITING_FOR_ADMISSION
