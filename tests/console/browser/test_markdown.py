"""The Markdown renderer alone, in the page's own modules."""

from __future__ import annotations

import random
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.browser.conftest import Open
from tests.console.browser.playground import PlaygroundPage

MODULE = "/static/console/js/markdown/stream.js"
ONCE = f"""async (text) => {{
  const {{ renderMarkdown }} = await import("{MODULE}");
  const root = document.createElement("div");
  renderMarkdown(root, text);
  for (const head of root.querySelectorAll("figcaption")) head.remove();
  for (const math of root.querySelectorAll(".math")) math.textContent = math.textContent;
  for (const node of root.querySelectorAll("*"))
    for (const name of node.getAttributeNames())
      if (!["href", "class", "start"].includes(name) || !node.getAttribute(name))
        node.removeAttribute(name);
  root.normalize();
  return root.innerHTML;
}}"""
COMPARE = f"""async (cases) => {{
  const {{ MarkdownStream, renderMarkdown }} = await import("{MODULE}");
  const wrong = [];
  for (const [text, cuts] of cases) {{
    const once = document.createElement("div");
    renderMarkdown(once, text);
    const root = document.createElement("div");
    const stream = new MarkdownStream(root);
    let from = 0;
    for (const cut of [...cuts, text.length]) {{
      stream.write(text.slice(from, cut));
      stream.flush();
      from = cut;
    }}
    stream.end();
    once.normalize();
    root.normalize();
    if (!once.isEqualNode(root)) wrong.push([text, once.innerHTML, root.innerHTML]);
  }}
  return wrong;
}}"""

CASES = {
    "Hello": "<p>Hello</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A\n### B ##\ntext": "<h1>A</h1><h3>B</h3><p>text</p>",
    "#no heading": "<p>#no heading</p>",
    "**b** *i* ***bi*** ~~d~~ __b__ _i_": (
        "<p><strong>b</strong> <em>i</em> <em><strong>bi</strong></em> <s>d</s> "
        "<strong>b</strong> <em>i</em></p>"
    ),
    "**bold with *inner* words**": "<p><strong>bold with <em>inner</em> words</strong></p>",
    "2 * 3 * 4, a * b, snake_case_name": "<p>2 * 3 * 4, a * b, snake_case_name</p>",
    "中文**重要**です": "<p>中文<strong>重要</strong>です</p>",
    "**never closed and `open": "<p>**never closed and `open</p>",
    "`a < b` and ``x ` y``": "<p><code>a &lt; b</code> and <code>x ` y</code></p>",
    "`**not bold**`": "<p><code>**not bold**</code></p>",
    r"\*plain\* \[x\]": "<p>*plain* [x]</p>",
    "- a\n- b\n  - c\n- d": (
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>"
    ),
    "1. a\n  - b\n2. c": (
        '<ol><li><p>a</p></li></ol><ul><li><p>b</p></li></ul><ol start="2"><li><p>c</p></li></ol>'
    ),
    "3. a\n\n   more\n4. b": '<ol start="3"><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>',
    "in\n1986. what": "<p>in<br>1986. what</p>",
    "&copy; &lt;b&gt;": "<p>© &lt;b&gt;</p>",
    "[a] and\n\n[a]: https://e.org": '<p><a href="https://e.org/">a</a> and</p>',
    "- [x] done\n- [ ] to do": (
        '<ul><li class="task"><p><span class="task-box">☑</span>done</p></li>'
        '<li class="task"><p><span class="task-box">☐</span>to do</p></li></ul>'
    ),
    "$x^2$ costs $5 and $6, \\(y\\)": (
        '<p><span class="math">$x^2$</span> costs $5 and $6, <span class="math">\\(y\\)</span></p>'
    ),
    "a\n$$\nx\n$$\nb": '<p>a</p><span class="math display">$$\nx\n$$</span><p>b</p>',
    "    four spaces": '<figure class="code"><pre><code>four spaces</code></pre></figure>',
    "![p](https://e.org/p.png)": '<p><a href="https://e.org/p.png">p</a></p>',
    "> a\n> b\nlazy\n\nout": "<blockquote><p>a<br>b<br>lazy</p></blockquote><p>out</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "```py\nif a:\n\n    b()\n```\nend": (
        '<figure class="code"><pre><code>if a:\n\n    b()</code></pre></figure><p>end</p>'
    ),
    "~~~\n```\n~~~": '<figure class="code"><pre><code>```</code></pre></figure>',
    "1. x\n   ```\n   y\n     z\n   ```": (
        '<ol><li><p>x</p><figure class="code"><pre><code>y\n  z</code></pre></figure></li></ol>'
    ),
    "```\nnever closed": '<figure class="code"><pre><code>never closed</code></pre></figure>',
    "| a | b |\n|:--|--:|\n| 1 | `x\\|y` |": (
        '<div class="table"><table><thead><tr><th>a</th><th class="end">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="end"><code>x|y</code></td></tr></tbody></table></div>'
    ),
    "a | b\nno table": "<p>a | b<br>no table</p>",
    "[x](https://e.org 'title')": '<p><a href="https://e.org/">x</a></p>',
    "see https://e.org/a, then": '<p>see <a href="https://e.org/a">https://e.org/a</a>, then</p>',
}
FRAGMENTS = [
    "*",
    "**",
    "_",
    "`",
    "```",
    "~~~",
    "\n",
    "\n\n",
    "- ",
    "1. ",
    "> ",
    "# ",
    " ",
    "a",
    "b c",
]
FRAGMENTS += ["$", "$$", "[x] ", "[k]: http://q.z", "[k]"]
FRAGMENTS += [
    "[",
    "](https://x.y)",
    "~~",
    "|",
    "|-|-|\n",
    "<i>",
    "http://q.z",
    "  ",
    "\\",
    "!",
    "é🙂",
]


