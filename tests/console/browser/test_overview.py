"""The overview page, fed by heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable

from playwright.sync_api import expect

from engine.protocol import Heartbeat
from tests.console.beats import heartbeat
from tests.console.browser.conftest import Open

Beat = Callable[[Heartbeat], None]


def loaded(replica_id: str, tokens: int, at: float, **stats: float) -> Heartbeat:
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
    return heartbeat(replica_id, at=at, host="node-1", pid=7, stats=figures | stats)


def test_load_is_live(open_page: Open, beat: Beat) -> None:
    start = time.time()
    beat(loaded("quill-live", 1000, start))
    page = open_page("/console/", "root")
    card = page.get_by_role("article", name="Replica quill-live")
    expect(card).to_contain_text("ready")
    expect(card).to_contain_text("50 % of 1,000 pages in use")
    expect(card).to_contain_text("64 %")
    meter = card.get_by_role("meter", name="KV cache in use")
    expect(meter).to_have_attribute("aria-valuenow", "50")
    beat(loaded("quill-live", 1240, start + 2, num_requests_running=9, kv_cache_usage_perc=0.75))
    expect(card).to_contain_text("120")  # 240 tokens in 2 s
    expect(meter).to_have_attribute("aria-valuenow", "75")
    row = page.get_by_role("row").filter(has_text="quill").first
    expect(row).to_contain_text("9")


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


def test_the_examples_name_a_ready_model_and_this_server(open_page: Open) -> None:
    page = open_page("/console/")
    expect(page.locator("[data-snippet]").first).to_contain_text('"model": "quill"')
    expect(page.locator("[data-snippet]").first).to_contain_text(
        f"{page.url.split('/console')[0]}/v1/chat"
    )


def test_figures_that_are_out_of_date_say_so(open_page: Open) -> None:
    page = open_page("/console/")
    expect(page.locator("#pulse")).to_contain_text("Live")
    page.route("**/console/api/overview", lambda route: route.abort())
    expect(page.locator("#pulse")).to_contain_text("Out of date")
    page.unroute("**/console/api/overview")
    expect(page.locator("#pulse")).to_contain_text("Live")
