"""TLS of the gateways that a command starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from config.up.processes import use_tls
from tests.platform.instance import certificate


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TLS", "off")


def test_a_certificate_makes_cookies_secure(tmp_path: Path) -> None:
    use_tls(*certificate(tmp_path))
    assert os.environ["QUIRE_TLS"] == "direct"


def test_without_one_nothing_changes() -> None:
    use_tls(None, None)
    assert os.environ["QUIRE_TLS"] == "off"


@pytest.mark.parametrize("command", ["gateway", "up"])
def test_both_files_are_needed(command: str) -> None:
    with pytest.raises(CommandError, match="go together"):
        call_command(command, ssl_certfile="cert.pem", port=0)


def test_files_that_do_not_fit_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    cert, key = certificate(tmp_path)[0], certificate(tmp_path / "other")[1]
    for files in ((cert, key), (str(tmp_path / "missing"), key), (key, cert)):
        with pytest.raises(CommandError, match="can't be used"):
            call_command("gateway", ssl_certfile=files[0], ssl_keyfile=files[1], port=0)
