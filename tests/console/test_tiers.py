"""`manage.py list_tiers`."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import call_command

from tests.console.beats import heartbeat
from tests.console.conftest import Beat


def test_tiers_of_running_replicas_are_listed(
    beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = {
        "kv_tier_bytes": {"host": 3 << 20, "disk": 1 << 30},
        "kv_tier_capacity_bytes": {"host": 8 << 20, "disk": 4 << 30},
        "num_requests_swapped": 2,
        "external_prefix_cache_hits_total": 64,
        "kv_tier_failures_total": {"authentication": 3},
    }
    beat(heartbeat("r1", stats=stats))
    beat(heartbeat("r2"))
    out = StringIO()
    call_command("list_tiers", stdout=out)
    head, disk, host = out.getvalue().splitlines()
    assert head.split()[:3] == ["MODEL", "REPLICA", "TIER"]
    assert disk.split()[1:] == ["r1", "disk", "1", "GiB", "4", "GiB", "2", "64"]
    assert host.split()[1:] == ["r1", "host", "3", "MiB", "8", "MiB", "2", "64"]
    assert capsys.readouterr().err == "r1: 3 blocks not used or saved: authentication\n"
