"""Pieces of pages: `{% icon "send" %}`, `{% empty "key" "No key yet" %}…{% endempty %}`."""

from django import template
from django.templatetags.static import static
from django.utils.html import format_html
from django.utils.safestring import SafeString

register = template.Library()


@register.simple_tag
def icon(name: str) -> SafeString:
    """One of the pictures of `icons.svg`. Decoration only: whatever it's in needs its own name."""
    sprite = static("console/icons.svg")
    return format_html(
        '<svg class="icon" aria-hidden="true"><use href="{}#{}"></use></svg>', sprite, name
    )


@register.simple_block_tag
def empty(content: SafeString, picture: str, title: str) -> SafeString:
    """What stands where nothing is yet: what would be there, and how it gets there."""
    return format_html(
        '<div class="empty">{}<h3>{}</h3><p>{}</p></div>', icon(picture), title, content
    )
