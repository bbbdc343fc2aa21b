"""The playground as a test uses it."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Locator, Page, expect


class PlaygroundPage:
    """Reading and writing, by what a person (or their screen reader) finds on the page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.prompt = page.get_by_role("textbox", name="Message", exact=True)
        self.answers = page.locator(".answer")
        self.questions = page.locator(".question")
        self.error = page.locator(".notice.error")

    def ready(self) -> PlaygroundPage:
        """Wait until models are known and the socket is open."""
        expect(self.page.locator("#playground")).to_have_attribute("data-models", "known")
        expect(self.page.locator("#connection")).to_have_attribute("data-state", "open")
        return self

    def send(self, text: str) -> Locator:
        """Write a message, press Enter; the answer that grows."""
        count = self.answers.count()
        self.prompt.fill(text)
        self.prompt.press("Enter")
        return self.answers.nth(count)

    def play(self, **script: Any) -> Locator:
        """Have the server play a script (see `scripted_asgi`)."""
        return self.send(json.dumps(script))

    def finished(self, answer: Locator) -> Locator:
        """Wait for the answer's end."""
        expect(answer).to_have_attribute("aria-busy", "false")
        return answer

    def answer_to(self, text: str) -> Locator:
        """The finished answer to a message."""
        return self.finished(self.send(text))

    def finished_text(self, text: str) -> Locator:
        """The prose of a finished answer whose source is `text`."""
        return self.finished(self.play(text=text)).locator(".prose")

    def requested(self) -> dict[str, Any]:
        """What the page sends as a request, as the server got it."""
        answer = self.finished(self.play(echo=True))
        return json.loads(answer.locator("code").inner_text())
