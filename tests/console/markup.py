"""What a page's markup contains that a strict policy would refuse."""

from __future__ import annotations

from html.parser import HTMLParser


class _Finder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if tag == "style" or (tag == "script" and "src" not in names):
            self.problems.append(f"inline <{tag}>")
        for name, value in attrs:
            if name == "style" or name.startswith("on"):
                self.problems.append(f"<{tag} {name}>")
            if name in ("src", "href", "action") and value:
                self.addresses.append(value)
                if value.strip().lower().startswith("javascript:"):
                    self.problems.append(f"<{tag} {name}={value}>")


def inline_code(html: str) -> list[str]:
    """Inline scripts, styles, event handlers and `javascript:` addresses."""
    finder = _Finder()
    finder.feed(html)
    return finder.problems


def foreign_addresses(html: str) -> list[str]:
    """Addresses on other servers that the page loads or leads to."""
    finder = _Finder()
    finder.feed(html)
    return [a for a in finder.addresses if "//" in a.split("?")[0]]
