"""Pictures in the playground: chosen, pasted, dropped, sent, and seen again."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

from PIL import Image
from playwright.sync_api import Locator, Response, expect

from tests.console.browser.conftest import Open, expect_no_overflow
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.test_accessibility import in_both, problems

TENANT = {"tenant": "acme", "tenants": [{"id": "acme", "name": "Acme"}]}
SEEING = {"id": "quill", "state": "ready", "max_model_len": 4096, "tasks": [], "max_images": 3}
BLIND = SEEING | {"id": "blind", "max_images": 0}
#: Gives the field a picture as a browser does; whether the page left it to the browser.
GIVE = """(field, [type, data, name]) => {
    const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
    const transfer = new DataTransfer();
    const kind = name.endsWith("png") ? "image/png" : "text/plain";
    transfer.items.add(new File([bytes], name, { type: kind }));
    const event = type === "paste"
        ? new ClipboardEvent(type, { clipboardData: transfer, bubbles: true, cancelable: true })
        : new DragEvent(type, { dataTransfer: transfer, bubbles: true, cancelable: true });
    return field.dispatchEvent(event);
}"""


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40), colour).save(buffer, "PNG")
    return buffer.getvalue()


def give(
    playground: PlaygroundPage, how: str, name: str = "given.png", data: bytes | None = None
) -> None:
    encoded = base64.b64encode(png("navy") if data is None else data).decode()
    assert playground.prompt.evaluate(GIVE, [how, encoded, name]) is False


def expect_drawn(pictures: Locator, count: int) -> None:
    """Thumbnails that the browser could read."""
    expect(pictures).to_have_count(count)
    for picture in pictures.all():
        picture.scroll_into_view_if_needed()
        picture.evaluate("image => image.decode()")


def num_saved_turns(answer: Response) -> int:
    """Turns of the conversation that a response says is saved; 0: it's another response."""
    if "/api/conversations" not in answer.url or answer.request.method == "GET":
        return 0
    return len(answer.request.post_data_json["document"]["turns"])


def answers(*models: dict[str, Any]) -> dict[str, Any]:
    return {"/console/api/models": {"models": list(models), **TENANT}}


def test_pictures_are_attached_sent_and_seen_again(open_page: Open) -> None:
    page = open_page(answers=answers(SEEING))
    playground = PlaygroundPage(page).ready()
    send = page.get_by_role("button", name="Send", exact=True)
    files = [
        {"name": f"{colour}.png", "mimeType": "image/png", "buffer": png(colour)}
        for colour in ("red", "green")
    ]
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach pictures or PDFs").click()
    chooser.value.set_files(files)
    give(playground, "paste")
    attached = page.locator("#composer .pictures img")
    expect_drawn(attached, 3)
    give(playground, "drop")
    expect(page.locator("#toast")).to_contain_text("At most 3 pictures")
    page.get_by_role("button", name="Remove green.png").click()
    expect(attached).to_have_count(2)
    give(playground, "drop", "notes.txt")
    expect(page.locator("#toast")).to_contain_text("Only pictures and PDFs can be attached")
    for _ in in_both(page):
        assert problems(page) == []
    playground.finished(playground.send("What are these?"))
    prose = playground.answers.first.locator(".prose")
    expect(prose).to_have_text("You said: 2 pictures, What are these?")
    expect(attached).to_have_count(0)
    expect(send).to_be_disabled()
    give(playground, "drop")
    expect_drawn(attached, 1)
    # A slow machine saves after each of the two answers: what is opened again must be the second.
    with page.expect_response(lambda answer: num_saved_turns(answer) == 4, timeout=60_000):
        send.click()  # a picture alone is a message
        prose = playground.answers.last.locator(".prose")
        expect(prose).to_have_text("You said: 1 pictures, no text")
    page.wait_for_url("**/?conversation=talk-*")
    page.evaluate("window.addEventListener('pagehide', () => sessionStorage.clear())")
    page.reload()
    expect_drawn(playground.questions.locator("img"), 3)
    for _ in in_both(page):
        assert problems(page) == []
        expect_no_overflow(page)


def test_an_edited_question_is_about_the_same_pictures(open_page: Open) -> None:
    playground = PlaygroundPage(open_page(answers=answers(SEEING))).ready()
    give(playground, "paste")
    expect_drawn(playground.page.locator("#composer .pictures img"), 1)
    playground.answer_to("What is this?")
    playground.prompt.press("ArrowUp")
    playground.questions.first.get_by_role("textbox").fill("What colour is it?")
    playground.questions.first.get_by_role("button", name="Send again").click()
    prose = playground.answers.first.locator(".prose")
    expect(prose).to_have_text("You said: 1 pictures, What colour is it?")
    expect_drawn(playground.questions.locator("img"), 1)


def test_a_model_that_takes_no_pictures_says_so(open_page: Open) -> None:
    page = open_page(answers=answers(SEEING, BLIND))
    playground = PlaygroundPage(page).ready()
    give(playground, "paste")
    expect_drawn(page.locator("#composer .pictures img"), 1)
    playground.prompt.fill("What is this?")
    page.locator("#model").click()
    expect(page.get_by_role("option", name="quill")).to_contain_text("4,096 tokens, pictures")
    expect(page.get_by_role("option", name="blind")).not_to_contain_text("pictures")
    page.get_by_role("option", name="blind").click()
    expect(page.get_by_text("blind takes no pictures. Remove them")).to_be_visible()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
    expect(page.get_by_role("button", name="Attach PDFs", exact=True)).to_be_visible()
    for _ in in_both(page):
        assert problems(page) == []
    page.get_by_role("button", name="Remove given.png").click()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    for how in ("drop", "paste"):
        give(playground, how)
        expect(page.locator("#toast")).to_contain_text("blind takes no pictures.")
        page.evaluate("document.getElementById('toast').hidden = true")


def test_a_picture_that_is_refused_says_why(open_page: Open) -> None:
    page = open_page(answers=answers(SEEING))
    playground = PlaygroundPage(page).ready()
    refusal = {"error": {"message": "The tenant's files are full.", "code": "storage_full"}}
    page.route("**/console/api/pictures*", lambda route: route.fulfill(status=413, json=refusal))
    give(playground, "paste")
    expect(page.locator("#toast")).to_contain_text(
        "given.png can't be attached: The tenant's files"
    )
    expect(page.locator("#composer .picture")).to_have_count(0)


def test_a_pdf_goes_to_any_model_and_is_seen_again(open_page: Open) -> None:
    page = open_page(answers=answers(BLIND))
    playground = PlaygroundPage(page).ready()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach PDFs", exact=True).click()
    chooser.value.set_files(
        [{"name": "report.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.7"}]
    )
    expect(page.locator("#composer .picture")).to_have_attribute("aria-busy", "false")
    for _ in in_both(page):
        assert problems(page) == []
    playground.finished(playground.send("What does it say?"))
    prose = playground.answers.first.locator(".prose")
    expect(prose).to_have_text("You said: file report.pdf, What does it say?")
    element = playground.questions.first.get_by_role("link", name="report.pdf")
    expect(element).to_have_attribute("href", re.compile("/console/files/file-.*tenant=acme"))
    for _ in in_both(page):
        assert problems(page) == []
