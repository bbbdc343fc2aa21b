"""How `manage.py gateway` begins, and in which order it ends its processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from django.core.management import call_command
from pydantic import SecretStr

from config.management.commands import gateway
from config.management.commands.gateway import serve
from config.up import processes
from config.up.processes import Gateways, listen
from tenants import api_keys
from tenants.actions import create_tenant
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey


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


@pytest.mark.django_db
def test_keys_of_the_environment_work_where_no_flag_gives_some(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tenant(actor=SYSTEM_ACTOR, name="Acme")
    key = "sk-of-the-environment-alone"
    settings.QUIRE = settings.QUIRE.replace(api_keys=[SecretStr(key)])
    for name in ("check_redis", "serve"):
        monkeypatch.setattr(gateway, name, lambda *arguments: None)
    call_command("gateway", port=0)
    assert ApiKey.objects.get(public_id=api_keys.lookup_id(key)).digest == api_keys.hash_key(key)


ENDS_LATE = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).write_text("settled")
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[2]).touch()
signal.pause()
"""


def test_a_gateway_may_settle_what_it_aborts_at_the_end_of_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SETTLE_S", 60.0)  # a busy machine takes a while
    gateways = Gateways(listen("127.0.0.1", 0), 1, {})
    settled, running = tmp_path / "settled", tmp_path / "running"
    gateways._command = [sys.executable, "-c", ENDS_LATE, str(settled), str(running)]
    gateways.tick()
    deadline = time.monotonic() + 60
    while not running.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    gateways.stop(grace=0.1)
    assert settled.read_text() == "settled"
