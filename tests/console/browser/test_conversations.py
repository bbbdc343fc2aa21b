"""Conversations that are kept: found, named, shared, branched; tools, schemas, two models."""

from __future__ import annotations

import json
import time
from urllib.parse import urljoin

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.console.browser.conftest import PHONE, Open, expect_no_overflow
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.test_accessibility import in_both, problems
from tests.console.browser.test_layout import NAMES_ARE_FULL
from tests.console.live import LiveServer

TOOL = '{"name": "weather", "parameters": {"type": "object"}}'
CALL = [
    {"type": "call", "index": 0, "call_id": "call_1", "name": "weather"},
    {"type": "arguments", "index": 0, "text": '{"city": '},
    {"type": "arguments", "index": 0, "text": '"Rome"}'},
]
TOKENS = [["Yes", -0.05, [["Yes", -0.05], ["No", -3.2]]], ["<b>\n", -2.5, [["!", -0.2]]]]


def conversation_id(playground: PlaygroundPage) -> str:
    """Wait until the conversation is kept; its id."""
    playground.page.wait_for_url("**/?conversation=talk-*")
    return playground.page.url.rpartition("=")[2]


def drawer(page: Page) -> Locator:
    page.locator("#history-toggle").click()
    return page.locator("#history")


def test_a_conversation_is_kept_found_renamed_and_deleted(playground: PlaygroundPage) -> None:
    page = playground.page
    playground.answer_to("Where is Lisbon, my heron?")
    conversation_id(playground)
    page.evaluate("sessionStorage.clear()")
    page.evaluate("window.addEventListener('pagehide', () => sessionStorage.clear())")
    page.reload()
    expect(playground.answers.first.locator(".prose")).to_contain_text("my heron")
    history = drawer(page)
    history.get_by_label("Search").fill("heron nowhere")
    expect(history.get_by_text("Nothing found.")).to_be_visible()
    history.get_by_label("Search").fill("HERON")
    history.get_by_role("button", name="Rename Where is Lisbon").click()
    history.get_by_label("Title").fill("A heron's question")
    history.get_by_label("Title").press("Enter")
    expect(history.get_by_role("button", name="A heron's question", exact=True)).to_be_visible()
    assert page.title() == "A heron's question · Quire"
    with page.expect_download() as download:
        history.get_by_role("button", name="Export A heron's question as Markdown").click()
    assert download.value.suggested_filename == "A-heron-s-question.md"
    text = download.value.path().read_text(encoding="utf-8")
    assert text.startswith("# A heron's question\n\n## You\n\nWhere is Lisbon, my heron?")
    history.get_by_role("button", name="Delete A heron's question").click()
    history.get_by_role("button", name="Delete for good").click()
    expect(page.locator("#thread")).to_be_empty()
    assert "conversation=" not in page.url


def test_a_conversation_that_was_left_at_once_is_kept_on_the_way_back(
    playground: PlaygroundPage,
) -> None:
    page, address = playground.page, playground.page.url
    playground.answer_to("Which bird is a heron?")
    page.goto(f"{address}console/")
    page.goto(address)
    conversation_id(playground.ready())


#: Of this page alone: a test's clock would stop its whole context's.
NO_DELAYED_SAVE = """() => {
  const start = window.setTimeout;
  window.setTimeout = (call, ms, ...more) => (ms === 1200 ? 0 : start(call, ms, ...more));
}"""


def test_a_tab_that_is_closed_for_good_at_the_end_of_its_first_answer_loses_nothing(
    open_page: Open,
) -> None:
    remaining_page = open_page(isolated=True)
    page = remaining_page.context.new_page()
    page.goto(remaining_page.url)
    playground = PlaygroundPage(page).ready()
    page.evaluate(NO_DELAYED_SAVE)
    playground.answer_to("Which nests do storks build?")
    page.close()
    path = remaining_page.locator("#playground").get_attribute("data-conversations-url")
    listed = urljoin(remaining_page.url, f"{path}?q=nests+do+storks+build")
    deadline = time.monotonic() + 60
    while not remaining_page.request.get(listed).json()["conversations"]:
        assert time.monotonic() < deadline, "The conversation was lost."
        remaining_page.wait_for_timeout(100)


