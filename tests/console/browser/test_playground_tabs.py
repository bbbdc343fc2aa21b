"""The playground's tabs beside chat."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from tests.console.browser.conftest import Open, expect_no_overflow
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
#: A stream of the API in a page, which ends when it is stopped or `finish()` is called.
STREAM = """() => {
  const encode = (text) => new TextEncoder().encode(text);
  const event = (data) => `id: cmpl-1:1\\ndata: ${JSON.stringify({id: "cmpl-1", ...data})}\\n\\n`;
  const usage = {prompt_tokens: 4, completion_tokens: 9};
  const real = window.fetch;
  window.fetch = async (url, options) => {
    if (!String(url).includes("/run/")) return real(url, options);
    window.sent = JSON.parse(options.body);
    return new Response(new ReadableStream({start(stream) {
      options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
      stream.enqueue(encode(": wait\\n\\n" + event({choices: [{text: " there was"}]})));
      window.finish = (last) => {
        const text = event({choices: [{text: " <b>a heron</b>."}]});
        stream.enqueue(encode(text.slice(0, 20)));
        stream.enqueue(encode(text.slice(20)));
        const done = "id: cmpl-1:9\\ndata: [DONE]\\n\\n";
        stream.enqueue(encode(last ?? event({choices: [], usage}) + done));
        stream.close();
      };
    }}));
  };
}"""


def answers(kind: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {"/console/api/models": MODELS, f"/console/api/run/{kind}": answer}


def test_a_prompt_is_completed_while_one_looks(open_page: Open) -> None:
    page = open_page("/", answers=answers("completions", {}))
    tabs = page.get_by_role("navigation", name="Playground")
    tabs.get_by_role("link", name="Completion").click()
    expect(tabs.locator("[aria-current]")).to_have_text("Completion")
    page.evaluate(STREAM)
    page.get_by_label("Prompt").fill("Once")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".completion")).to_have_text("Once there was")
    expect(page.get_by_role("button", name="Run")).to_be_disabled()
    page.evaluate("finish()")
    expect(page.locator(".completion")).to_have_text("Once there was <b>a heron</b>.")
    expect(page.locator("#result-figures")).to_contain_text("prompt 4 tokens · 9 tokens")
    expect(page.locator("#result-figures")).not_to_contain_text("tok/s")  # of so few
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("link", name="Show the request")).to_have_attribute(
        "href", "/console/requests/cmpl-1/"
    )
    assert page.evaluate("sent.stream && sent.stream_options.include_usage")
    for _ in in_both(page):
        assert problems(page) == []
        expect_no_overflow(page)


#: A clock that says `at`: it stands at 5 s when the first text comes.
CLOCK = """() => {
  window.at = 0;
  performance.now = () => window.at;
  const streamed = window.fetch;
  window.fetch = (url, options) => {
    if (String(url).includes("/run/")) window.at = 5000;
    return streamed(url, options);
  };
}"""


def test_the_speed_of_a_completion_counts_from_its_first_token(open_page: Open) -> None:
    page = open_page("/console/playground/completions/", answers=answers("completions", {}))
    page.evaluate(STREAM)
    page.evaluate(CLOCK)
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".completion")).to_contain_text("there was")
    usage = '{"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 41}}'
    page.evaluate(f"at = 7000; finish('data: {usage}' + '\\n\\ndata: [DONE]\\n\\n')")
    expect(page.locator("#result-figures")).to_have_text("7 s · 41 tokens · 20 tok/s")


def test_a_completion_is_stopped_and_what_came_stays(open_page: Open) -> None:
    page = open_page("/console/playground/completions/", answers=answers("completions", {}))
    page.evaluate(STREAM)
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".completion")).to_contain_text("there was")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#run-state")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Run")).to_be_focused()
    expect(page.locator(".completion")).to_contain_text("there was")


def test_a_completion_that_fails_in_mid_stream_says_so(open_page: Open) -> None:
    page = open_page("/console/playground/completions/", answers=answers("completions", {}))
    page.evaluate(STREAM)
    for last, message in (
        (r'data: {"error": {"message": "The replica was lost."}}', "The replica was lost."),
        ("", "The connection was lost before the answer's end."),
    ):
        page.get_by_role("button", name="Run").click()
        expect(page.locator(".completion")).to_contain_text("there was")
        page.evaluate("(last) => finish(last && last + '\\n\\n')", last)
        expect(page.locator("#run-state")).to_have_text(message)


def test_texts_are_embedded_and_compared(open_page: Open) -> None:
    page = open_page("/console/playground/embeddings/", answers=answers("embeddings", EMBEDDED))
    page.get_by_label("Texts").fill("One\n\n Two ")
    with page.expect_request("**/console/api/run/embeddings*") as sent:
        page.get_by_role("button", name="Run").click()
    assert sent.value.post_data_json == {"model": "quill", "input": ["One", "Two"]}
    row = page.locator("#result tbody tr").first.locator("th, td")
    expect(row).to_have_text(["1. One", "2", "1.000, 0.000", "1.000", "0.000"])
    assert problems(page) == []


def test_many_texts_are_compared_with_the_first_ones(open_page: Open) -> None:
    vectors = {"data": [{"embedding": [1.0, 0.0]}] * 500, "usage": {}}
    page = open_page("/console/playground/embeddings/", answers=answers("embeddings", vectors))
    page.get_by_label("Texts").fill("\n".join(f"text {number}" for number in range(500)))
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#result tbody tr")).to_have_count(500)
    expect(page.locator("#result thead th")).to_have_count(3 + 16)
    expect(page.get_by_role("group", name="compared with the first 16")).to_be_visible()


def test_documents_are_ranked_and_errors_are_said(open_page: Open) -> None:
    page = open_page("/console/playground/rerank/", answers=answers("rerank", RANKED))
    page.get_by_label("Documents").fill("First\nSecond")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#result tbody th")).to_have_text(["Second", "First"])
    page.unroute_all()
    page.get_by_role("button", name="Run").click()  # the real server has no such model
    expect(page.locator("#run-state")).not_to_be_empty()
    expect(page.get_by_role("button", name="Run")).to_be_enabled()


#: A microphone that is asked for until `allow()`, and a socket that is refused by `refuse()`.
SLOW_MICROPHONE = """() => {
  navigator.mediaDevices.getUserMedia = async () => {
    await new Promise((resolve) => (window.allow = resolve));
    const stream = new AudioContext().createMediaStreamDestination().stream;
    [window.track] = stream.getTracks();
    return stream;
  };
  window.WebSocket = class extends EventTarget {
    static CONNECTING = 0;
    readyState = 1;
    constructor() {
      super();
      const error = {code: "bad", message: "No such language."};
      const data = JSON.stringify({type: "error", error});
      window.refuse = () => this.dispatchEvent(new MessageEvent("message", {data}));
    }
    send() {}
    close() { window.isClosed = true; }
  };
}"""
HEARD = {"duration": 11.0, "segments": [{"start": 0.0, "end": 3.0, "text": " And so"}]}


def test_a_microphone_is_given_back_if_the_text_was_refused_while_it_was_asked_for(
    open_page: Open,
) -> None:
    page = open_page("/console/playground/speech/", answers=answers("speech", HEARD))
    page.evaluate(SLOW_MICROPHONE)
    record = page.get_by_role("button", name="Record")
    record.click()
    page.wait_for_function("() => Boolean(window.allow)")
    page.evaluate("refuse()")
    expect(page.locator("#run-state")).to_contain_text("No such language.")
    expect(page.locator("#speech-player")).to_be_visible()
    assert page.evaluate("isClosed")
    page.evaluate("allow()")
    page.wait_for_function("() => window.track?.readyState === 'ended'")
    expect(record).to_be_enabled()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    for _ in in_both(page):
        assert problems(page) == []
