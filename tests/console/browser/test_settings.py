"""The sampling settings: what is sent, what is refused before it's sent."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.console.browser.playground import PlaygroundPage


def fill(playground: PlaygroundPage, name: str, value: str) -> None:
    playground.page.locator(f"#s-{name}").fill(value)


def test_nothing_is_sent_that_was_not_set(playground: PlaygroundPage) -> None:
    request = playground.requested()
    assert request["type"] == "generate"
    assert request["model"] == "quill"
    assert set(request["sampling"]) == {"seed"}  # drawn by the page, so that it can be told


def test_what_is_set_is_sent_with_its_type(playground: PlaygroundPage) -> None:
    values = {
        "temperature": "0.7",
        "top_p": "0.9",
        "min_p": "0.05",
        "top_k": "40",
        "max_tokens": "128",
        "repetition_penalty": "1.1",
        "presence_penalty": "-0.5",
        "frequency_penalty": "0.25",
        "seed": "9007199254740991",
        "stop": "END\n\\n\\n\ntwo words",
    }
    for name, value in values.items():
        fill(playground, name, value)
    assert playground.requested()["sampling"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.05,
        "top_k": 40,
        "max_tokens": 128,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "seed": 9007199254740991,
        "stop": ["END", "\n\n", "two words"],
    }


INVALID_VALUES = [
    ("temperature", "-0.1", "Must be at least 0."),
    ("temperature", "101", "Must be at most 100."),
    ("top_p", "0", "Must be over 0."),
    ("top_p", "1.01", "Must be at most 1."),
    ("top_k", "2.5", "Must be a whole number."),
    ("top_k", "-2", "Must be at least -1."),
    ("max_tokens", "0", "Must be at least 1."),
    ("seed", "-1", "Must be at least 0."),
    ("presence_penalty", "2.1", "Must be at most 2."),
    ("stop", "\n".join("abcdefgh" * 9), "At most 64 strings."),
]


def test_a_value_out_of_its_range_is_told_and_not_sent(playground: PlaygroundPage) -> None:
    for name, value, problem in INVALID_VALUES:
        field = playground.page.locator(f"#s-{name}")
        field.fill(value)
        expect(playground.page.locator(f"#s-{name}-error")).to_have_text(problem)
        expect(field).to_have_attribute("aria-invalid", "true")
        playground.send("Hello")
        expect(field).to_be_focused()
        field.fill("")
        expect(field).to_have_attribute("aria-invalid", "false")
    expect(playground.answers).to_have_count(0)
    expect(playground.prompt).to_have_value("Hello")


def test_what_is_no_number_is_told(playground: PlaygroundPage) -> None:
    playground.page.locator("#s-temperature").press_sequentially("1e")
    expect(playground.page.locator("#s-temperature-error")).to_have_text("This is not a number.")


def test_a_slider_and_its_field_go_together(playground: PlaygroundPage) -> None:
    page = playground.page
    slider = page.locator("input[type=range][data-for=temperature]")
    assert slider.input_value() == "1"
    expect(slider).to_have_class("at-rest")
    fill(playground, "temperature", "0.4")
    assert slider.input_value() == "0.4"
    slider.fill("1.5")
    expect(page.locator("#s-temperature")).to_have_value("1.5")
    page.get_by_role("button", name="Reset all").click()
    expect(page.locator("#s-temperature")).to_have_value("")
    expect(slider).to_have_class("at-rest")


def test_reset_all_empties_the_system_prompt_tools_and_schema_too(
    playground: PlaygroundPage,
) -> None:
    page = playground.page
    fill(playground, "temperature", "0.4")
    page.locator("#system").fill("Answer in verse.")
    page.locator("#x-tools").fill('[{"name": "weather"}]')
    page.locator("#x-schema").fill('{"type": "object"}')
    page.get_by_label("Show token probabilities").check()
    page.get_by_role("button", name="Reset all").click()
    request = playground.requested()
    assert set(request["sampling"]) == {"seed"}
    assert not {"tools", "response_format"} & set(request)
    expect(playground.answers.first.locator(".prose")).to_contain_text("roles: user")
    expect(page.locator("#system")).to_have_value("")
    expect(page.get_by_label("Show token probabilities")).not_to_be_checked()


def test_settings_in_force_stand_above_the_message_and_go_by_a_click(
    playground: PlaygroundPage,
) -> None:
    page = playground.page
    chips = page.get_by_role("group", name="Settings in force").get_by_role("button")
    expect(chips).to_have_count(0)
    fill(playground, "temperature", "0.4")
    page.locator("#system").fill("Answer in verse.")
    expect(chips).to_have_count(2)
    page.get_by_role("button", name="temperature 0.4 ×").click()
    expect(page.locator("#s-temperature")).to_have_value("")
    page.get_by_role("button", name="System prompt ×").click()
    expect(page.locator("#system")).to_have_value("")
    expect(chips).to_have_count(0)
    assert set(playground.requested()["sampling"]) == {"seed"}


def test_an_error_about_a_setting_leads_to_it(playground: PlaygroundPage) -> None:
    error = {
        "message": "The context is 4096 tokens.",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": "context_length_exceeded",
    }
    playground.finished(playground.play(error=error))
    expect(playground.error).to_contain_text("Too long for this model")
    expect(playground.error).to_contain_text("context_length_exceeded · max_tokens")
    playground.error.get_by_role("button", name="Change max_tokens").click()
    expect(playground.page.locator("#s-max_tokens")).to_be_focused()
    expect(playground.page.locator("#s-max_tokens-error")).to_have_text(error["message"])


def test_an_error_keeps_what_came_before_it_and_can_be_tried_again(
    playground: PlaygroundPage,
) -> None:
    error = {"message": "Out.", "type": "server_error", "param": None, "code": "engine_fault"}
    answer = playground.finished(playground.play(text="Half of an answer", error=error))
    expect(answer.locator(".prose")).to_have_text("Half of an answer")
    expect(answer).to_have_attribute("data-state", "failed")
    expect(playground.error).to_contain_text("The engine failed")
    playground.error.get_by_role("button", name="Try again").click()
    expect(playground.answers).to_have_count(1)