def test_conversations_are_put_into_folders_beside_the_page(open_page: Open) -> None:
    page = open_page(viewport={"width": 1680, "height": 900})
    playground = PlaygroundPage(page).ready()
    sidebar = page.locator("#history")
    expect(sidebar).to_be_visible()  # no press needed where there is room
    playground.answer_to("Which river runs through Coimbra?")
    sidebar.get_by_role("button", name="Put Which river").click()
    sidebar.get_by_label("Folder", exact=True).last.fill(" River  questions ")
    sidebar.get_by_label("Folder", exact=True).last.press("Enter")
    folder = sidebar.locator("#folder")
    folder.select_option("River questions")
    expect(sidebar.locator(".history-open")).to_have_text(["Which river runs through Coimbra?"])
    assert problems(page) == []
    sidebar.get_by_role("button", name="Close the conversations").click()
    expect(sidebar).to_be_hidden()
    page.reload()
    playground.ready()
    expect(sidebar).to_be_hidden()


def test_a_folder_is_chosen_for_one_tenant_alone(open_page: Open) -> None:
    model = {"id": "quill", "state": "ready", "load_progress": 0, "max_model_len": 4096}
    both = [{"id": "acme", "name": "Acme"}, {"id": "rival", "name": "Rival"}]
    listed = {"conversations": [], "folders": ["Rivers"], "more": False, "kept": True}
    page = open_page(
        viewport={"width": 1680, "height": 900}, answers={"/console/api/conversations": listed}
    )
    page.route(
        "**/console/api/models*",
        lambda route: route.fulfill(
            json={
                "models": [model],
                "tenants": both,
                "tenant": "rival" if "tenant=rival" in route.request.url else "acme",
            }
        ),
    )
    page.reload()
    PlaygroundPage(page).ready()
    folder = page.locator("#history #folder")
    with page.expect_request("**/console/api/conversations?*folder=Rivers*"):
        folder.select_option("Rivers")
    with page.expect_request("**/console/api/conversations?tenant=rival") as asked:
        page.get_by_label("Tenant", exact=True).select_option("rival")
    assert "folder" not in asked.value.url
    expect(folder).to_have_value("")


def test_presets_hold_settings_and_prompts_for_all_members(
    playground: PlaygroundPage, open_page: Open
) -> None:
    page = playground.page
    panel = page.locator("#settings")
    panel.get_by_label("System prompt").fill("Speak like a pirate.")
    panel.get_by_label("Temperature", exact=True).fill("0.3")
    playground.prompt.fill("Tell me about the sea.")
    panel.get_by_text("Save as a preset").click()
    panel.get_by_label("Name", exact=True).fill("Pirate")
    panel.get_by_role("button", name="Save the preset").click()
    expect(panel.get_by_text("Saved for all members of acme.")).to_be_visible()
    assert problems(page) == []
    lea = open_page("/", "lea")
    colleague = PlaygroundPage(lea).ready()
    lea.get_by_role("list", name="Prompts of your tenant").get_by_role("button").click()
    expect(colleague.prompt).to_have_value("Tell me about the sea.")
    expect(lea.get_by_label("System prompt")).to_have_value("Speak like a pirate.")
    expect(lea.get_by_role("button", name="Delete this preset")).to_be_hidden()
    assert colleague.requested()["sampling"]["temperature"] == 0.3
    olga = open_page("/", "olga")
    PlaygroundPage(olga).ready()
    expect(olga.locator("#preset")).to_be_disabled()
    panel.get_by_role("button", name="Delete this preset").click()
    panel.get_by_role("button", name="Delete for all members").click()
    expect(panel.get_by_text("Pirate was deleted.")).to_be_visible()


def test_fault_38_a_shared_link_opens_for_the_tenant_alone(
    playground: PlaygroundPage, open_page: Open, server: LiveServer
) -> None:
    page = playground.page
    playground.answer_to("For my colleagues, about the otter")
    where = f"/?conversation={conversation_id(playground)}"
    olga, root = open_page(where, "olga"), open_page(where, "root")
    for other in (olga, root):
        expect(other.get_by_text("Conversation not found.")).to_be_visible()
    history = drawer(page)
    history.get_by_label("Search").fill("otter")
    history.get_by_role("button", name="Share For my colleagues").click()
    expect(history.get_by_text("Let all members of acme read")).to_be_visible()
    olga.goto(server.url + where)
    expect(olga.get_by_text("Conversation not found.")).to_be_visible()
    history.get_by_role("button", name="Share", exact=True).click()
    expect(history.get_by_role("status")).to_contain_text("can read it")
    olga.goto(server.url + where)
    expect(olga.get_by_text("Conversation not found.")).to_be_visible()
    root.goto(server.url + where)  # who runs the installation belongs to every tenant
    expect(root.locator(".question")).to_contain_text("about the otter")
    expect(root.locator("#kept")).to_contain_text("Shared by ada")
    root.wait_for_timeout(2000)
    assert root.url.endswith(where)  # to look at it makes no copy


