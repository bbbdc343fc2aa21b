"""Models by the management API: what the console's pages do, for programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.models import Replica, ServedModel
from tests.console.conftest import Beat, Login

DEMO = str(Path(__file__).resolve().parents[2] / "demo" / "model")


@pytest.fixture
def quill(rows: None) -> ServedModel:
    model = ServedModel.objects.get(name="quill")
    model.source = DEMO
    model.save()
    return model


def test_what_it_needs_its_replicas_and_their_logs(
    login: Login, quill: ServedModel, beat: Beat
) -> None:
    Replica.objects.create(served_model=quill, replica_id="q-0", last_exit="was killed")
    root = login("root")
    need = root.get(f"/api/models/{quill.pk}/need/?sequences=2&context=100").json()
    assert need["fits"] is True
    assert need["kv"] == 2 * 112 * need["kv_per_token"]  # whole blocks
    assert root.get(f"/api/models/{quill.pk}/need/?sequences=0").status_code == 400
    assert root.get(f"/api/models/{quill.pk}/download/").status_code == 404  # it's a folder
    (replica,) = root.get(f"/api/models/{quill.pk}/replicas/").json()
    assert (replica["id"], replica["last_exit"]) == ("q-0", "was killed")
    assert root.get(f"/api/models/{quill.pk}/log/?replica=q-0").json() == []
    assert root.get(f"/api/models/{quill.pk}/log/?replica=other").status_code == 404


def test_fallbacks_and_idle_minutes_are_set(login: Login, quill: ServedModel) -> None:
    path = f"/api/models/{quill.pk}/"
    body = {"fallbacks": ["shelved"], "idle_minutes": 15}
    saved = login("root").patch(path, body, content_type="application/json").json()
    assert (saved["fallbacks"], saved["idle_minutes"]) == (["shelved"], 15)
    invalid_response = login("root").patch(
        path, {"fallbacks": ["no"]}, content_type="application/json"
    )
    assert (invalid_response.status_code, invalid_response.json()["error"]["param"]) == (
        400,
        "fallbacks",
    )


def test_fault_79_of_two_changes_neither_happens_where_the_second_fails(
    login: Login, quill: ServedModel
) -> None:
    initial_idle_minutes = quill.idle_minutes
    body = {"idle_minutes": 15, "tenants": ["nowhere"]}
    path = f"/api/models/{quill.pk}/"
    refused = login("root").patch(path, body, content_type="application/json")
    assert refused.status_code in (400, 404)
    quill.refresh_from_db()
    assert quill.idle_minutes == initial_idle_minutes


def test_a_parser_that_nobody_knows_is_refused_before_a_model_is_loaded(
    login: Login, quill: ServedModel
) -> None:
    body = {"settings": {"reasoning_parser": "nobody"}}
    path = f"/api/models/{quill.pk}/"
    invalid_response = login("root").patch(path, body, content_type="application/json")
    assert (invalid_response.status_code, invalid_response.json()["error"]["param"]) == (
        400,
        "settings",
    )
    assert "minimax_m2" in invalid_response.json()["error"]["message"]


@pytest.mark.parametrize(
    "operation", ["sleep", "wake", "restart", "need", "download", "replicas", "log"]
)
def test_tenants_may_not(login: Login, quill: ServedModel, operation: str) -> None:
    path = f"/api/models/{quill.pk}/{operation}/"
    ada = login("ada")
    answer = (
        ada.get(path)
        if operation in ("need", "download", "replicas", "log")
        else ada.post(path, {}, "application/json")
    )
    assert answer.status_code == 403


def test_a_restart_names_its_replica(login: Login, quill: ServedModel) -> None:
    root = login("root")
    answer = root.post(f"/api/models/{quill.pk}/restart/", {"replica": "no"}, "application/json")
    assert answer.status_code == 404
    Replica.objects.create(served_model=quill, replica_id="q-0", state="loading")
    answer = root.post(f"/api/models/{quill.pk}/restart/", {"replica": "q-0"}, "application/json")
    assert answer.status_code == 409
