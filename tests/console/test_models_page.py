"""The pages of models: who sees what, and what an operator does there."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from django.test import Client
from django.utils import timezone

from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from catalog.replica_log import ReplicaLog
from engine.contract.replica_state import LoadPhase
from metering.models import SUM_FIELDS, RequestEntry, UsageDay
from tenants.models import AuditEntry, Membership, Tenant, User
from tests.console.beats import heartbeat
from tests.console.conftest import Beat, Login

DEMO = str(Path(__file__).resolve().parents[2] / "demo" / "model")


@pytest.fixture
def quill(rows: None) -> ServedModel:
    """Of the demo model's folder, so that something can be known of it."""
    model = ServedModel.objects.get(name="quill")
    model.source, model.managed = DEMO, True
    model.save()
    return model


def private(name: str = "acme-private") -> ServedModel:
    return ServedModel.objects.get(name=name)


def member(name: str, role: str) -> None:
    user = User.objects.create_user(name, f"{name}@example.org", "x")
    Membership.objects.create(user=user, tenant=Tenant.objects.get(slug="acme"), role=role)


def form(**more: Any) -> dict[str, Any]:
    baseline = {"source": DEMO, "num_replicas": "1", "num_spares": "0", "idle_minutes": "0"}
    baseline["num_prefill"] = baseline["num_encode"] = "0"
    return {**baseline, "public": "on", "managed": "on", **more}


@pytest.mark.parametrize("role", ["owner", "admin", "member", "viewer"])
def test_a_tenants_people_see_their_models_and_no_more(
    login: Login, quill: ServedModel, role: str
) -> None:
    if role != "owner":
        member(role, role)
    client = login("ada" if role == "owner" else role)
    text = client.get("/console/models/").content.decode()
    assert "acme-private" in text
    assert "rival-private" not in text
    assert DEMO not in text
    page = client.get(f"/console/models/{quill.pk}/")
    assert page.status_code == 200
    for hidden in (DEMO, "Drain and stop", "Replicas<", "need-title", "data-log-of"):
        assert hidden not in page.content.decode()
    assert client.get(f"/console/models/{private('rival-private').pk}/").status_code == 404
    assert client.get("/console/models/add/").status_code == 403
    assert client.get(f"/console/models/{quill.pk}/settings/").status_code == 403
    log = client.get(f"/console/api/replica-log?model={quill.pk}&replica=quill-0")
    assert log.status_code == 403
    assert "detail" not in client.get(f"/console/api/model?model={quill.pk}").json()
    names = {model["name"] for model in client.get("/console/api/model-states").json()["models"]}
    assert names == {"quill", "acme-private", "shelved"}


def test_a_models_page_says_which_media_it_takes(
    login: Login, quill: ServedModel, beat: Beat
) -> None:
    def page() -> str:
        return login("ada").get(f"/console/models/{quill.pk}/").content.decode()

    beat(heartbeat("quill-0"))
    assert "takes " not in page()
    seeing = heartbeat("quill-0")
    seeing.model.sees, seeing.model.max_videos = True, 2
    beat(seeing)
    assert "<span>takes images, videos</span>" in page()


OPERATIONS = ("load", "unload", "sleep", "wake", "restart", "delete", "settings")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_operators_do_anything(login: Login, quill: ServedModel, operation: str) -> None:
    initial_served_model = ServedModel.objects.values().get(pk=quill.pk)
    assert login("ada").post(f"/console/models/{quill.pk}/{operation}/", form()).status_code == 403
    stranger = login("ada").post(
        f"/console/models/{private('rival-private').pk}/{operation}/", form()
    )
    assert stranger.status_code in (403, 404)
    assert login("nobody").post(f"/console/models/{private().pk}/{operation}/").status_code in (
        403,
        404,
    )
    assert ServedModel.objects.values().get(pk=quill.pk) == initial_served_model


def test_an_outsider_sees_a_sentence(login: Login) -> None:
    assert "No model yet" in login("nobody").get("/console/models/").content.decode()


def test_what_it_needs_is_worked_out_before_it_is_loaded(login: Login, quill: ServedModel) -> None:
    root = login("root")
    page = root.get(f"/console/models/{quill.pk}/?sequences=4&context=1000").content.decode()
    assert "LlamaForCausalLM" in page
    assert "KV cache of 4 sequences of 1,000 tokens" in page
    assert "It fits." in page
    invalid_text = root.get(f"/console/models/{quill.pk}/?sequences=none").content.decode()
    assert "sequences must be a whole number" in invalid_text


