"""Chatting: what is sent, how the answer grows, and what can be done with it."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Route, expect

from tests.console.browser.conftest import Open
from tests.console.browser.playground import PlaygroundPage

LINES = "\n\n".join(f"This is paragraph {n} of a long answer." for n in range(60))


def test_a_first_message_is_answered(playground: PlaygroundPage) -> None:
    expect(playground.page.get_by_role("heading", name="What can I help with?")).to_be_visible()
    answer = playground.answer_to("Hello")
    expect(answer.locator(".prose")).to_have_text("You said: Hello")
    expect(playground.questions.first).to_contain_text("Hello")
    expect(playground.page.locator("#blank")).to_be_hidden()
    expect(playground.prompt).to_have_value("")
    expect(playground.prompt).to_be_focused()


def test_the_answers_figures_are_shown(playground: PlaygroundPage) -> None:
    figures = playground.answer_to("Hello").locator(".colophon")
    expect(figures).to_contain_text(re.compile(r"\d+ tokens?"))
    expect(figures).to_contain_text(re.compile(r"[\d,.]+ tok/s"))
    expect(figures).to_contain_text("first after 85 ms")
    expect(figures).to_contain_text("prompt 31, 16 cached")


def test_tokens_are_shown_as_they_come(playground: PlaygroundPage) -> None:
    answer = playground.play(text="one two three four five six seven eight", cut=4, pause=0.2)
    expect(answer.locator(".prose")).to_contain_text("one two")
    expect(answer).to_have_attribute("aria-busy", "true")
    assert "eight" not in answer.inner_text()
    playground.finished(answer)
    expect(answer.locator(".prose")).to_contain_text("seven eight")


def test_thoughts_come_before_the_answer_and_fold_when_it_begins(
    playground: PlaygroundPage,
) -> None:
    answer = playground.play(reasoning="a b c d e f ", text="Forty-two.", cut=2, pause=0.15)
    thoughts = answer.locator(".thinking")
    expect(thoughts.locator("summary")).to_have_text("Thinking")
    expect(thoughts.get_by_text("a b")).to_be_visible()
    playground.finished(answer)
    expect(answer.locator(".prose")).to_have_text("Forty-two.")
    expect(thoughts.locator("summary")).to_have_text(re.compile("Thought for"))
    expect(thoughts.locator(".thinking-text")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator(".thinking-text")).to_have_text("a b c d e f ")


def test_thoughts_are_kept_with_the_conversation_but_not_sent(playground: PlaygroundPage) -> None:
    playground.finished(playground.play(reasoning="<b>hm</b>", text="Yes."))
    playground.page.reload()
    playground.ready()
    thoughts = playground.answers.first.locator(".thinking")
    thoughts.locator("summary").click()
    expect(thoughts.locator(".thinking-text")).to_have_text("<b>hm</b>")
    answer = playground.finished(playground.play(echo=True))
    expect(answer.locator(".prose")).to_contain_text("roles: user, assistant, user")
    expect(answer.locator(".prose")).not_to_contain_text("hm")


def test_an_answer_without_thoughts_shows_none(playground: PlaygroundPage) -> None:
    expect(playground.answer_to("Hello").locator(".thinking")).to_be_hidden()


def test_stop_keeps_what_came_so_far(playground: PlaygroundPage) -> None:
    answer = playground.play(text="word " * 400, cut=5, pause=0.02)
    expect(answer.locator(".prose")).to_contain_text("word word")
    playground.page.get_by_role("button", name="Stop").click()
    playground.finished(answer)
    expect(answer).to_have_attribute("data-state", "stopped")
    expect(answer.locator(".colophon")).to_contain_text("stopped")
    assert len(answer.locator(".prose").inner_text().split()) < 400
    expect(playground.page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_escape_stops_too(playground: PlaygroundPage) -> None:
    answer = playground.play(text="word " * 400, cut=5, pause=0.02)
    expect(answer.locator(".prose")).to_contain_text("word word")
    playground.page.keyboard.press("Escape")
    expect(answer).to_have_attribute("data-state", "stopped")


def test_the_next_request_holds_the_conversation(playground: PlaygroundPage) -> None:
    page = playground.page
    page.get_by_label("System prompt").fill("Be brief.")
    playground.answer_to("One")
    answer = playground.finished(playground.play(echo=True))
    expect(answer.locator(".prose")).to_contain_text("roles: system, user, assistant, user")


def test_answering_again_replaces_the_answer(playground: PlaygroundPage) -> None:
    answer = playground.answer_to("Once")
    answer.hover()
    answer.get_by_role("button", name="Answer again").click()
    playground.finished(playground.answers.first)
    expect(playground.answers).to_have_count(1)
    expect(playground.questions).to_have_count(1)


def test_an_edited_question_is_asked_anew_and_what_followed_goes(
    playground: PlaygroundPage,
) -> None:
    playground.answer_to("First")
    playground.answer_to("Second")
    question = playground.questions.first
    question.hover()
    question.get_by_role("button", name="Edit").click()
    field = question.get_by_role("textbox")
    expect(field).to_have_value("First")
    field.fill("Changed")
    field.press("Enter")
    expect(playground.answers.first.locator(".prose")).to_have_text("You said: Changed")
    expect(playground.answers).to_have_count(1)


def test_editing_can_be_given_up(playground: PlaygroundPage) -> None:
    playground.answer_to("First")
    question = playground.questions.first
    question.hover()
    question.get_by_role("button", name="Edit").click()
    question.get_by_role("textbox").press("Escape")
    expect(question.locator(".question-text")).to_have_text("First")
    expect(playground.answers).to_have_count(1)


def test_clearing_can_be_undone(playground: PlaygroundPage) -> None:
    playground.answer_to("Hello")
    playground.page.get_by_role("button", name="New").click()
    expect(playground.answers).to_have_count(0)
    expect(playground.page.locator("#blank")).to_be_visible()
    playground.page.get_by_role("button", name="Undo").click()
    expect(playground.answers).to_have_count(1)
    expect(playground.answers.first.locator(".prose")).to_have_text("You said: Hello")


def test_copying_gives_the_source(open_page: Open) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    playground = PlaygroundPage(page).ready()
    answer = playground.finished(playground.play(text="**bold** and\n\n```py\nx = 1\n```"))
    answer.hover()
    answer.get_by_role("button", name="Copy the answer").click()
    expect(answer.get_by_text("Copied")).to_be_attached()
    assert page.evaluate("navigator.clipboard.readText()").startswith("**bold** and")
    answer.get_by_role("button", name="Copy this code").click()
    expect(answer.locator(".code").get_by_text("Copied")).to_be_attached()
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"


def test_an_error_without_an_answer_can_be_tried_again_and_not_copied(
    playground: PlaygroundPage,
) -> None:
    error = {"message": "Away.", "type": "server_error", "param": None, "code": "x"}
    answer = playground.finished(playground.play(error=error))
    expect(answer.get_by_role("button", name="Answer again")).to_be_attached()
    expect(answer.get_by_title("Copy the answer")).to_be_hidden()
    cut_off = playground.finished(playground.play(text="as far as it came", error=error))
    expect(cut_off.get_by_title("Copy the answer")).to_be_visible()


def test_the_page_follows_the_answer_until_the_reader_scrolls_up(
    playground: PlaygroundPage,
) -> None:
    page, scroller = playground.page, playground.page.locator("#scroller")
    processor = page.context.new_cdp_session(page)
    processor.send("Emulation.setCPUThrottlingRate", {"rate": 10})  # what scrolls lags behind
    answer = playground.play(text=LINES, cut=40, pause=0.02)
    to_end = page.get_by_role("button", name="To the latest")
    expect(answer).to_contain_text("paragraph 25")
    gap = "s => s.scrollHeight - s.scrollTop - s.clientHeight"
    page.wait_for_function(f"() => ({gap})(document.getElementById('scroller')) < 60")
    scroller.hover()
    page.mouse.wheel(0, -400)
    expect(to_end).to_be_visible()
    expect(answer).to_contain_text("paragraph 40")
    # The page is told of the wheel before the browser scrolls.
    page.wait_for_function(f"() => ({gap})(document.getElementById('scroller')) > 300")
    expect(answer).to_contain_text("paragraph 45")
    assert scroller.evaluate(gap) > 300
    to_end.click()
    playground.finished(answer)
    page.wait_for_function(f"() => ({gap})(document.getElementById('scroller')) < 60")
    expect(to_end).to_be_hidden()
    processor.send("Emulation.setCPUThrottlingRate", {"rate": 1})


def test_a_conversation_outlives_a_reload_of_its_tab_alone(playground: PlaygroundPage) -> None:
    page = playground.page
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature", exact=True).fill("0.3")
    playground.answer_to("Hello")
    page.reload()
    playground.ready()
    expect(playground.answers.first.locator(".prose")).to_have_text("You said: Hello")
    expect(playground.answers.first.locator(".colophon")).to_contain_text("tok/s")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(page.get_by_label("Temperature", exact=True)).to_have_value("0.3")
    other = PlaygroundPage(page.context.new_page())
    other.page.goto(page.url.partition("?")[0])
    expect(other.ready().answers).to_have_count(0)


def test_an_answer_cut_off_by_a_reload_stays_as_far_as_it_came(
    playground: PlaygroundPage,
) -> None:
    answer = playground.play(text="word " * 400, cut=5, pause=0.02)
    expect(answer.locator(".prose")).to_contain_text("word word")
    playground.page.reload()
    playground.ready()
    expect(playground.answers.first).to_have_attribute("data-state", "stopped")
    expect(playground.answers.first.locator(".prose")).to_contain_text("word word")


def test_the_next_user_of_the_tab_does_not_find_the_conversation(
    open_page: Open, sessions: dict[str, Any]
) -> None:
    page = open_page("/", "ada")
    PlaygroundPage(page).ready().answer_to("a secret of Ada's")
    page.reload()
    expect(PlaygroundPage(page).ready().answers).to_have_count(1)
    page.context.clear_cookies()
    page.context.add_cookies(sessions["root"]["cookies"])
    page.reload()
    expect(page.locator(".reader-name")).to_have_text("root")
    expect(PlaygroundPage(page).ready().answers).to_have_count(0)


def test_an_answer_leads_to_its_request_and_takes_feedback(playground: PlaygroundPage) -> None:
    page, sent = playground.page, []

    def keep(route: Route) -> None:
        sent.append((route.request.url, route.request.post_data_json))
        route.fulfill(json={"good": True, "comment": ""})

    page.route("**/console/api/feedback/*", keep)
    answer = playground.answer_to("Hello")
    link = answer.get_by_role("link", name="request")
    request_id = str(link.get_attribute("href")).rstrip("/").rpartition("/")[2]
    answer.get_by_role("button", name="Bad answer").click()
    answer.get_by_label("What was wrong").fill("Too short.")
    answer.get_by_label("What was wrong").press("Enter")
    expect(answer.get_by_label("What was wrong")).to_be_hidden()
    expect(answer.get_by_role("button", name="Bad answer")).to_have_attribute(
        "aria-pressed", "true"
    )
    assert [body for _, body in sent] == [
        {"good": False, "comment": ""},
        {"good": False, "comment": "Too short."},
    ]
    assert all(url.endswith(f"/{request_id}") for url, _ in sent)
    page.unroute("**/console/api/feedback/*")


def test_a_starter_is_sent(playground: PlaygroundPage) -> None:
    playground.page.get_by_role("button", name="What is 17 + 25?").click()
    playground.finished(playground.answers.first)
    expect(playground.questions.first.locator(".question-text")).to_have_text("What is 17 + 25?")
    expect(playground.prompt).to_have_value("")


#: Whether a text is JSON.
TEXTS = {
    '{"city": "x",\n\n        "of": [1]}': True,
    '\n {"city":\n\n"x"}\n': True,
    "[1,\n\n2]": True,
    "{x} is a set": False,
    "[a link](https://example.org)": False,
}


def test_json_is_drawn_as_code_and_nothing_else_is(playground: PlaygroundPage) -> None:
    for text, code in TEXTS.items():
        answer = playground.finished(playground.play(text=text, cut=3, pause=0.01))
        blocks = answer.locator(".prose pre")
        expect(blocks).to_have_count(int(code))
        if code:
            assert json.loads(blocks.inner_text()) == json.loads(text)
    playground.page.reload()
    expect(playground.answers).to_have_count(len(TEXTS))
    for answer, code in zip(playground.answers.all(), TEXTS.values(), strict=True):
        expect(answer.locator(".prose pre")).to_have_count(int(code))
