"""`manage.py status`: what an operator looks at first."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from catalog.models import Replica, ServedModel
from tests.console.beats import heartbeat
from tests.console.conftest import Beat

pytestmark = [pytest.mark.django_db]


def status() -> str:
    out = StringIO()
    call_command("status", stdout=out)
    return out.getvalue()


@pytest.fixture
def quill(live_redis: str) -> ServedModel:
    return ServedModel.objects.create(name="quill", source="/models/q", desired_state="loaded")


def test_all_is_well_and_says_what_runs(quill: ServedModel, beat: Beat) -> None:
    beat(heartbeat("r1", stats={"num_requests_running": 3, "kv_cache_usage_perc": 0.25}))
    lines = status().splitlines()
    assert lines[0].startswith("Redis ")
    assert lines[1] == "0 usage records wait to be written."
    assert lines[-1].split()[:7] == ["quill", "ready", "r1", "3", "0", "25%", "4096"]


def test_json_has_the_same_for_programs(quill: ServedModel, beat: Beat) -> None:
    beat(heartbeat("r1", stats={"num_requests_running": 3}))
    out = StringIO()
    call_command("status", "--json", stdout=out)
    report = json.loads(out.getvalue())
    assert report["pending_usage_records"] == 0
    (model,) = report["models"]
    assert (model["name"], model["state"]) == ("quill", "ready")
    assert [(replica["id"], replica["running"]) for replica in model["replicas"]] == [("r1", 3)]


def test_watching_prints_again_until_it_is_interrupted(
    quill: ServedModel, beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(heartbeat("r1"))
    pauses = iter((None, None))

    def sleep(seconds: float) -> None:
        assert seconds == 5
        if next(pauses, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    out = StringIO()
    call_command("status", "--watch", "5", stdout=out)
    assert out.getvalue().count("quill") == 3


def test_watching_prints_json_line_by_line(
    quill: ServedModel, beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(heartbeat("r1"))
    pauses = iter((None, None))

    def sleep(seconds: float) -> None:
        if next(pauses, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    out = StringIO()
    call_command("status", "--json", "--watch", stdout=out)
    assert [json.loads(line)["models"][0]["name"] for line in out.getvalue().splitlines()] == [
        "quill"
    ] * 3


def test_states_have_colours_on_a_terminal_alone(quill: ServedModel, beat: Beat) -> None:
    beat(heartbeat("r1"))
    out = StringIO()
    call_command("status", stdout=out, force_color=True)
    assert "\x1b[32;1mready" in out.getvalue()
    assert "\x1b" not in status()


@pytest.mark.parametrize("interval", ["nan", "inf", "0", "-1", "1e300", "soon"])
def test_an_interval_that_is_no_time_is_refused(interval: str) -> None:
    with pytest.raises(CommandError, match=r"--watch.*must be 0\.2 to 86400 seconds"):
        call_command("status", "--watch", interval)


def test_a_model_without_a_replica_ends_it_with_one(quill: ServedModel, beat: Beat) -> None:
    other = ServedModel.objects.create(name="other", source="/m", desired_state="loaded")
    Replica.objects.create(served_model=other, replica_id="r2", state="failed")
    beat(heartbeat("r1"))
    with pytest.raises(CommandError, match=r"These can't answer now: other\."):
        status()


def test_a_replica_that_stands_still_is_told(
    quill: ServedModel, beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = heartbeat("r1")
    beat(heartbeat("r2", progress_at=sound.at - 100, detail="the step takes long"))
    with pytest.raises(CommandError, match="quill"):
        status()
    assert "r2: the step takes long" in capsys.readouterr().err
    beat(sound)  # one that can be asked is enough
    assert "stalled" in status()


def test_nothing_loaded_is_said(live_redis: str) -> None:
    with pytest.raises(CommandError, match="No model is loaded"):
        status()


def test_without_redis_it_says_where_it_looked(quill: ServedModel, settings: Any) -> None:
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    with pytest.raises(CommandError, match=r"unix:///nowhere/redis.sock can't be used: .*\. Does"):
        status()