def test_a_model_is_looked_at_then_loaded(login: Login, rows: None) -> None:
    root = login("root")
    sent = form(name="tiny", aliases="small smaller", fallbacks=["quill"], idle_minutes="30")
    sent |= {"s.max_model_len": "512", "s.quantization": "int8"}
    looked = root.post("/console/models/add/", {**sent, "look": "1"})
    assert "About" not in looked.content.decode()
    assert "Required memory" in looked.content.decode()
    assert not ServedModel.objects.filter(name="tiny").exists()
    done = root.post("/console/models/add/", sent)
    served_model = ServedModel.objects.get(name="tiny")
    assert done["Location"] == f"/console/models/{served_model.pk}/"
    assert served_model.settings == {"max_model_len": 512, "quantization": "int8"}
    assert (served_model.aliases, served_model.fallbacks) == (["small", "smaller"], ["quill"])
    assert (served_model.idle_minutes, served_model.desired_state) == (30, DesiredState.LOADED)
    assert (
        AuditEntry.objects.get(action="model.load", target_id=served_model.pk).actor_label == "root"
    )
    again = root.post("/console/models/add/", sent)
    assert again.status_code == 400
    assert "A model with this name exists already" in again.content.decode()


def test_what_is_wrong_stands_at_its_field_and_what_was_typed_stays(
    login: Login, rows: None
) -> None:
    sent = form(name="bad name", source="/no/such/folder", num_replicas="x")
    sent |= {"s.block_size": "17", "s.hf_overrides.key": "a", "s.hf_overrides.value": "1"}
    page = login("root").post("/console/models/add/", sent)
    text = page.content.decode()
    assert page.status_code == 400
    assert "block_size must be one of" in text
    assert "Replicas must be a whole number up to 64." in text
    assert 'value="/no/such/folder"' in text
    sent |= {"num_replicas": "1", "s.block_size": "16"}
    assert "There is no folder" in login("root").post("/console/models/add/", sent).content.decode()
    sent["source"] = DEMO
    assert (
        "Letters, digits and" in login("root").post("/console/models/add/", sent).content.decode()
    )
    assert not ServedModel.objects.filter(name="bad name").exists()


def test_settings_are_changed_and_shared_at_once(login: Login, quill: ServedModel) -> None:
    root = login("root")
    acme = Tenant.objects.get(slug="acme")
    sent = form(tenants=[str(acme.pk)], **{"s.seed": "7"})
    del sent["public"]
    assert root.post(f"/console/models/{quill.pk}/settings/", sent).status_code == 302
    quill.refresh_from_db()
    assert quill.settings == {"seed": 7}
    assert not quill.public
    assert list(quill.tenants.all()) == [acme]
    actions = set(AuditEntry.objects.values_list("action", flat=True))
    assert {"model.update", "model.share"} <= actions


def test_a_fallback_must_be_another_model_and_stays_while_it_is_one(
    login: Login, quill: ServedModel
) -> None:
    root = login("root")
    shelved = ServedModel.objects.get(name="shelved")
    for fallbacks, expected_text in (
        (["nothing"], "not found."),
        (["quill"], "must be another model"),
    ):
        page = root.post(f"/console/models/{quill.pk}/settings/", form(fallbacks=fallbacks))
        assert expected_text in page.content.decode()
    root.post(f"/console/models/{quill.pk}/settings/", form(fallbacks=["shelved"]))
    refused = root.post(f"/console/models/{shelved.pk}/delete/")
    assert refused.status_code == 409
    assert "answers in the place of quill" in refused.content.decode()


def test_load_stop_and_delete(login: Login, quill: ServedModel) -> None:
    root = login("root")
    path = f"/console/models/{quill.pk}"
    assert "is loaded: unload it first" in root.post(f"{path}/delete/").content.decode()
    root.post(f"{path}/unload/")
    assert "drains" in root.get(f"{path}/").content.decode()
    root.post(f"{path}/load/")
    assert "is being loaded already" in root.post(f"{path}/load/").content.decode()
    root.post(f"{path}/unload/")
    assert root.post(f"{path}/delete/")["Location"] == "/console/models/"
    assert not ServedModel.objects.filter(pk=quill.pk).exists()


