"""Home at a glance, the usage page's chart and the forecast of budgets."""

from __future__ import annotations

import html
import os
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from console.views import home as machine
from console.views.billing import _forecast_percent
from console.views.usage_chart import MAX_SERIES, OTHER_GROUPS, usage_chart
from history.models import Alert
from metering import actions as money
from metering.access import UsageTotals
from metering.budgets import BudgetState
from metering.models import Budget
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, Tenant, User
from tests.console.conftest import Login
from tests.console.test_ledger_pages import use
from tests.console.test_requests import TRACE, make

pytestmark = pytest.mark.usefixtures("rows")
DAY = date(2026, 3, 1)


def home(login: Login, name: str, **query: str) -> Any:
    return login(name).get("/console/", query)


def test_home_says_that_all_is_well_or_what_is_not_and_since_when(login: Login) -> None:
    assert "All is well." in home(login, "root").content.decode()
    alert = Alert.objects.create(rule="disk", subject="/", text="The disk is full.")
    page = home(login, "root")
    assert "All is well." not in page.content.decode()
    (problem,) = page.context["problems"]
    assert (problem.text, problem.since) == ("The disk is full.", alert.started_at)
    assert "All is well." in home(login, "ada").content.decode()  # no business of a tenant's


def test_home_tells_a_tenant_of_failed_requests_and_spent_budgets(login: Login) -> None:
    for number in range(20):
        make(f"chatcmpl-{number}", "acme", TRACE, status=500 if number < 2 else 200)
    acme = Tenant.objects.get(slug="acme")
    money.set_budget(actor=SYSTEM_ACTOR, tenant=acme, period="day", tokens=0)
    texts = [problem.text for problem in home(login, "ada").context["problems"]]
    assert texts[0] == "10 % of the last 20 requests failed"
    assert texts[1].startswith("100 % of a budget is spent")
    assert not home(login, "olga").context["problems"]


def test_first_steps_are_ticked_off_and_then_go(login: Login) -> None:
    def steps() -> dict[str, bool]:
        return {step.title: step.is_done for step in home(login, "olga").context["steps"]}

    assert set(steps().values()) == {False}
    rival = Tenant.objects.get(slug="rival")
    actions.create_key(actor=SYSTEM_ACTOR, tenant=rival, name="one")
    make("chatcmpl-rival", "rival", TRACE, status=200)
    assert [title for title, done in steps().items() if not done] == ["Invite the first member"]
    outsider = User.objects.get(username="nobody")
    actions.add_member(actor=SYSTEM_ACTOR, tenant=rival, user=outsider, role=Role.VIEWER)
    assert steps() == {}


def test_the_slowest_requests_are_the_readers(login: Login) -> None:
    make("chatcmpl-slow", "acme", TRACE, status=200, duration_ms=9000.0)
    make("chatcmpl-fast", "acme", TRACE, status=200, duration_ms=10.0)
    make("chatcmpl-rival", "rival", TRACE, status=200, duration_ms=99_000.0)
    slowest = home(login, "ada").context["slowest"]
    assert [entry.request_id for entry in slowest] == ["chatcmpl-slow", "chatcmpl-fast"]


def test_usage_leads_from_a_model_to_its_keys_and_back(login: Login) -> None:
    ada, acme = login("ada"), Tenant.objects.get(slug="acme")
    key = actions.create_key(actor=SYSTEM_ACTOR, tenant=acme, name="website").key
    use(acme, 1, key_id=key.pk, model="quill")
    use(acme, 2, model="other")
    rows = ada.get("/console/usage/", {"tenant": "acme"}).context["rows"]
    (quill,) = (row for row in rows if row.names == ("quill",))
    page = ada.get(f"/console/usage/?{quill.query}")
    assert [chip["label"] for chip in page.context["chips"]] == ["Model: quill"]
    (row,) = page.context["rows"]
    assert row.names == (f"website ({key.public_id})",)
    page = ada.get(f"/console/usage/?{row.query}")
    labels = [chip["label"] for chip in page.context["chips"]]
    assert labels == ["Model: quill", f"Key: website ({key.public_id})"]
    (day,) = re.findall(r'<ol class="usage-columns">.*<a href="([^"]+)"', page.content.decode())
    of_day = ada.get(f"/console/usage/{html.unescape(day)}").context["chips"]
    assert [chip["label"] for chip in of_day] == labels
    rest = ada.get(f"/console/usage/?{page.context['chips'][0]['query']}").context["chips"]
    assert [chip["label"] for chip in rest] == labels[1:]


