"""The playground's tabs of completions, embeddings and reranking."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from tests.console.browser.conftest import Open
from tests.console.browser.test_accessibility import in_both, problems

MODELS = {"models": [{"id": "quill", "state": "ready", "tasks": []}], "tenant": "acme"}
RANKED = {
    "id": "rerank-1",
    "results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}],
    "usage": {"prompt_tokens": 31},
}
EMBEDDED = {
    "id": "embd-1",
    "data": [{"embedding": [1.0, 0.0]}, {"embedding": [0.0, 2.0]}],
    "usage": {"prompt_tokens": 12},
}
COMPLETED = {
    "id": "cmpl-1",
    "choices": [{"text": " there was <b>a heron</b>."}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 9},
}


def answers(kind: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {"/console/api/models": MODELS, f"/console/api/run/{kind}": answer}


def test_a_prompt_is_completed(open_page: Open) -> None:
    page = open_page("/", answers=answers("completions", COMPLETED))
    tabs = page.get_by_role("navigation", name="Playground")
    tabs.get_by_role("link", name="Completion").click()
    expect(tabs.locator("[aria-current]")).to_have_text("Completion")
    page.get_by_label("Prompt").fill("Once")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".completion")).to_have_text("Once there was <b>a heron</b>.")
    expect(page.get_by_role("link", name="Show the request")).to_have_attribute(
        "href", "/console/requests/cmpl-1/"
    )
    for _ in in_both(page):
        assert problems(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_texts_are_embedded_and_compared(open_page: Open) -> None:
    page = open_page("/console/playground/embeddings/", answers=answers("embeddings", EMBEDDED))
    page.get_by_label("Texts").fill("One\n\n Two ")
    with page.expect_request("**/console/api/run/embeddings*") as sent:
        page.get_by_role("button", name="Run").click()
    assert sent.value.post_data_json == {"model": "quill", "input": ["One", "Two"]}
    row = page.locator("#result tbody tr").first.locator("th, td")
    expect(row).to_have_text(["1. One", "2", "1.000, 0.000", "1.000", "0.000"])
    assert problems(page) == []


def test_documents_are_ranked_and_errors_are_said(open_page: Open) -> None:
    page = open_page("/console/playground/rerank/", answers=answers("rerank", RANKED))
    page.get_by_label("Documents").fill("First\nSecond")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#result tbody th")).to_have_text(["Second", "First"])
    page.unroute_all()
    page.get_by_role("button", name="Run").click()  # the real server has no such model
    expect(page.locator("#run-state")).not_to_be_empty()
    expect(page.get_by_role("button", name="Run")).to_be_enabled()