def test_a_load_is_told_in_phases_and_bytes(login: Login, quill: ServedModel, beat: Beat) -> None:
    phase = LoadPhase(phase="reading", done=50, total=200)
    beat(heartbeat("quill-0", state="loading", load_progress=0.2, loading=phase))
    payload = login("root").get(f"/console/api/model?model={quill.pk}").json()
    assert payload["state"] == "loading"
    (replica,) = payload["detail"]
    assert replica["phase"] == "Reading and converting weights"
    assert (replica["bytes_done"], replica["bytes_total"]) == (50, 200)


def test_why_a_replica_ended_is_told(login: Login, quill: ServedModel) -> None:
    Replica.objects.create(
        served_model=quill,
        replica_id="quill-1",
        state=ReplicaState.FAILED,
        detail="there isn't enough memory",
        last_exit="the replica was killed by SIGKILL",
        restarts=3,
    )
    page = login("root").get(f"/console/models/{quill.pk}/").content.decode()
    assert "there isn&#x27;t enough memory" in page
    assert "Restarted 3 times: the replica was killed by SIGKILL." in page
    assert "enough memory" in login("root").get("/console/models/").content.decode()
    assert "enough memory" not in login("ada").get("/console/models/").content.decode()


def test_the_log_goes_on_from_a_line(
    login: Login, quill: ServedModel, live_redis: str, key_prefix: str
) -> None:
    Replica.objects.create(served_model=quill, replica_id="quill-log")
    client: Any = redis.Redis.from_url(live_redis)
    log = ReplicaLog(client, key_prefix, "quill-log")
    log.write("one")
    log.write("<b>two</b>")
    root: Client = login("root")
    address = f"/console/api/replica-log?model={quill.pk}&replica=quill-log"
    first = root.get(address).json()["lines"]
    assert [line["text"] for line in first] == ["-- one", "-- <b>two</b>"]
    log.write("three")
    rest = root.get(f"{address}&after={first[-1]['id']}").json()["lines"]
    assert [line["text"] for line in rest] == ["-- three"]
    assert root.get(f"{address}&after=;DROP").status_code == 400
    other = ServedModel.objects.get(name="shelved")
    assert (
        root.get(f"/console/api/replica-log?model={other.pk}&replica=quill-log").status_code == 404
    )
    client.close()


