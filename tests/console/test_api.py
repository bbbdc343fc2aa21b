"""What the console's JSON tells whom."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import redis
from django.test import Client
from django.utils import timezone

from catalog.live_status import ORDER
from catalog.models import Replica, ReplicaState, ServedModel
from catalog.replica_log import ReplicaLog
from engine.contract.messages import STALL_TIMEOUT_S
from metering.ledger import insert_records
from metering.usage_record import UsageRecord
from tenants.actions import add_member
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Membership, Role, Tenant, User
from tests.console.beats import heartbeat
from tests.console.conftest import Beat, Login

ENDPOINTS = ["/console/api/models", "/console/api/overview", "/console/api/usage"]


def models(client: Client) -> dict[str, dict[str, Any]]:
    return {model["id"]: model for model in client.get("/console/api/models").json()["models"]}


def overview(client: Client) -> dict[str, Any]:
    response = client.get("/console/api/overview")
    assert response.status_code == 200, response.content
    return response.json()


def names(rows: list[dict[str, Any]]) -> set[str]:
    return {row["id"] for row in rows}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_nobody_gets_401_in_the_envelope(db: None, client: Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "not_logged_in"


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_json_is_read_only_and_not_cached(login: Login, path: str) -> None:
    client = login("ada")
    assert client.post(path).status_code == 405
    assert "no-store" in client.get(path)["Cache-Control"]


@pytest.mark.usefixtures("committed")
def test_the_playground_lists_loaded_models_of_the_users_tenant(login: Login) -> None:
    assert set(models(login("ada"))) == {"quill", "acme-private"}
    assert set(models(login("olga"))) == {"quill", "rival-private"}


@pytest.mark.usefixtures("committed")
def test_the_playground_offers_no_model_that_only_embeds(login: Login, beat: Beat) -> None:
    beat(heartbeat("r1", "quill", tasks=["embed", "token_embed"]))
    ids = [model["id"] for model in login("ada").get("/console/api/models").json()["models"]]
    assert ids == ["acme-private"]
    listed = login("ada").get("/console/api/overview").json()["models"]
    assert "quill" in [model["id"] for model in listed]


@pytest.mark.usefixtures("committed")
def test_a_user_without_a_tenant_sees_no_models(login: Login) -> None:
    response = login("nobody").get("/console/api/models")
    assert response.json() == {
        "models": [],
        "mcp_servers": [],
        "tenant": None,
        "tenants": [],
        "view_only": False,
    }


@pytest.mark.usefixtures("committed")
def test_the_playground_knows_who_may_only_look(login: Login) -> None:
    assert login("ada").get("/console/api/models").json()["view_only"] is False
    Membership.objects.filter(user__username="ada").update(role=Role.VIEWER)
    assert login("ada").get("/console/api/models").json()["view_only"] is True


@pytest.mark.usefixtures("committed")
def test_the_playground_lists_the_models_of_the_tenant_that_is_named(login: Login) -> None:
    client = login("ada")
    ada, rival = User.objects.get(username="ada"), Tenant.objects.get(slug="rival")
    add_member(actor=SYSTEM_ACTOR, tenant=rival, user=ada, role=Role.MEMBER)

    def listed(query: str) -> tuple[str, set[str]]:
        payload = client.get(f"/console/api/models{query}").json()
        assert payload["tenants"] == [
            {"id": "acme", "name": "Acme"},
            {"id": "rival", "name": "Rival"},
        ]
        return payload["tenant"], names(payload["models"])

    assert listed("") == ("acme", {"quill", "acme-private"})
    assert listed("?tenant=rival") == ("rival", {"quill", "rival-private"})
    assert listed("?tenant=nowhere") == ("acme", {"quill", "acme-private"})


@pytest.mark.usefixtures("committed")
def test_a_tenant_that_is_not_the_users_is_not_taken(login: Login) -> None:
    payload = login("olga").get("/console/api/models?tenant=acme").json()
    assert payload["tenant"] == "rival"
    assert payload["tenants"] == [{"id": "rival", "name": "Rival"}]
    everything = login("root").get("/console/api/models?tenant=rival").json()
    assert (everything["tenant"], len(everything["tenants"])) == ("rival", 2)


def test_an_outsider_sees_neither_foreign_models_nor_their_replicas(
    login: Login, beat: Beat
) -> None:
    beat(heartbeat("q-0", "quill"))
    beat(heartbeat("a-0", "acme-private"))
    beat(heartbeat("r-0", "rival-private"))
    seen = overview(login("olga"))
    assert names(seen["models"]) == {"quill", "rival-private", "shelved"}
    assert names(seen["replicas"]) == {"q-0", "r-0"}
    assert "acme" not in str(seen)


def test_an_operator_sees_everything(login: Login, beat: Beat) -> None:
    beat(heartbeat("a-0", "acme-private"))
    beat(heartbeat("r-0", "rival-private"))
    beat(heartbeat("x-0", "no-row-of-this-name"))
    seen = overview(login("root"))
    assert names(seen["models"]) == {"quill", "acme-private", "rival-private", "shelved"}
    assert names(seen["replicas"]) == {"a-0", "r-0", "x-0"}


def test_where_a_replica_runs_is_for_operators(login: Login, beat: Beat) -> None:
    beat(heartbeat("q-0", "quill", host="gpu-7", pid=4711, detail="out of memory on gpu-7"))
    mine = overview(login("ada"))["replicas"][0]
    assert not {"host", "pid", "detail"} & mine.keys()
    theirs = overview(login("root"))["replicas"][0]
    assert (theirs["host"], theirs["pid"]) == ("gpu-7", 4711)


def test_a_user_without_a_tenant_sees_an_empty_overview(login: Login, beat: Beat) -> None:
    beat(heartbeat("q-0", "quill"))
    seen = overview(login("nobody"))
    assert (seen["models"], seen["replicas"]) == ([], [])


def test_load_is_told_as_the_heartbeat_has_it(login: Login, beat: Beat) -> None:
    stats = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "num_blocks": 400,
        "num_free_blocks": 300,
        "generation_tokens_total": 1234,
    }
    beat(heartbeat("q-0", stats=stats))
    replica = overview(login("ada"))["replicas"][0]
    assert (replica["running"], replica["waiting"], replica["kv_usage"]) == (3, 2, 0.25)
    assert replica["num_blocks"] == 400
    assert replica["generation_tokens"] == 1234


@pytest.mark.usefixtures("committed")
def test_fault_50_what_a_shared_cache_holds_and_finds_is_for_operators(
    login: Login, beat: Beat
) -> None:
    stats = {
        "num_cached_blocks": 7, "prefix_cache_hits_total": 160, "spec_decode_num_drafts_total": 4,
        "spec_decode_num_draft_tokens_total": 9, "spec_decode_num_accepted_tokens_total": 5,
    }  # fmt: skip
    beat(heartbeat("q-0", stats=stats))
    fields = {"num_free_blocks", "num_cached_blocks", "prefix_hits", "prefix_queries"}
    fields |= {"drafts", "draft_tokens", "accepted_tokens"}
    assert not fields & overview(login("ada"))["replicas"][0].keys()
    seen = overview(login("root"))["replicas"][0]
    assert fields <= seen.keys()
    assert (seen["drafts"], seen["draft_tokens"], seen["accepted_tokens"]) == (4, 9, 5)
    pools = {who: login(who).get("/console/api/history").json()["pools"] for who in ("ada", "root")}
    assert "active_blocks" in pools["ada"]
    assert "cached_blocks" not in pools["ada"]
    assert "cached_blocks" in pools["root"]


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize("state", ["ready", "loading", "draining", "failed"])
def test_a_model_is_as_its_replica_is(login: Login, beat: Beat, state: str) -> None:
    beat(heartbeat("q-0", state=state, load_progress=0.4))
    model = models(login("ada"))["quill"]
    assert model["state"] == state
    assert model["replicas"] == 1
    assert model["max_model_len"] == 4096


@pytest.mark.usefixtures("committed")
def test_a_model_is_as_its_best_replica(login: Login, beat: Beat) -> None:
    for index, state in enumerate(("failed", "ready", "loading")):
        beat(heartbeat(f"q-{index}", state=state))
    assert models(login("ada"))["quill"]["state"] == "ready"


@pytest.mark.usefixtures("committed")
def test_a_replica_that_beats_but_does_not_move_is_stalled(login: Login, beat: Beat) -> None:
    now = time.time()
    beat(heartbeat("q-0", at=now, progress_at=now - STALL_TIMEOUT_S - 1))
    assert models(login("ada"))["quill"]["state"] == "stalled"


@pytest.mark.usefixtures("committed")
def test_models_say_how_many_pictures_they_take(login: Login, beat: Beat) -> None:
    seeing = heartbeat("p-0", "acme-private")
    beat(msgspec.structs.replace(seeing, model=msgspec.structs.replace(seeing.model, sees=True)))
    beat(heartbeat("q-0"))
    models_by_name = models(login("ada"))
    assert (
        models_by_name["quill"]["max_images"],
        models_by_name["acme-private"]["max_images"],
    ) == (0, 64)


@pytest.mark.usefixtures("committed")
def test_a_model_without_a_replica_is_offline(login: Login) -> None:
    assert models(login("ada"))["quill"] == {
        "id": "quill",
        "parent": "",
        "state": "offline",
        "load_progress": 0.0,
        "replicas": 0,
        "context": None,
        "tasks": None,
        "max_images": None,
        "max_model_len": None,
    }


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ReplicaState.PENDING, "loading"),
        (ReplicaState.FAILED, "failed"),
        (ReplicaState.STOPPED, "offline"),
        (ReplicaState.READY, "offline"),  # its heartbeat is gone: it's no longer what the row says
    ],
)
def test_rows_speak_for_replicas_without_a_heartbeat(
    login: Login, row: ReplicaState, expected: str
) -> None:
    quill = ServedModel.objects.get(name="quill")
    Replica.objects.create(served_model=quill, replica_id="q-0", state=row)
    assert models(login("ada"))["quill"]["state"] == expected


def test_an_unknown_state_counts_as_a_failure(login: Login, beat: Beat) -> None:
    beat(heartbeat("q-0", state="dancing"))
    state = overview(login("ada"))["replicas"][0]["state"]
    assert state == "failed"
    assert state in ORDER


def test_a_heartbeat_that_cannot_be_read_hides_no_other(
    login: Login, beat: Beat, live_redis: str, key_prefix: str
) -> None:
    import redis

    beat(heartbeat("good"))
    client: Any = redis.Redis.from_url(live_redis)
    client.sadd(f"{key_prefix}:replicas", "bad")
    client.set(f"{key_prefix}:replica:bad", b"\xc1 not msgpack", px=60_000)
    assert names(overview(login("root"))["replicas"]) == {"good"}


def test_without_redis_the_answer_is_503_in_the_envelope(login: Login, settings: Any) -> None:
    client = login("ada")
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    response = client.get("/console/api/overview")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "service_unavailable"


def use(tenant: str, model: str, *, number: int, tokens: int) -> None:
    record = UsageRecord(
        request_id=f"{tenant}-{model}-{number}",
        tenant_id=Tenant.objects.get(slug=tenant).pk,
        endpoint="chat.completions",
        model=model,
        prompt_tokens=tokens,
        cached_tokens=tokens // 2,
        completion_tokens=10,
        status=200,
        started_at=timezone.now(),
        duration_ms=5.0,
    )
    insert_records([record])


def test_usage_is_summed_by_tenant_and_model_for_its_members_alone(login: Login) -> None:
    use("acme", "quill", number=1, tokens=100)
    use("acme", "quill", number=2, tokens=50)
    use("rival", "quill", number=1, tokens=7)
    payload = login("ada").get("/console/api/usage").json()
    assert len(payload["days"]) == 14
    (row,) = payload["rows"]
    assert (row["tenant"], row["model"], row["requests"]) == ("acme", "quill", 2)
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (150, 75, 20)
    assert row["by_day"] == [0] * 13 + [170]
    *initial, today = payload["daily"]
    assert [set(day.values()) for day in initial] == [{0}] * 13
    assert today == {name: row[name] for name in today}


def test_operators_see_the_usage_of_all_tenants_most_tokens_first(login: Login) -> None:
    use("acme", "quill", number=1, tokens=5)
    use("rival", "quill", number=1, tokens=700)
    rows = login("root").get("/console/api/usage").json()["rows"]
    assert [row["tenant"] for row in rows] == ["rival", "acme"]


def test_a_user_without_a_tenant_has_no_usage(login: Login) -> None:
    use("acme", "quill", number=1, tokens=5)
    assert login("nobody").get("/console/api/usage").json()["rows"] == []


def test_failures_come_with_the_end_of_their_logs_for_operators_alone(
    login: Login, beat: Beat, live_redis: str, key_prefix: str
) -> None:
    beat(heartbeat("quill-sick", state="failed", detail="out of memory"))
    model = ServedModel.objects.get(name="quill")
    Replica.objects.create(
        served_model=model, replica_id="quill-dead", state="failed", detail="killed by a signal"
    )
    client: Any = redis.Redis.from_url(live_redis)
    log = ReplicaLog(client, key_prefix, "quill-dead")
    for number in range(30):
        log.write(f"line {number}")
    log.flush()
    failures = login("root").get("/console/api/overview").json()["failures"]
    assert {failure["id"]: failure["detail"] for failure in failures} == {
        "quill-sick": "out of memory",
        "quill-dead": "killed by a signal",
    }
    (dead,) = [failure for failure in failures if failure["id"] == "quill-dead"]
    assert dead["log"].splitlines()[-1].endswith("line 29")
    assert len(dead["log"].splitlines()) == 20
    assert "failures" not in login("ada").get("/console/api/overview").json()
    client.close()
