"""Texts of the reference: what stands between backticks is code, and nothing in it is markup."""

import pytest

from console.templatetags.console import inline_code


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "plain"),
        ("with `n` and `m`", "with <code>n</code> and <code>m</code>"),
        ("`n`", "<code>n</code>"),
        ("an odd ` one", "an odd ` one"),
        ("`a` and an odd ` one", "`a` and an odd ` one"),
        ("<b> `<script>`", "&lt;b&gt; <code>&lt;script&gt;</code>"),
    ],
)
def test_backticks_make_code_where_they_come_in_pairs(text: str, html: str) -> None:
    assert inline_code(text) == html
