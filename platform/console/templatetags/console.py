"""Template tags and filters of the console, such as `{% icon "send" %}`."""

import re
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from urllib.parse import urljoin

from django import template
from django.conf import settings
from django.contrib.staticfiles import finders
from django.templatetags.static import static
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from console.static_bundles import sheet_address
from metering.money import amount_text

register = template.Library()


@register.simple_tag
def icon(name: str) -> SafeString:
    """An icon of `icons.svg`, hidden from assistive technology."""
    sprite = static("console/icons.svg")
    return format_html(
        '<svg class="icon" aria-hidden="true"><use href="{}#{}"></use></svg>', sprite, name
    )


@register.simple_block_tag
def empty_state(content: SafeString, picture: str, title: str) -> SafeString:
    """Placeholder of an empty list: `{% empty_state "key" "No key yet" %}…{% endempty_state %}`."""
    return format_html(
        '<div class="empty">{}<h3>{}</h3><p>{}</p></div>', icon(picture), title, content
    )


@register.filter
def inline_code(text: str) -> SafeString:
    """Render text between pairs of `backticks` as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick
        return format_html("{}", text)
    formats = ("{}", "<code>{}</code>")
    rendered = (format_html(formats[index % 2], part) for index, part in enumerate(parts))
    return format_html_join("", "{}", ((part,) for part in rendered))


#: `User-Agent` token -> browser; browsers whose token list includes another's come first.
BROWSERS = {"Edg": "Edge", "OPR": "Opera", "Firefox": "Firefox", "FxiOS": "Firefox"}
BROWSERS |= {"HeadlessChrome": "Chrome", "CriOS": "Chrome", "Chrome": "Chrome"}
BROWSERS |= {"Version": "Safari"}
SYSTEMS = {"Windows": "Windows", "iPhone": "iPhone", "iPad": "iPad", "Android": "Android"}
SYSTEMS |= {"Mac OS X": "macOS", "CrOS": "ChromeOS", "Linux": "Linux"}


@register.filter
def browser(agent: str) -> str:
    """A readable `User-Agent`, such as "Firefox 140 on Windows"; others are truncated."""
    matches = (re.search(rf"\b{name}/(\d+)", agent) for name in BROWSERS)
    product = next(
        (f"{BROWSERS[match[0].partition('/')[0]]} {match[1]}" for match in matches if match), ""
    )
    system = next((label for name, label in SYSTEMS.items() if name in agent), "")
    if not product:
        return agent[:60]
    return f"{product} on {system}" if system else product


@register.filter
def moment(time: datetime | None) -> str:
    """A time in UTC, which `frame.js` shows in the reader's time zone; "" for None."""
    if not time:
        return ""
    utc = time.astimezone(UTC)
    text = f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    return format_html('<time datetime="{}">{}</time>', utc.isoformat(timespec="seconds"), text)


@register.filter
def cost(nanos: int) -> str:
    """An amount in 1e-9 of the currency, with the currency: "0.0012 USD"."""
    return f"{money(amount_text(nanos))} {settings.QUIRE.currency.upper()}"


@register.filter
def money(amount: Decimal | str) -> str:
    """An amount with two to four decimals, or all of them below 0.01."""
    number = Decimal(amount)
    if abs(number) >= Decimal("0.01"):
        number = round(number, 4)
    integer, _, part = f"{number:f}".partition(".")
    return f"{integer}.{part.rstrip('0').ljust(2, '0')}"


IMPORT = re.compile(r'^(?:import|export)\b[^"]*?"(\.[^"]+)";$', re.MULTILINE)


@register.simple_tag
def module_script(name: str) -> SafeString:
    """A module script with preloads of all modules that it imports."""
    links = ((static(module),) for module in imported(name))
    preloads = format_html_join(
        "\n", '<link rel="modulepreload" fetchpriority="low" href="{}">', links
    )
    return format_html('{}\n<script type="module" src="{}"></script>', preloads, static(name))


@register.simple_tag
def styles(name: str) -> SafeString:
    """Link to a bundle of `console.static_bundles`."""
    return format_html('<link rel="stylesheet" href="{}">', sheet_address(name))


@register.simple_tag
def styles_address(name: str) -> str:
    """URL path of a bundle."""
    return sheet_address(name)


@register.simple_block_tag
def defer_scripts(content: SafeString) -> SafeString:
    """Add `defer` to the scripts in the content."""
    return mark_safe(content.replace("<script src=", "<script defer src="))  # noqa: S308 - ours


@cache
def imported(name: str) -> tuple[str, ...]:
    """Modules below `static/` that a module imports, directly or indirectly."""
    modules: dict[str, None] = {}
    pending = [name]
    while pending:
        path = finders.find(importer := pending.pop())
        text = Path(str(path)).read_text(encoding="utf-8") if path else ""
        for address in IMPORT.findall(text):
            module = urljoin(f"/{importer}", address).lstrip("/")
            if module not in modules and module != name:
                modules[module] = None
                pending.append(module)
    return tuple(modules)
