"""Tools of MCP servers in the playground: switched on, shown with their results, stopped."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from playwright.sync_api import Error, Route, expect

from tests.console.browser.conftest import PHONE, Open
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.test_accessibility import in_both, problems

SERVERS = [
    {"name": "weather", "tools": ["weather__forecast", "weather__hangs"]},
    {"name": "empty", "tools": []},
]


def with_servers(route: Route) -> None:
    """The page's list of models, and the servers of a tenant that has some."""
    answer = route.fetch()
    with suppress(Error):  # a reload has taken the request back meanwhile
        route.fulfill(response=answer, json={**answer.json(), "mcp_servers": SERVERS})


def opened(open_page: Open, **options: Any) -> PlaygroundPage:
    """The playground with the weather's tools switched on."""
    page = open_page(**options)
    page.route("**/console/api/models*", with_servers)
    page.reload()
    playground = PlaygroundPage(page).ready()
    if options:
        page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("empty, no tools yet")).to_be_disabled()
    page.get_by_label("weather, 2 tools").check()
    if options:
        page.get_by_role("button", name="Close the settings").click()
    return playground


def call(index: int, **arguments: Any) -> list[dict[str, Any]]:
    name, text = "weather__forecast", json.dumps(arguments)
    return [
        {"type": "call", "index": index, "call_id": f"call-{index}", "name": name},
        {"type": "arguments", "index": index, "text": text},
    ]


def test_a_tool_runs_and_the_model_goes_on_with_its_result(open_page: Open) -> None:
    playground = opened(open_page, viewport=PHONE)
    page = playground.page
    assert playground.requested()["mcp_servers"] == ["weather"]
    playground.play(frames=[*call(0, city="Porto"), *call(1, city="Rome")], reason="tool_calls")
    answer = playground.answers.nth(1)
    expect(answer.locator(".call code").first).to_have_text('weather__forecast({"city": "Porto"})')
    for index, city in enumerate(("Porto", "Rome")):
        result = answer.locator(".call-result").nth(index)
        expect(result.locator("summary")).to_have_text("weather returned")
        expect(result.locator("pre")).to_have_text(f'Ran with {{"city": "{city}"}}')
    expect(answer.get_by_role("button", name="Send results")).to_be_hidden()
    prose = playground.finished(playground.answers.nth(2)).locator(".prose")
    expect(prose).to_have_text('You said: Ran with {"city": "Rome"}')
    for _ in in_both(page):
        assert problems(page) == []
    page.reload()
    playground.ready()
    expect(answer.locator(".call-result pre").first).to_have_text('Ran with {"city": "Porto"}')


def test_stop_ends_a_call_and_the_reader_may_go_on_without_it(open_page: Open) -> None:
    playground = opened(open_page)
    page = playground.page
    playground.play(frames=[*call(0, hang=True), *call(1, city="Rome")], reason="tool_calls")
    answer = playground.answers.first
    expect(answer.get_by_text("weather is running this…")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(answer.locator(".call-result summary").first).to_have_text("weather: failed")
    expect(playground.answers).to_have_count(1)
    answer.get_by_label("Result of weather__forecast").and_(page.locator("textarea:visible")).fill(
        "Sunny"
    )
    answer.get_by_role("button", name="Send results").click()
    prose = playground.finished(playground.answers.nth(1)).locator(".prose")
    expect(prose).to_have_text("You said: Sunny")


def test_a_call_that_a_reload_interrupts_has_ended_and_the_reader_goes_on(open_page: Open) -> None:
    playground = opened(open_page)
    page = playground.page
    playground.play(frames=call(0, hang=True), reason="tool_calls")
    answer = playground.answers.first
    expect(answer.get_by_text("weather is running this…")).to_be_visible()
    page.reload()
    playground.ready()
    expect(answer.locator(".call-result summary")).to_have_text("weather: failed")
    expect(answer.locator(".call-result pre")).to_contain_text("Interrupted: the page was")
    expect(answer.locator("textarea:visible")).to_have_count(0)
    answer.get_by_role("button", name="Send results").click()
    prose = playground.finished(playground.answers.nth(1)).locator(".prose")
    expect(prose).to_contain_text("You said: Interrupted")


def test_a_chip_says_which_tools_are_on_and_switches_them_off(open_page: Open) -> None:
    playground = opened(open_page)
    page = playground.page
    page.get_by_role("button", name="Tools of weather").click()
    expect(page.get_by_role("button", name="Tools of weather")).to_have_count(0)
    assert "mcp_servers" not in playground.requested()
