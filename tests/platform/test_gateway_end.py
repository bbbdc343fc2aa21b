"""In which order `manage.py gateway` ends its processes."""

from __future__ import annotations

import os
import signal
from typing import Any, cast

import pytest

from config.management.commands.gateway import serve
from config.up.processes import Gateways


class RecordedGateways:
    """Sends itself signals at the first look, and notes what it's told."""

    is_crash_looping = False

    def __init__(self, *signals: int) -> None:
        self._signals, self.calls = list(signals), list[str]()

    def tick(self) -> None:
        while self._signals:
            os.kill(os.getpid(), self._signals.pop(0))

    def begin_draining(self) -> None:
        self.calls.append("drain")

    def stop(self, grace: float) -> None:
        self.calls.append(f"stop {grace}")

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.mark.parametrize(
    ("signals", "delay", "calls"),
    [
        ([signal.SIGTERM], 0.01, ["drain", "stop 3"]),
        ([signal.SIGINT], 3600, ["stop 3"]),
        ([signal.SIGTERM, signal.SIGTERM], 3600, ["kill", "stop 3"]),
    ],
)
def test_load_balancers_get_time_after_sigterm_and_a_person_waits_for_nothing(
    signals: list[int], delay: float, calls: list[str]
) -> None:
    gateways: Any = RecordedGateways(*signals)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        serve(cast(Gateways, gateways), delay, 3)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert gateways.calls == calls
