"""The connection: lost, found again, refused."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect

from tests.console.browser.conftest import Open
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.tabs import NOTHING
from tests.console.live import LiveServer
from tests.console.relay import Relay, relayed


def test_the_page_reconnects_when_the_server_is_back(open_page: Open, server: LiveServer) -> None:
    page = open_page(NOTHING)
    with relayed(server) as relay:
        page.goto(relay.url)
        lose_and_find(PlaygroundPage(page).ready(), relay)


def lose_and_find(playground: PlaygroundPage, relay: Relay) -> None:
    page = playground.page
    playground.answer_to("Before")
    running = playground.play(text="word " * 400, cut=5, pause=0.02)
    expect(running.locator(".prose")).to_contain_text("word word")
    relay.stop()
    playground.finished(running)
    expect(running.locator(".prose")).to_contain_text("word word")
    expect(playground.error).to_contain_text("connection_lost")
    expect(page.locator("#connection")).to_contain_text("Connection lost")
    # What is asked meanwhile waits.
    waiting = playground.send("Meanwhile")
    expect(waiting).to_have_attribute("data-state", "waiting")
    relay.start()
    page.evaluate("dispatchEvent(new Event('online'))")  # or it would wait for its next attempt
    expect(waiting.locator(".prose")).to_have_text("You said: Meanwhile")
    expect(page.locator("#connection")).to_have_text("")
    expect(playground.answers.first.locator(".prose")).to_have_text("You said: Before")


@pytest.fixture
def private_playground(open_page: Open) -> PlaygroundPage:
    """The playground in a tab of its own: the way of a socket can't be changed back."""
    return PlaygroundPage(open_page(isolated=True)).ready()


def cut_off(playground: PlaygroundPage) -> list[float]:
    """Drop the connection and refuse every new one; the times of the attempts, as they come."""
    attempts: list[float] = []

    def refuse(socket: WebSocketRoute) -> None:
        attempts.append(time.monotonic())
        socket.close(code=1012)

    playground.page.route_web_socket("**/ws/playground/", refuse)
    playground.finished(playground.play(text="Bye", close=1012))
    return attempts


def wait_for_attempts(page: Page, attempts: list[float], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(attempts) < count:
        assert time.monotonic() < deadline, f"{len(attempts)} attempts"
        page.wait_for_timeout(20)


def test_the_reader_can_have_it_tried_at_once(private_playground: PlaygroundPage) -> None:
    page, attempts = private_playground.page, cut_off(private_playground)
    wait_for_attempts(page, attempts, 3)  # the next one is two seconds away at least
    again = page.get_by_role("button", name="Try now")
    again.focus()
    count = len(attempts)
    page.keyboard.press("Enter")
    wait_for_attempts(page, attempts, count + 1)
    assert len(attempts) == count + 1


def test_what_was_stopped_stays_so_though_the_connection_is_lost(
    playground: PlaygroundPage,
) -> None:
    running = playground.play(text="word " * 400, cut=5, pause=0.05, close=1012)
    expect(running.locator(".prose")).to_contain_text("word word")
    playground.page.get_by_role("button", name="Stop").click()
    expect(running).to_have_attribute("data-state", "stopped")
    expect(playground.error).to_have_count(0)


def test_a_question_that_waits_can_be_given_up(private_playground: PlaygroundPage) -> None:
    cut_off(private_playground)
    expect(private_playground.page.locator("#connection")).to_have_attribute(
        "data-state", "waiting"
    )
    waiting = private_playground.send("Meanwhile")
    expect(waiting).to_have_attribute("data-state", "waiting")
    private_playground.page.get_by_role("button", name="Stop").click()
    expect(waiting).to_have_attribute("data-state", "stopped")


def test_a_session_that_ends_is_told_with_a_way_back(playground: PlaygroundPage) -> None:
    answer = playground.finished(playground.play(text="So far", close=4401))
    expect(answer.locator(".prose")).to_have_text("So far")
    expect(playground.error).to_contain_text("Your session has ended")
    link = playground.page.locator("#connection").get_by_role("link", name="Log in again")
    expect(link).to_have_attribute("href", "/login/?next=/")


def test_a_refused_origin_is_not_tried_again(playground: PlaygroundPage) -> None:
    playground.finished(playground.play(close=4403))
    expect(playground.page.locator("#connection")).to_have_attribute("data-state", "closed")
    expect(playground.page.locator("#connection")).to_contain_text("refuses connections")
    playground.finished(playground.send("Once more"))
    expect(playground.error.last).to_contain_text("foreign_origin")


def test_a_conversation_too_long_to_send_is_told_and_the_connection_stays(
    playground: PlaygroundPage,
) -> None:
    playground.finished(playground.send('"""" ' * 120_000))  # each quote is sent as two characters
    expect(playground.error).to_contain_text("message_too_large")
    expect(playground.page.locator("#connection")).to_have_attribute("data-state", "open")


def test_a_session_that_ended_elsewhere_is_noticed_without_a_word_from_the_socket(
    open_page: Open,
) -> None:
    page = open_page()
    PlaygroundPage(page).ready()
    page.context.clear_cookies()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#connection")).to_contain_text("Your session has ended")