@pytest.fixture(scope="module")
def page(browser: Any, server: Any) -> Any:
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(f"{server.url}/login/")
    yield opened
    context.close()


@pytest.mark.parametrize("text", CASES)
def test_it_renders(page: Page, text: str) -> None:
    assert page.evaluate(ONCE, text) == CASES[text]


def test_how_the_text_was_cut_makes_no_difference(page: Page) -> None:
    dice = random.Random(7)
    cases = []
    for _ in range(400):
        text = "".join(dice.choice(FRAGMENTS) for _ in range(dice.randint(3, 60)))
        cases.append([text, list(range(1, len(text)))])
    for text in CASES:
        cases.append([text, list(range(1, len(text)))])
    assert page.evaluate(COMPARE, cases) == []


def test_nor_does_it_where_text_is_settled_before_its_block_ends(page: Page) -> None:
    dice = random.Random(11)
    cases = []
    for _ in range(12):
        words = dice.choices(
            ["word", "**bold**", "*it", "`code`", "🙂", "h_h", "[x](http://y.z)"], k=900
        )
        text = " ".join(words) + "\n\n" + "x" * 700 + "\n" + "-" * 600 + "tail"
        cases.append([text, sorted(dice.sample(range(1, len(text)), 200))])
    assert page.evaluate(COMPARE, cases) == []


def test_what_is_open_is_shown_as_if_it_were_closed(page: Page) -> None:
    """No marker flashes up while its span is being written."""
    rendered = page.evaluate(
        f"""async () => {{
          const {{ MarkdownStream }} = await import("{MODULE}");
          const seen = [];
          for (const text of ["a **bo", "a **", "`co", "- ", "- x", "``", "[lab](http", "# T"]) {{
            const root = document.createElement("div");
            const stream = new MarkdownStream(root);
            stream.write(text);
            stream.flush();
            seen.push(root.innerHTML.replaceAll(' dir="auto"', ""));
          }}
          return seen;
        }}"""
    )
    assert rendered == [
        "<p>a <strong>bo</strong></p>",
        "<p>a</p>",
        "<p><code>co</code></p>",
        "<ul><li></li></ul>",
        "<ul><li><p>x</p></li></ul>",
        "",
        "<p>lab</p>",
        "<h1>T</h1>",
    ]


