"""The overview page, fed by heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from playwright.sync_api import expect

from catalog.replica_log import ReplicaLog
from engine.contract.messages import Heartbeat
from tests.console.beats import heartbeat
from tests.console.browser.conftest import Open, expect_no_overflow

Beat = Callable[[Heartbeat], None]


def loaded(replica_id: str, tokens: int, timestamp: float, **stats: float) -> Heartbeat:
    figures = {
        "num_requests_running": 3,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.5,
        "num_blocks": 1000,
        "num_free_blocks": 500,
        "num_cached_blocks": 200,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 64,
        "generation_tokens_total": tokens,
    }
    return heartbeat(replica_id, at=timestamp, host="node-1", pid=7, stats=figures | stats)


def test_load_is_live(open_page: Open, beat: Beat) -> None:
    start = time.time()
    beat(loaded("quill-live", 1000, start))
    page = open_page("/console/", "root")
    card = page.get_by_role("article", name="Replica quill-live")
    expect(card).to_contain_text("ready")
    expect(card).to_contain_text("50 % of 1,000 blocks in use")
    expect(card).to_contain_text("64 %")
    meter = card.get_by_role("meter", name="KV cache in use")
    expect(meter).to_have_attribute("aria-valuenow", "50")
    beat(loaded("quill-live", 1240, start + 2, num_requests_running=9, kv_cache_usage_perc=0.75))
    expect(card).to_contain_text("120")  # 240 tokens in 2 s
    expect(meter).to_have_attribute("aria-valuenow", "75")
    models = page.get_by_role("region", name="Models")
    row = models.get_by_role("row").filter(has_text="quill").first
    expect(row).to_contain_text("9")


def test_drafts_are_shown_where_there_are_any(open_page: Open, beat: Beat) -> None:
    start = time.time()
    beat(loaded("quill-drafts", 1000, start))
    page = open_page("/console/", "root")
    card = page.get_by_role("article", name="Replica quill-drafts")
    expect(card).to_contain_text("prefix hits")
    expect(card.get_by_text("drafts accepted")).to_be_hidden()
    drafts = {"num_drafts": 40, "num_draft_tokens": 75, "num_accepted_tokens": 60}
    allocated_values = {f"spec_decode_{name}_total": value for name, value in drafts.items()}
    beat(loaded("quill-drafts", 1240, start + 2, **allocated_values))
    expect(card.get_by_text("drafts accepted")).to_be_visible()
    expect(card).to_contain_text("80 %")
    expect(card).to_contain_text("2.5 tokens a step with drafts")


def test_a_restarted_replica_starts_its_rate_anew(open_page: Open, beat: Beat) -> None:
    start = time.time()
    beat(heartbeat("quill-again", at=start, stats={"generation_tokens_total": 5000}))
    page = open_page("/console/")
    card = page.get_by_role("article", name="Replica quill-again")
    expect(card).to_be_visible()
    beat(
        heartbeat(
            "quill-again",
            at=start + 2,
            incarnation="another",
            stats={"generation_tokens_total": 10},
        )
    )
    page.wait_for_timeout(2000)
    assert "-" not in card.locator("dd").first.inner_text()


def test_members_see_neither_hosts_nor_foreign_replicas(open_page: Open, beat: Beat) -> None:
    beat(heartbeat("rival-0", "rival-private", host="node-9"))
    beat(loaded("quill-live", 1000, time.time()))
    page = open_page("/console/", "ada")
    expect(page.get_by_role("article", name="Replica quill-live")).to_be_visible()
    content = page.content()
    assert "rival" not in content
    assert "node-1" not in content


def test_a_failure_is_told_to_operators(open_page: Open, beat: Beat) -> None:
    beat(heartbeat("quill-sick", state="failed", detail="<b>header</b> cut off"))
    page = open_page("/console/", "root")
    card = page.get_by_role("article", name="Replica quill-sick")
    expect(card).to_contain_text("<b>header</b> cut off")
    assert card.locator("b").count() == 0


def test_the_log_of_a_failure_shows_its_end(
    open_page: Open, beat: Beat, instance: dict[str, str]
) -> None:
    client = redis.Redis.from_url(instance["REDIS_URL"])
    log = ReplicaLog(client, instance["QUIRE_KEY_PREFIX"], "quill-logged")
    for number in range(60):
        log.add(f"line {number}")
    log.write("the replica exited with status 1")
    client.close()
    beat(heartbeat("quill-logged", state="failed", detail="no room"))
    page = open_page("/console/", "root")
    field = page.get_by_label("The end of quill-logged's log")
    expect(field).to_contain_text("exited with status 1")
    assert field.evaluate("each => each.scrollHeight > each.clientHeight")
    remaining_scroll = "each => each.scrollHeight - each.scrollTop - each.clientHeight"
    page.wait_for_function(f"each => ({remaining_scroll})(each) < 2", arg=field.element_handle())


def test_the_examples_name_a_ready_model_and_this_server(open_page: Open) -> None:
    page = open_page("/console/")
    expect(page.locator("[data-snippet]").first).to_contain_text('"model": "quill"')
    expect(page.locator("[data-snippet]").first).to_contain_text(
        f"{page.url.split('/console')[0]}/v1/chat"
    )


def usage_of(*daily: tuple[int, int, int]) -> dict[str, Any]:
    """Two weeks of it: (prompt, cached, output) tokens of the last days."""
    days = [f"2026-11-{day:02d}" for day in range(8, 22)]
    full = [(0, 0, 0)] * (14 - len(daily)) + list(daily)
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    sums = [dict(zip(names, day, strict=True)) | {"requests": int(any(day))} for day in full]
    row = {
        "tenant": "a-group-with-an-unusually-long-name-and-then-some-more",
        "model": "Meta-Llama-3.1-8B-Instruct-AWQ-INT4-with-a-very-long-name",
        **{name: sum(day[name] for day in sums) for name in ("requests", *names)},
        "by_day": [prompt + output for prompt, _, output in full],
    }
    return {"days": days, "daily": sums, "rows": [row]}


def test_usage_is_drawn_by_day(open_page: Open) -> None:
    usage = usage_of((100, 50, 100), (1_000_000, 250_000, 200_000))
    page = open_page("/console/", answers={"/console/api/usage": usage})
    chart = page.get_by_role("img", name="Tokens a day; the most, 1,200,000, on Nov 21")
    expect(chart).to_be_visible()
    columns = chart.locator(".chart-day")
    expect(columns).to_have_count(14)
    heights = [float(rect.get_attribute("height")) for rect in columns.last.locator("rect").all()]
    assert sum(heights) == pytest.approx(100)
    assert heights[0] / heights[2] == pytest.approx(250 / 200)
    sums = page.locator("#usage-sums")
    for name, value in (("Requests", "2"), ("Prompt tokens", "1M"), ("From the cache", "25 %")):
        expect(sums.locator("div", has_text=name).locator("dd")).to_have_text(value)


@pytest.mark.parametrize(("width", "figures"), [(1440, True), (390, False)])
def test_long_names_leave_the_figures_in_sight(open_page: Open, width: int, figures: bool) -> None:
    usage = usage_of((100, 50, 100))
    size = {"width": width, "height": 900}
    page = open_page("/console/", viewport=size, answers={"/console/api/usage": usage})
    row = page.locator("#usage tr")
    expect(row).to_be_visible()
    expect_no_overflow(page)
    requests, bars = row.locator("td").nth(1).bounding_box(), row.locator("svg").bounding_box()
    assert requests is not None
    assert bars is not None
    assert requests["x"] + requests["width"] <= width
    assert bars["width"] > 100
    if figures:
        assert bars["x"] + bars["width"] <= width


def test_without_usage_there_is_a_word_and_no_empty_chart(open_page: Open) -> None:
    empty = {**usage_of((0, 0, 0)), "rows": []}
    page = open_page("/console/", answers={"/console/api/usage": empty})
    expect(page.get_by_text("No usage yet")).to_be_visible()
    expect(page.locator("#usage-picture")).to_be_hidden()


def test_figures_that_are_out_of_date_say_so(open_page: Open) -> None:
    page = open_page("/console/")
    expect(page.locator("#pulse")).to_contain_text("Live")
    page.route("**/console/api/overview*", lambda route: route.abort())
    expect(page.locator("#pulse")).to_contain_text("Out of date")
    page.unroute("**/console/api/overview*")
    expect(page.locator("#pulse")).to_contain_text("Live")


def test_drawing_over_a_chart_zooms_in_on_all_of_them(open_page: Open) -> None:
    page = open_page("/console/?range=2h", "root")
    charts = page.locator(".timeline")
    area = charts.first.locator(".chart-area")
    ends = [charts.nth(index).locator(".chart-ends") for index in (0, 3)]
    expect(ends[0]).to_contain_text(":")
    area.scroll_into_view_if_needed()
    everything = [end.inner_text() for end in ends]
    box = area.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.25 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], middle, steps=4)
    page.mouse.up()
    full_element = page.get_by_role("button", name="Show all of the time")
    expect(full_element).to_be_visible()
    assert page.url.endswith("/console/?range=2h")  # it is no click
    for end, initial in zip(ends, everything, strict=True):
        expect(end).not_to_have_text(initial)
    full_element.click()
    expect(full_element).to_be_hidden()
    area.click()
    page.wait_for_url("**/console/requests/**since=**")
