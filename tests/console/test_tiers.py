"""KV tiers of running replicas: `manage.py list_tiers` and the model's page."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from catalog.models import ServedModel
from tenants.models import AuditEntry
from tests.console.beats import heartbeat
from tests.console.conftest import Beat, Login

STATS: dict[str, Any] = {
    "kv_tier_bytes": {"host": 3 << 20, "disk": 1 << 30},
    "kv_tier_capacity_bytes": {"host": 8 << 20, "disk": 4 << 30},
    "num_requests_swapped": 2,
    "kv_tier_hit_tokens_total": {"disk": 6400},
    "kv_tier_evicted_tokens_total": {"disk": 3200},
    "kv_tier_saved_seconds_total": {"disk": 2.54},
    "kv_tier_failures_total": {"authentication": 3},
}


def test_tiers_of_running_replicas_are_listed(
    beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    beat(heartbeat("r1", stats=STATS))
    beat(heartbeat("r2"))
    out = StringIO()
    call_command("list_tiers", stdout=out)
    head, disk, host = out.getvalue().splitlines()
    assert head.split()[:3] == ["MODEL", "REPLICA", "TIER"]
    assert disk.split()[1:] == ["r1", "disk", "1", "GiB", "4", "GiB", "2", "6400", "3200", "2.5"]
    assert host.split()[1:] == ["r1", "host", "3", "MiB", "8", "MiB", "2", "0", "0", "0.0"]
    assert capsys.readouterr().err == "r1: 3 blocks not used or saved: authentication\n"


@pytest.mark.usefixtures("rows")
def test_the_blocks_of_a_folder_are_verified_and_dropped(tmp_path: Path) -> None:
    (tmp_path / "damaged.kv").write_bytes(bytes(range(200)))
    ServedModel.objects.create(
        name="tiered", source="org/model", settings={"kv_offloading_backend": str(tmp_path)}
    )
    with pytest.raises(CommandError, match=r"1 blocks, .*; can't be used: 1 header\."):
        call_command("verify_tier", "tiered")
    out = StringIO()
    call_command("drop_tier", "tiered", stdout=out)
    assert out.getvalue() == "Deleted: 200 B.\n"
    assert not list(tmp_path.iterdir())
    assert AuditEntry.objects.get(action="model.drop_tier").target_label == "tiered"


@pytest.mark.usefixtures("rows")
def test_a_tier_in_replicas_memory_has_nothing_to_be_verified() -> None:
    ServedModel.objects.create(name="untiered", source="org/model")
    for command in ("verify_tier", "drop_tier"):
        with pytest.raises(CommandError, match="has no kv_offloading_backend"):
            call_command(command, "untiered")


def test_operators_see_a_models_tiers_and_what_they_saved(beat: Beat, login: Login) -> None:
    model = ServedModel.objects.create(name="tiered", source="org/model")
    beat(heartbeat("r1", model=model.name, stats=STATS))
    page = login("root").get(f"/console/models/{model.pk}/").content.decode()
    assert "KV tiers" in page
    assert "6,400" in page
    assert "3,200" in page
    assert "2.5" in page
    assert "KV tiers" not in login("ada").get(f"/console/models/{model.pk}/").content.decode()
