"""Pieces of pages: `{% icon "send" %}`, `{% empty_state "key" "No key yet" %}…{% endempty_state
%}`,
`{% module_script "console/js/x.js" %}`, `{% styles "frame" %}`.
"""

import re
from decimal import Decimal
from functools import cache
from pathlib import Path
from urllib.parse import urljoin

from django import template
from django.contrib.staticfiles import finders
from django.templatetags.static import static
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from console.static_bundles import sheet_address

register = template.Library()


@register.simple_tag
def icon(name: str) -> SafeString:
    """One of the pictures of `icons.svg`. Decoration only: whatever it's in needs its own name."""
    sprite = static("console/icons.svg")
    return format_html(
        '<svg class="icon" aria-hidden="true"><use href="{}#{}"></use></svg>', sprite, name
    )


@register.simple_block_tag
def empty_state(content: SafeString, picture: str, title: str) -> SafeString:
    """What stands where nothing is yet: what would be there, and how it gets there."""
    return format_html(
        '<div class="empty">{}<h3>{}</h3><p>{}</p></div>', icon(picture), title, content
    )


@register.filter
def inline_code(text: str) -> SafeString:
    """Text in which what stands between pairs of `backticks` is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one is without its other
        return format_html("{}", text)
    shapes = ("{}", "<code>{}</code>")
    pieces = [format_html(shapes[at % 2], part) for at, part in enumerate(parts)]
    return format_html_join("", "{}", ((piece,) for piece in pieces))


#: What a browser calls itself -> what people call it: those that also claim to be another first.
BROWSERS = {"Edg": "Edge", "OPR": "Opera", "Firefox": "Firefox", "FxiOS": "Firefox"}
BROWSERS |= {"HeadlessChrome": "Chrome", "CriOS": "Chrome", "Chrome": "Chrome"}
BROWSERS |= {"Version": "Safari"}
SYSTEMS = {"Windows": "Windows", "iPhone": "iPhone", "iPad": "iPad", "Android": "Android"}
SYSTEMS |= {"Mac OS X": "macOS", "CrOS": "ChromeOS", "Linux": "Linux"}


@register.filter
def browser(agent: str) -> str:
    """A `User-Agent` for people, such as "Firefox 140 on Windows"; the first words of others."""
    found = (re.search(rf"\b{name}/(\d+)", agent) for name in BROWSERS)
    known = next((f"{BROWSERS[each[0].partition('/')[0]]} {each[1]}" for each in found if each), "")
    system = next((called for name, called in SYSTEMS.items() if name in agent), "")
    if not known:
        return agent[:60]
    return f"{known} on {system}" if system else known


@register.filter
def money(amount: Decimal | str) -> str:
    """An amount for people: to the hundredth, or four digits more where it's a price or small."""
    number = Decimal(amount)
    if abs(number) >= Decimal("0.01"):
        number = round(number, 4)
    whole, _, part = f"{number:f}".partition(".")
    return f"{whole}.{part.rstrip('0').ljust(2, '0')}"


IMPORT = re.compile(r'^(?:import|export)\b[^"]*?"(\.[^"]+)";$', re.MULTILINE)


@register.simple_tag
def module_script(name: str) -> SafeString:
    """A script of the page, and a word on each that it imports: they're asked for all at once."""
    links = ((static(each),) for each in imported(name))
    preloads = format_html_join(
        "\n", '<link rel="modulepreload" fetchpriority="low" href="{}">', links
    )
    return format_html('{}\n<script type="module" src="{}"></script>', preloads, static(name))


@register.simple_tag
def styles(name: str) -> SafeString:
    """Sheets of `console.static_bundles`, as one."""
    return format_html('<link rel="stylesheet" href="{}">', sheet_address(name))


@register.simple_tag
def styles_address(name: str) -> str:
    """Where that is."""
    return sheet_address(name)


@register.simple_block_tag
def defer_scripts(content: SafeString) -> SafeString:
    """Markup whose scripts run when the page is there, in their order: none holds up its paint."""
    return mark_safe(content.replace("<script src=", "<script defer src="))  # noqa: S308 - ours


@cache
def imported(name: str) -> tuple[str, ...]:
    """The modules below `static/` that one imports, those that they import included."""
    found: dict[str, None] = {}
    waiting = [name]
    while waiting:
        source = finders.find(here := waiting.pop())
        for each in IMPORT.findall(Path(str(source)).read_text(encoding="utf-8")) if source else ():
            other = urljoin(f"/{here}", each).lstrip("/")
            if other not in found and other != name:
                found[other] = None
                waiting.append(other)
    return tuple(found)