def test_known_models_are_suggested_with_whether_they_fit(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catalog.sizing.available_memory", lambda: 5 << 30)
    page = login("root").get("/console/models/add/")
    fits = {suggestion.source: suggestion.fits for suggestion in page.context["suggestions"]}
    assert fits["Qwen/Qwen3-0.6B"]
    assert not fits["Qwen/Qwen3-8B"]
    link = "?source=Qwen%2FQwen3-0.6B&amp;name=qwen3-0.6b"
    assert link in page.content.decode()
    filled = login("root").get(f"/console/models/add/{html.unescape(link)}").content.decode()
    assert 'value="Qwen/Qwen3-0.6B"' in filled
    assert 'value="qwen3-0.6b"' in filled


def test_the_list_says_what_runs_how_fast_and_what_to_do(
    login: Login, quill: ServedModel, beat: Beat
) -> None:
    beat(heartbeat("quill-0"))
    used = {"tenant": Tenant.objects.get(slug="acme"), "model": "quill", "endpoint": "chat"}
    for number, status in enumerate((200, 200, 500)):
        RequestEntry.objects.create(
            request_id=f"r{number}",
            **used,
            status=status,
            started_at=timezone.now(),
            duration_ms=1120.0,
            ttft_ms=120.0,
            completion_tokens=31,
        )
    sums = dict.fromkeys(SUM_FIELDS, 3)
    UsageDay.objects.create(**used, **sums, start=datetime(2026, 3, 4, tzinfo=UTC))
    row = list_row(login("root"), quill)
    for text in ("ready", "1 of 1 replica<", ">3</a>", "1 failed", "120 <small>ms", "30.0 <small>"):
        assert text in row
    assert "2026-03-04" in row
    assert "?model=quill" in row
    assert "data-load hidden" in row
    assert "data-load" not in list_row(login("ada"), quill)
    # Rival's people see the model and neither Acme's requests nor when it used the model.
    rivals = list_row(login("olga"), quill)
    assert "2026-03-04" not in rivals
    assert "failed" not in rivals


def verdict(client: Client) -> str:
    """Text of the notice above the list."""
    page = client.get("/console/models/").content.decode()
    (notice,) = re.findall(r"data-verdict>(.*?)</ul>", page, re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", notice)).split())


def test_one_line_says_whether_all_models_serve_or_which_do_not_and_since_when(
    login: Login, quill: ServedModel, beat: Beat
) -> None:
    beat(heartbeat("quill-0", stats={"num_requests_running": 3, "num_requests_waiting": 2}))
    beat(heartbeat("acme-0", "acme-private", "loading"))
    seen = datetime(2036, 3, 4, 5, 6, 7, tzinfo=UTC)
    rival = private("rival-private")
    Replica.objects.create(
        served_model=rival, replica_id="rival-0", state=ReplicaState.FAILED, last_ready_at=seen
    )
    root = login("root")
    text = verdict(root)
    assert text.startswith("2 of 3 loaded models are not serving.")
    assert "rival-private: failed since 2036-03-04 05:06:07 UTC" in text
    assert f"{private().changed_at:%Y-%m-%d %H:%M:%S} UTC" in text  # never ready since its loading
    assert "3 running" in list_row(root, quill)
    assert "2 waiting" in list_row(root, quill)
    data = root.get("/console/api/model-states").json()
    assert (data["verdict"]["tone"], len(data["verdict"]["problems"])) == ("error", 2)
    # Others read of their own models alone.
    assert "1 of 2 loaded models is not serving." in verdict(login("ada"))
    assert verdict(login("olga")).startswith("1 of 2 loaded models is")
    beat(heartbeat("rival-0", "rival-private"))
    assert root.get("/console/api/model-states").json()["verdict"]["tone"] == "warning"
    beat(heartbeat("acme-0", "acme-private"))
    assert verdict(root) == "All 3 loaded models are serving."
    beat(heartbeat("acme-0", "acme-private", "sleeping"))
    assert verdict(root) == "All 2 loaded models are serving, 1 asleep."


def test_an_unloaded_model_has_its_facts_and_a_load_button(
    login: Login, quill: ServedModel
) -> None:
    quill.desired_state = DesiredState.UNLOADED
    quill.save()
    root = login("root")
    row = list_row(root, quill)
    assert "unloaded" in row
    assert "LlamaForCausalLM" in row
    assert re.search(r'data-label="Size">[\d.]+\xa0[KM]B', row)
    assert re.search(r'data-label="Context">[\d,]+ <small>tokens', row)
    assert 'data-label="Last used">never<' in row
    assert "data-chat hidden" in row
    action = f"/console/models/{quill.pk}/load/"
    assert f'action="{action}" data-load>' in row
    assert root.post(action).status_code == 302
    quill.refresh_from_db()
    assert quill.desired_state == DesiredState.LOADED


def test_a_speed_of_a_few_tokens_that_came_at_once_is_not_stated(
    login: Login, quill: ServedModel
) -> None:
    used = {"tenant": Tenant.objects.get(slug="acme"), "model": "quill", "endpoint": "chat"}
    times = {"started_at": timezone.now(), "duration_ms": 52.0, "ttft_ms": 50.0}
    RequestEntry.objects.create(
        request_id="short", **used, **times, status=200, completion_tokens=9
    )
    assert 'data-label="Output speed">–<' in list_row(login("ada"), quill)
    page = login("ada").get(f"/console/models/{quill.pk}/").content.decode()
    assert "<dt>Output speed, median</dt><dd>–</dd>" in page


def test_how_many_sequences_memory_has_room_for_stands_beside_how_many_run(
    login: Login, quill: ServedModel
) -> None:
    quill.settings = {"max_num_seqs": 7}
    quill.save()
    page = login("root").get(f"/console/models/{quill.pk}/?context=64").content.decode()
    assert re.search(r"room for [\d,]+ such sequences\. At most 7 run at a time", page)


def list_row(client: Client, model: ServedModel) -> str:
    page = client.get("/console/models/").content.decode()
    start = page.index(f'data-model="{model.name}"')
    return page[start : page.index("</tr>", start)]