def test_sharing_asks_first_and_can_be_cancelled(playground: PlaygroundPage) -> None:
    playground.answer_to("About the shy badger")
    conversation_id(playground)
    history = drawer(playground.page)
    patches: list[str] = []
    playground.page.on("request", lambda sent: patches.append(sent.method))
    history.get_by_role("button", name="Share About the shy badger").click()
    history.get_by_role("button", name="Cancel").click()
    expect(history.get_by_role("button", name="Share About the shy badger")).to_be_visible()
    assert "PATCH" not in patches


def test_what_is_done_to_a_row_outlives_a_list_that_comes_late(
    playground: PlaygroundPage,
) -> None:
    page = playground.page
    playground.answer_to("Where do herons sleep?")
    conversation_id(playground)
    history = drawer(page)
    share = history.get_by_role("button", name="Share Where do herons")
    share.click()
    history.get_by_role("button", name="Share", exact=True).click()
    expect(history.get_by_role("status")).to_contain_text("can read it")
    with page.expect_response(lambda answer: "q=herons" in answer.url):
        history.get_by_label("Search").fill("herons")
        share.click()
    expect(history.get_by_role("status")).to_contain_text("No longer shared")
    with page.expect_response(lambda answer: "q=heron" in answer.url):
        history.get_by_label("Search").fill("heron")
        history.get_by_role("button", name="Rename Where do herons").click()
        history.get_by_label("Title").fill("Sleep")
    page.wait_for_timeout(300)
    page.keyboard.type("y herons")
    page.keyboard.press("Enter")
    expect(history.get_by_role("button", name="Sleepy herons", exact=True)).to_be_visible()


def test_questions_and_answers_have_branches(playground: PlaygroundPage) -> None:
    playground.answer_to("First")
    playground.answer_to("Second")
    question = playground.questions.first
    question.hover()
    question.get_by_role("button", name="Edit").click()
    question.get_by_role("textbox").fill("Changed")
    question.get_by_role("textbox").press("Enter")
    expect(playground.answers.last.locator(".prose")).to_have_text("You said: Changed")
    expect(playground.questions.first.locator(".turn-branches")).to_have_text("2 of 2")
    playground.questions.first.get_by_role("button", name="Previous version").click()
    expect(playground.questions).to_have_count(2)
    expect(playground.answers.last.locator(".prose")).to_have_text("You said: Second")
    playground.answers.last.hover()
    playground.answers.last.get_by_role("button", name="Answer again").click()
    expect(playground.answers.last.locator(".turn-branches")).to_have_text("2 of 2")
    conversation_id(playground)
    playground.page.reload()
    playground.ready()
    expect(playground.questions.first.locator(".turn-branches")).to_have_text("1 of 2")
    answer = playground.finished(playground.play(echo=True))
    expect(answer.locator(".prose")).to_contain_text(
        "roles: user, assistant, user, assistant, user"
    )


def test_several_models_answer_side_by_side(open_page: Open) -> None:
    page = open_page()
    playground = PlaygroundPage(page).ready()
    compare = page.locator("#compare")
    compare.click()
    expect(page.locator("#model-2 .picker-name")).to_have_text("acme-private")  # not "quill" again
    compare.click()
    page.get_by_role("combobox", name="Model 3").click()
    page.get_by_role("listbox", name="Models 3").get_by_text("quill", exact=True).click()
    compare.click()
    expect(compare).to_be_disabled()
    page.get_by_role("button", name="Remove model 4").click()
    playground.prompt.fill("All of you")
    playground.prompt.press("Enter")
    compared = page.locator(".compared")
    expect(compared.locator(".prose")).to_have_text(["You said: All of you"] * 3)
    expect(compared.locator(".turn-who")).to_have_text(["quill", "acme-private", "quill"])
    expect(compared.locator('[aria-busy="false"]')).to_have_count(3)
    conversation_id(playground)
    page.reload()
    playground.ready()
    expect(compared.locator(".prose")).to_have_text(["You said: All of you"] * 3)
    expect(page.locator("#columns [role=combobox]")).to_have_count(3)
    for _ in in_both(page):
        assert problems(page) == []
        expect_no_overflow(page)
    page.get_by_role("button", name="Remove model 2").click()
    page.get_by_role("button", name="Remove model 2").click()
    playground.answer_to("One alone")
    expect(compared).to_have_count(1)