def totals(day: int, tokens: int, cost_nanos: int = 0) -> UsageTotals:
    start = datetime(2026, 3, 1, tzinfo=UTC) + timedelta(days=day)
    return UsageTotals(start, {}, 1, tokens, 0, 0, cost_nanos=cost_nanos)


def test_the_chart_stacks_groups_by_day_and_adds_up_the_smallest() -> None:
    sums = [totals(0, 100), totals(2, 50), *(totals(2, 10 - n) for n in range(MAX_SERIES))]
    names = ["large", "large", *(f"small {n}" for n in range(MAX_SERIES))]
    chart = usage_chart(sums, names, DAY, DAY + timedelta(days=3))
    assert chart is not None
    assert [len(column.segments) for column in chart.columns] == [1, 0, MAX_SERIES + 1, 0]
    assert (chart.unit, chart.top) == ("tokens", "100 tokens")
    assert chart.columns[0].segments[0].height == "100.00"
    assert [name for _, name, _ in chart.series][-1] == OTHER_GROUPS
    assert [text for _, _, text in chart.series][::6] == ["150 tokens", "5 tokens"]


def test_a_group_that_is_called_others_is_not_mixed_up_with_the_smallest() -> None:
    names = [OTHER_GROUPS, *(f"small {n}" for n in range(MAX_SERIES))]
    sums = [totals(0, 100), *(totals(0, 10 - n) for n in range(MAX_SERIES))]
    chart = usage_chart(sums, names, DAY, DAY)
    assert chart is not None
    assert [text for _, _, text in chart.series][::MAX_SERIES] == ["100 tokens", "5 tokens"]
    assert len(chart.columns[0].segments) == MAX_SERIES + 1


def test_the_chart_shows_costs_where_there_are_some_and_nothing_without_usage() -> None:
    chart = usage_chart([totals(0, 5, 2 * 10**9)], ["m"], DAY, DAY)
    assert chart is not None
    assert (chart.unit, chart.top) == ("cost", "2.00 USD")
    assert usage_chart([totals(0, 0)], ["m"], DAY, DAY) is None


@pytest.mark.parametrize(("day", "percent"), [(2, None), (5, 100.0), (10, 50.0), (20, 25.0)])
def test_a_forecast_goes_on_at_the_pace_so_far(day: int, percent: float | None) -> None:
    start = datetime(2026, 3, 1, tzinfo=UTC)
    end = start + timedelta(days=20)
    state = BudgetState(Budget(tokens=100), start, end, 25, 0, 0, 0)
    now = start + timedelta(days=day) - (timedelta(seconds=1) if percent is None else timedelta(0))
    assert _forecast_percent(state, now) == percent


def test_temperatures_and_gpus_are_shown_where_there_are_some(
    login: Login, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.hottest_sensor_c(tmp_path) is None
    for number, text in enumerate(("41000", "67500", "broken")):
        sensor = tmp_path / "hwmon" / f"hwmon{number}" / "temp1_input"
        sensor.parent.mkdir(parents=True)
        sensor.write_text(text)
    assert machine.hottest_sensor_c(tmp_path) == 67.5
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 48, 1024, 143771'\necho 'Old, [N/A], 0, 1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(machine, "SENSORS", tmp_path)
    machine.cache.delete("console:gpus")
    try:
        for page in ("/console/", "/console/nodes/"):
            text = login("root").get(page).content.decode()
            assert "68 <small>°C" in text
            assert "NVIDIA H200" in text
            assert ", 48 °C" in text
        assert [gpu.temperature_c for gpu in machine.list_gpus()] == [48.0, None]
    finally:
        machine.cache.delete("console:gpus")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine.list_gpus() == []
