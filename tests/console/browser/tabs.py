"""Tabs that tests share, so that what one has loaded another needn't."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Browser, BrowserContext

#: The last thing that a page does.
FORGET = "addEventListener('pagehide', () => (localStorage.clear(), sessionStorage.clear()))"
#: A page that does nothing.
NOTHING = "/static/console/favicon.svg"


class Tab:
    """A tab that tests use one after the other, each on pages that it loads: scripts and fonts are
    there already, which halves what a page costs. What a page keeps is gone with the page.
    """

    def __init__(self, context: BrowserContext) -> None:
        context.set_default_timeout(60_000)
        self.page, self.problems = context.new_page(), list[str]()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: _record(message, self.problems))

    def set_viewport(self, viewport: Any, **media: Any) -> None:
        """From now on, at this size and in this theme."""
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(**{"reduced_motion": "no-preference", **media})

    def tidy(self) -> None:
        """As new, once the page is left, but for what it has loaded."""
        for page in self.page.context.pages:
            if page is not self.page:
                page.close()
        self.page.unroute_all()
        self.page.evaluate(FORGET)  # the playground itself keeps something when it's left

    def close(self) -> None:
        """With what it has kept."""
        self.page.evaluate("localStorage.clear()")
        self.page.close()


class Tabs:
    """One for each user and kind of device, in a context of its own. Sizes and themes share it."""

    def __init__(self, browser: Browser, sessions: dict[str, Any], url: str) -> None:
        self._browser, self._sessions, self._url = browser, sessions, url
        self._shared: dict[tuple[str, str], Tab] = {}
        self._used: list[Tab] = []
        self._previous: list[Tab] = []

    def of(self, user: str, device: dict[str, Any], isolated: bool = False) -> Tab:
        """The user's, logged in. One for this test only if it's `isolated` or
        the other is taken."""
        key = user, repr(sorted(device.items()))
        tab = self._shared.get(key)
        if tab is None or tab.page.is_closed():
            tab = self._shared[key] = Tab(self._browser.new_context(**device))
        if isolated or tab in self._used:
            tab = Tab(tab.page.context)
        tab.page.context.add_cookies(self._sessions[user]["cookies"])
        self._used.append(tab)
        self._leave([item for item in self._previous if item is not tab])
        return tab

    def _leave(self, tabs: list[Tab]) -> None:
        """Or their pages would go on asking for news."""
        for tab in tabs:
            tab.page.goto(self._url + NOTHING)
        self._previous = []

    def tidy(self) -> list[str]:
        """For the next test; what went wrong in this one."""
        used, self._used = self._used, []
        problems = [problem for tab in used for problem in tab.problems]
        self._previous = [tab for tab in used if tab in self._shared.values()]
        for tab in used:
            if tab in self._previous:
                tab.tidy()
            else:
                tab.close()
        return problems

    def close(self) -> None:
        """All of them."""
        for tab in self._shared.values():
            tab.page.context.close()


def _record(message: Any, problems: list[str]) -> None:
    if "Content Security Policy" in message.text or "TrustedHTML" in message.text:
        problems.append(message.text)