def test_a_conversation_whose_model_is_gone_still_compares_the_others(open_page: Open) -> None:
    row = {"id": "talk-1", "title": "Rivers", "folder": "", "version": 1, "tenant": "acme"}
    row |= {"changed_at": "2026-01-01T00:00:00Z", "shared": False, "own": True, "by": "ada"}
    question = {"id": "a", "parent": None, "role": "user", "text": "Which river?"}
    document = {"turns": [question], "leaf": "a", "model": "gone", "compared": ["quill"]}
    listed = {"conversations": [row], "folders": [], "more": False, "kept": True}
    url = "/console/api/conversations"
    page = open_page(answers={url: listed, f"{url}/talk-1": {**row, "document": document}})
    playground = PlaygroundPage(page).ready()
    page.locator("#compare").click()
    second = page.locator("#model-2 .picker-name")
    expect(second).to_have_text("acme-private")
    drawer(page).get_by_role("button", name="Rivers", exact=True).click()
    expect(second).to_have_text("quill")
    page.reload()
    playground.ready()
    expect(second).to_have_text("quill")


def test_a_link_names_the_models_that_answer_side_by_side(open_page: Open) -> None:
    page = open_page("/?model=acme-private&compare=quill")
    playground = PlaygroundPage(page).ready()
    playground.prompt.fill("Both of you")
    playground.prompt.press("Enter")
    expect(page.locator(".compared .turn-who")).to_have_text(["acme-private", "quill"])


def test_a_link_names_an_adapter_with_its_base(open_page: Open) -> None:
    """Whatever name the list has for it."""
    models = [
        {"id": name, "parent": parent, "state": "ready", "max_model_len": 4096, "tasks": []}
        for name, parent in (("quill", ""), ("tone", "quill"))
    ]
    answer = {"models": models, "tenant": "acme", "tenants": [{"id": "acme", "name": "Acme"}]}
    link = "/?tenant=acme&model=quill&compare=quill%3Atone"
    page = open_page(link, answers={"/console/api/models": answer})
    playground = PlaygroundPage(page).ready()
    expect(page.locator("#model-2 .picker-name")).to_have_text("tone")
    playground.prompt.fill("Both of you")
    playground.prompt.press("Enter")
    expect(page.locator(".compared .turn-who")).to_have_text(["quill", "tone"])
    page.set_viewport_size(PHONE)
    page.wait_for_function(NAMES_ARE_FULL)
    expect_no_overflow(page)


def test_tools_are_called_and_the_reader_says_what_they_return(open_page: Open) -> None:
    page = open_page(viewport=PHONE)
    playground = PlaygroundPage(page).ready()
    page.get_by_role("button", name="Settings").click()
    tools, schema = (
        page.get_by_label("Tools", exact=True),
        page.get_by_label("Schema for the answer"),
    )
    for field, invalid, words in (
        (tools, "{", "This is not JSON"),
        (tools, '[{"name": "a b"}]', "Each tool needs a name"),
        (schema, "[]", "A JSON schema is an object"),
    ):
        field.fill(invalid)
        expect(page.locator("#extras").get_by_text(words)).to_be_visible()
        field.fill("")
    tools.fill(TOOL)
    schema.fill('{"type": "object"}')
    page.get_by_role("button", name="Close the settings").click()
    request = playground.requested()
    assert request["tools"] == [{"type": "function", "function": json.loads(TOOL)}]
    assert request["response_format"]["json_schema"]["schema"] == {"type": "object"}
    answer = playground.finished(playground.play(frames=CALL, reason="tool_calls"))
    expect(answer.locator(".call code")).to_have_text('weather({"city": "Rome"})')
    answer.get_by_label("Result of weather").fill('{"sky": "<b>clear</b>"}')
    for _ in in_both(page):
        assert problems(page) == []
    answer.get_by_role("button", name="Send results").click()
    prose = playground.finished(playground.answers.nth(2)).locator(".prose")
    expect(prose).to_have_text('You said: {"sky": "<b>clear</b>"}')


