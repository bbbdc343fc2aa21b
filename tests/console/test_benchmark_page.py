"""Benchmarks on a model's page and by REST: started, drawn beside earlier ones, stopped."""

from __future__ import annotations

from typing import Any

import pytest

from catalog.models import DesiredState, ServedModel
from console.views.benchmark_chart import draw
from history.models import BenchmarkRun
from tests.console.conftest import Login

FORM = {"levels": "1, 4", "input_tokens": "16", "output_tokens": "8", "num_requests": "4"}
pytestmark = pytest.mark.usefixtures("rows")


@pytest.fixture
def quill(rows: None) -> ServedModel:
    ServedModel.objects.filter(name="quill").update(desired_state=DesiredState.LOADED)
    return ServedModel.objects.get(name="quill")


def figures(concurrency: int, rate: float, seconds: float) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "output_tok_s": rate,
        "requests_s": rate / 8,
        "ttft_p50_ms": 12.0,
        "ttft_p99_ms": 20.0,
        "itl_p50_ms": 3.0,
        "e2e_p50_ms": seconds * 1000,
        "completed": 4,
        "failed": 0,
        "errors": [],
    }


def finished_run(
    model: ServedModel, name: str, *results: dict[str, Any], **fields: Any
) -> BenchmarkRun:
    return BenchmarkRun.objects.create(
        public_id=name,
        served_model=model,
        levels=[row["concurrency"] for row in results],
        input_tokens=16,
        output_tokens=8,
        num_requests=4,
        results=list(results),
        created_by="root",
        **{"status": "completed", **fields},
    )


def test_an_operator_starts_and_stops_a_benchmark(login: Login, quill: ServedModel) -> None:
    root, page = login("root"), f"/console/models/{quill.pk}/"
    assert "Requests in flight" in root.get(page).content.decode()
    text = root.post(f"{page}benchmark/", FORM, follow=True).content.decode()
    assert "A benchmark of quill is starting." in text
    assert "0 of 2 levels are done" in text
    (run,) = BenchmarkRun.objects.all()
    progress = root.get("/console/api/model", {"model": quill.pk}).json()["benchmark"]
    assert progress == f"{run.public_id} queued 0"
    again = root.post(f"{page}benchmark/", FORM)
    assert (again.status_code, again.context["error"].status) == (409, 409)
    root.post(f"{page}benchmark/stop/", {"benchmark": run.public_id})
    run.refresh_from_db()
    assert run.status == "stopped"
    assert root.get("/console/api/model", {"model": quill.pk}).json()["benchmark"] == ""
    invalid_response = root.post(f"{page}benchmark/", {**FORM, "levels": "1;4"})
    assert (invalid_response.status_code, invalid_response.context["error"].param) == (
        400,
        "levels",
    )


def test_runs_are_compared_in_one_chart(login: Login, quill: ServedModel) -> None:
    finished_run(quill, "bench-1", figures(1, 40.0, 0.2), figures(4, 110.0, 0.3))
    finished_run(quill, "bench-2", figures(1, 50.0, 0.16), figures(4, 180.0, 0.18))
    finished_run(quill, "bench-3", status="failed", error="No replica.")
    response = login("root").get(f"/console/models/{quill.pk}/")
    chart, text = response.context["benchmark_chart"], response.content.decode()
    assert [curve.run.public_id for curve in chart.curves] == ["bench-2", "bench-1"]
    assert chart.y_ticks[-1].label == "200"
    assert chart.x_ticks[-1].label == "0.3"
    assert text.count("<polyline") == 2
    assert "4 in flight: 180.0 tok/s, median latency 0.18 s" in text
    assert "No replica." in text
    assert "<polyline" not in login("ada").get(f"/console/models/{quill.pk}/").content.decode()


def test_points_lie_within_the_axes(quill: ServedModel) -> None:
    run = finished_run(quill, "bench-1", figures(1, 0.013, 12.5), figures(8, 9_999.0, 0.004))
    chart = draw([run])
    assert chart is not None
    for point in chart.curves[0].points:
        assert 60 <= float(point.x) <= 620
        assert 16 <= float(point.y) <= 256
    assert 2 <= len(chart.x_ticks) <= 6
    assert 2 <= len(chart.y_ticks) <= 6
    assert draw([]) is None


def test_the_same_by_the_api(login: Login, quill: ServedModel) -> None:
    root, json, path = login("root"), "application/json", f"/api/models/{quill.pk}/benchmarks/"
    body = {"levels": [1, 4], "input_tokens": 16, "output_tokens": 8, "num_requests": 4}
    created = root.post(path, body, content_type=json)
    assert (created.status_code, created.json()["status"]) == (201, "queued")
    assert root.post(path, body, content_type=json).status_code == 409
    name = created.json()["id"]
    stopped = root.post(f"{path}stop/", {"benchmark": name}, content_type=json)
    assert stopped.json()["status"] == "stopped"
    assert [row["id"] for row in root.get(path).json()] == [name]
    invalid_response = root.post(path, {**body, "levels": []}, content_type=json)
    assert (invalid_response.status_code, invalid_response.json()["error"]["param"]) == (
        400,
        "levels",
    )
    for client in (login("ada"), login("nobody")):
        assert client.get(path).status_code in (403, 404)
        assert client.post(path, body, content_type=json).status_code in (403, 404)
