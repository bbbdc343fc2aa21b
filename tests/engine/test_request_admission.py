"""What must come before a request runs, one thing after the other."""

from __future__ import annotations

from engine.contract.errors import InvalidRequest, QuireError
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.request_admission import RequestAdmission
from engine.scheduler.request import Request, Sequence, SequenceStatus


class Counter:
    """A prerequisite that lets requests wait, or refuses them, as it's told."""

    def __init__(self) -> None:
        self.waits = self.refuses = False
        self.line: list[Request] = []
        self.timeouts: list[float] = []

    @property
    def num_waiting(self) -> int:
        return len(self.line)

    @property
    def has_pending(self) -> bool:
        return bool(self.line)

    def admit(self, request: Request) -> bool:
        if self.refuses:
            raise InvalidRequest("No.", param="prompt")
        if self.waits:
            self.line.append(request)
        return not self.waits

    def poll_ready(self, timeout_s: float) -> list[tuple[Request, QuireError | None]]:
        self.timeouts.append(timeout_s)
        ready, self.line = self.line, []
        return [(request, None) for request in ready]


def make_request() -> Request:
    message = EngineRequest(
        request_id="a", gateway_id="", prompt_token_ids=[1], sampling=SamplingParams()
    )
    request = Request(message)
    request.sequences = [Sequence(0, request, 0, [1], 1, 4, 0)]
    return request


def test_a_request_passes_one_prerequisite_after_the_other() -> None:
    first, second = Counter(), Counter()
    entrance, request = RequestAdmission(first, second), make_request()
    assert entrance.admit(request)
    first.waits = second.waits = True
    assert not entrance.admit(request)
    assert (first.num_waiting, second.num_waiting) == (1, 0)
    first.waits = False
    # It goes on to the second, whose own turn comes in the same call, and nobody is told twice.
    assert list(entrance.poll_ready(lambda: False)) == [(request, None)]
    assert (entrance.num_waiting, entrance.has_pending) == (0, False)


def test_it_waits_for_one_only_while_there_is_nothing_else_to_do() -> None:
    first, second = Counter(), Counter()
    entrance = RequestAdmission(first, second)
    first.line, second.line = [make_request()], [make_request()]
    idle = [True]
    for _ in entrance.poll_ready(lambda: idle[0]):
        idle[0] = False  # the first request runs now
    assert first.timeouts[0] > 0
    assert second.timeouts == [0.0]


def test_a_later_refusal_leaves_a_request_outside() -> None:
    first, second = Counter(), Counter()
    entrance, request = RequestAdmission(first, second), make_request()
    first.waits = second.refuses = True
    assert not entrance.admit(request)
    ((refused, error),) = entrance.poll_ready(lambda: True)
    assert refused is request
    assert isinstance(error, InvalidRequest)
    assert request.sequences[0].status is SequenceStatus.WAITING_FOR_ADMISSION