def test_probabilities_are_told_token_by_token(playground: PlaygroundPage) -> None:
    page = playground.page
    page.get_by_label("Show token probabilities").check()
    request = playground.requested()["sampling"]
    assert (request["logprobs"], request["top_logprobs"]) == (True, 5)
    frames = [{"type": "logprobs", "tokens": TOKENS}]
    answer = playground.finished(playground.play(text="Yes<b>", frames=frames))
    answer.hover()
    answer.get_by_role("button", name="Probabilities of the tokens").click()
    tokens = answer.locator(".token")
    expect(tokens).to_have_text(["Yes", "<b>⏎"])
    tokens.first.hover()
    expect(answer.get_by_role("tooltip")).to_contain_text("95.1 %")
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(answer.get_by_role("tooltip")).to_contain_text("8.2 %")
    assert problems(page) == []
    assert answer.locator("b").count() == 0


def test_an_answer_that_waits_for_an_engine_says_so(playground: PlaygroundPage) -> None:
    answer = playground.play(frames=[{"type": "waiting"}], pause=1.5, text="There.")
    expect(answer.get_by_text("Waiting for the engine…")).to_be_visible()
    playground.finished(answer)
    expect(answer.get_by_text("Waiting for the engine…")).to_be_hidden()


def test_the_drawer_and_the_code_are_accessible(open_page: Open) -> None:
    page = open_page()
    playground = PlaygroundPage(page).ready()
    playground.answer_to("A question for the drawer")
    conversation_id(playground)
    history = drawer(page)
    expect(
        history.get_by_role("button", name="A question for the drawer", exact=True).first
    ).to_be_visible()
    for _ in in_both(page):
        assert problems(page) == []
    history.get_by_role("button", name="Close the conversations").click()
    page.locator("#code-toggle").click()
    page.get_by_role("button", name="Python").click()
    expect(page.locator("#code code")).to_contain_text('os.environ["QUIRE_API_KEY"]')
    for _ in in_both(page):
        assert problems(page) == []


def test_without_javascript_there_is_a_sentence(open_page: Open) -> None:
    page = open_page("/", java_script_enabled=False)
    sentence = page.locator(".playground-noscript")
    expect(sentence).to_be_visible()
    expect(sentence).to_contain_text("The playground needs JavaScript")
    assert "Looking" not in page.content()


SKELETON_PX = """() => {
  const skeleton = getComputedStyle(document.querySelector("#thread"), "::before");
  return skeleton.content === "none" ? 0 : parseFloat(skeleton.height);
}"""


@pytest.mark.parametrize("link", ["/", "/?conversation=conv-none"])
def test_the_page_has_its_shape_before_the_scripts_run(open_page: Open, link: str) -> None:
    page = open_page(isolated=True)
    pending: list[Route] = []
    page.route("**/playground/main*.js", lambda route: pending.append(route))
    with page.expect_request("**/playground/main*.js"):
        page.goto(urljoin(page.url, link), wait_until="commit")
    playground = PlaygroundPage(page)
    expect(playground.prompt).to_be_visible()
    expect(page.get_by_role("group", name="Conversation", exact=True)).to_be_visible()
    heading = page.get_by_role("heading", name="What can I help with?", include_hidden=True)
    if link == "/":  # what a new conversation begins with, which can't be pressed yet
        expect(heading).to_be_visible()
        expect(page.locator("#blank[inert] .starter").first).to_be_visible()
    else:  # lines of a conversation that is on its way
        page.wait_for_function(f"() => ({SKELETON_PX})() > 100")
        expect(heading).to_be_hidden()
    assert page.locator("#playground").get_attribute("data-models") is None
    for route in pending:
        route.continue_()
    playground.ready()
    expect(page.get_by_role("heading", name="What can I help with?")).to_be_visible()
    expect(page.locator("#blank[inert]")).to_have_count(0)
    assert page.evaluate(SKELETON_PX) == 0