def test_a_long_answer_is_not_rendered_again_and_again(page: Page) -> None:
    """Four times the text makes about four times the nodes, not sixteen times."""
    timings = page.evaluate(
        f"""async () => {{
          const {{ MarkdownStream }} = await import("{MODULE}");
          const count = async (pieces, piece) => {{
            const root = document.createElement("div");
            let added = 0;
            const watch = new MutationObserver((all) => {{
              for (const each of all) added += each.addedNodes.length;
            }});
            watch.observe(root, {{ childList: true, subtree: true }});
            const stream = new MarkdownStream(root);
            for (let i = 0; i < pieces; i += 1) {{
              stream.write(piece(i));
              stream.flush();
            }}
            stream.end();
            await new Promise((done) => setTimeout(done));
            return added;
          }};
          const found = [];
          for (const piece of [
            (i) => `word ${{i}} **bold** `,
            (i) => (i % 10 ? "word " : "\\n\\n- item "),
            (i) => (i ? "code line\\n" : "```\\n"),
          ]) found.push([await count(250, piece), await count(1000, piece)]);
          return found;
        }}"""
    )
    for few, many in timings:
        assert many < 6 * few + 100, timings


def test_elements_of_finished_blocks_are_never_replaced(page: Page) -> None:
    survives = page.evaluate(
        f"""async () => {{
          const {{ MarkdownStream }} = await import("{MODULE}");
          const root = document.createElement("div");
          const stream = new MarkdownStream(root);
          stream.write("# One\\n\\npara\\n\\n```\\ncode\\n```\\n\\nlast");
          stream.flush();
          const before = [...root.children].slice(0, 3);
          const inside = before.map((each) => each.firstChild);
          for (const piece of [" words", "\\n\\n- a", "\\n- b", "\\n\\nend"]) {{
            stream.write(piece);
            stream.flush();
          }}
          stream.end();
          const now = [...root.children];
          return before.every((each, i) => now[i] === each && each.firstChild === inside[i]);
        }}"""
    )
    assert survives


def test_a_line_that_grows_keeps_its_elements(page: Page) -> None:
    """Or a selection in it would be lost with every token."""
    survivals = page.evaluate(
        f"""async () => {{
          const {{ MarkdownStream }} = await import("{MODULE}");
          const found = [];
          for (const [start, tag] of [["Hello", "p"], ["> - it", "p"], ["## Hea", "h2"]]) {{
            const root = document.createElement("div");
            const stream = new MarkdownStream(root);
            stream.write(start);
            stream.flush();
            const leaf = root.querySelector(tag);
            const text = leaf.firstChild;
            for (const piece of [" wor", "ld and **more", "** of it", "\\n", "\\nend"]) {{
              stream.write(piece);
              stream.flush();
            }}
            stream.end();
            found.push(root.querySelector(tag) === leaf && leaf.firstChild === text);
          }}
          return found;
        }}"""
    )
    assert survivals == [True, True, True]


def test_the_page_of_the_renderer_is_really_ours(open_page: Open) -> None:
    """Guards the fixture above: its modules come from the server under its strict policy."""
    page = open_page("/login/", None)
    assert page.evaluate(ONCE, "**x**") == "<p><strong>x</strong></p>"


def test_a_vector_has_its_arrow_and_needs_no_inline_style(playground: PlaygroundPage) -> None:
    prose = playground.finished_text("$\\vec{x}$ and $$\\frac{\\sqrt{a}}{b}$$")
    expect(prose.locator("math mover mo").first).to_have_text("\u20d7")
    expect(prose.locator("math mfrac msqrt")).to_have_count(1)
    assert prose.locator(".math [style]").count() == 0
