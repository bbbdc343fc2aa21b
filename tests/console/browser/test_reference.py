"""The API's reference in a browser: readable in both themes, found, tried."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.console.browser.conftest import Open


def test_an_address_opens_its_operation_and_shows_no_secret(open_page: Open) -> None:
    page = open_page("/reference/#post-v1-chat-completions")
    operation = page.locator("#post-v1-chat-completions")
    expect(operation.locator("form.try")).to_be_visible()
    # No secret, though the reader is logged in and has models.
    assert "sk-quire-" not in operation.locator("code").first.inner_text()
    expect(operation.locator("figure code")).to_contain_text('"model": "acme-private"')


def test_examples_are_in_python_and_javascript_too(open_page: Open) -> None:
    page = open_page("/reference/#post-v1-chat-completions")
    operation = page.locator("#post-v1-chat-completions")
    code = operation.locator("figure code")
    expect(code).to_contain_text("curl ")
    operation.get_by_role("button", name="Python").click()
    source = code.inner_text()
    compile(source, "example", "exec")
    assert "/v1/chat/completions" in source
    assert '"model": "acme-private"' in source
    operation.get_by_role("button", name="JavaScript").click()
    expect(code).to_contain_text("await fetch(")
    operation.get_by_role("button", name="curl").click()
    expect(code).to_contain_text("curl ")
    first = page.locator("#post-v1-chat-completions .operation-text dl.fields").last
    expect(first.locator("dt").first).to_contain_text("required")


def test_an_operation_is_sent_with_a_key_of_the_session(open_page: Open) -> None:
    page = open_page("/reference/#get-v1-models")
    models = page.locator("#get-v1-models")
    models.get_by_role("button", name="Use a key for an hour").click()
    expect(models.get_by_label("API key")).to_have_value(re.compile("^sk-quire-"))
    models.get_by_role("button", name="Send the request").click()
    expect(models.locator(".try-state")).to_have_text("200 OK")
    expect(models.locator("pre.log")).to_contain_text("acme-private")
    page.goto(page.url.partition("/reference/")[0] + "/console/keys/?tenant=acme")
    expect(page.get_by_role("row").filter(has_text="API reference").first).to_be_visible()


def test_operations_are_found_and_sent(open_page: Open) -> None:
    page = open_page("/reference/", None)
    page.get_by_label("Find an operation").fill("list models")
    models = page.locator("#get-v1-models")
    models.locator("summary").click()
    expect(page.locator("#post-v1-chat-completions")).to_be_hidden()
    page.get_by_label("API key").fill("sk-quire-nobodys")
    models.get_by_role("button", name="Send the request").click()
    expect(models.locator(".try-state")).to_have_text("401 Unauthorized")
    expect(models.locator("pre.log")).to_contain_text("Incorrect API key")
