"""Fault 37: whatever a model writes is shown, and nothing of it runs, loads or pretends."""

from __future__ import annotations

from html import unescape

from playwright.sync_api import Browser, Request, expect

from tests.console.browser.playground import PlaygroundPage
from tests.console.live import LiveServer

#: Texts that must come out as they went in, as text.
TRICKS = {
    "script": "<script>window.hit = 1</script>",
    "event handler": '<img src=x onerror="window.hit = 1">',
    "svg": "<svg onload=window.hit=1><a xlink:href=javascript:alert(1)>x</a></svg>",
    "iframe": "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "style": "<style>* { display: none }</style>",
    "form": "<form action=https://evil.example><input name=password></form>",
    "meta": "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "base": "<base href=https://evil.example/>",
    "comment": "<!-- --><script>window.hit = 1</script><!-- -->",
    "template": "{{ 7 * 7 }} ${7 * 7} <%= 7 * 7 %>",
    "entities": "&lt;b&gt; &amp;amp; &#60;script&#62; &nbsp;",
    "javascript link": "[press me](javascript:window.hit=1)",
    "javascript link in disguise": "[press me](java\u200bscript:window.hit=1)",
    "javascript link with entities": "[press me](&#106;avascript:window.hit=1)",
    "data link": "[press me](data:text/html,<script>window.hit=1</script>)",
    "vbscript link": "[press me](vbscript:msgbox)",
    "file link": "[press me](file:///etc/passwd)",
    "relative link": "[press me](/logout/)",
    "protocol-relative link": "[press me](//evil.example/)",
    "link that hides its host": "[bank](https://bank.example@evil.example/)",
    "autolink": "<javascript:window.hit=1>",
    "katex href": "$\\href{javascript:window.hit=1}{x}$",
    "katex html": "$$\\htmlData{x=1}{y} \\includegraphics{https://evil.example/x.png}$$",
    "katex url": "$\\url{javascript:window.hit=1}$",
    "mathml": "<math><mtext><script>window.hit=1</script></mtext></math>",
    "front matter": "+++ title = 'x' +++",
    "footnote": "[^1]: <script>window.hit=1</script>",
    "unclosed": '<a href="javascript:window.hit=1">',
    "null": "a\u0000b<script\u0000>window.hit=1</script>",
}
#: What Markdown takes away from a text that it shows: the backslash of an escape.
ESCAPES = str.maketrans("", "", "\\")


def as_displayed(trick: str) -> str:
    """Entities are the characters that they stand for, and NUL is what Unicode says for it."""
    return unescape(trick).replace("\0", "\ufffd").translate(ESCAPES)


def test_fault_37_tricks_stay_text(playground: PlaygroundPage) -> None:
    page = playground.page
    requests: list[str] = []

    def record_request(request: Request) -> None:
        requests.append(request.url)

    page.on("request", record_request)
    for name, trick in TRICKS.items():
        prose = playground.finished_text(trick)
        text = prose.evaluate("e => e.textContent")
        assert text.translate(ESCAPES) == as_displayed(trick), name
        references = prose.evaluate(
            "e => [...e.querySelectorAll('*')].map(n => n.href || n.localName)"
        )
        # An address of the web may be linked to wherever it stands, inside a tag that's text too.
        odd = {text for text in references if not text.endswith(".example/")}
        odd -= {text for text in references if text.startswith("https://evil.example/")}
        assert odd <= {"p", "br"}, (name, odd)
    page.remove_listener("request", record_request)
    assert page.evaluate("window.hit") is None
    host = page.url.split("/")[2]
    assert [url for url in requests if host not in url] == []


def test_fault_37_a_trick_that_is_cut_into_pieces_stays_text(
    playground: PlaygroundPage,
) -> None:
    trick = "a <img src=x onerror=window.hit=1> [x](javascript:window.hit=1) `<b>`"
    for cut in (1, 3):
        answer = playground.finished(playground.play(text=trick, cut=cut, pause=0.01))
        prose = answer.locator(".prose")
        assert prose.evaluate("e => e.textContent") == trick.replace("`", "")
        assert prose.locator("a, img, b").count() == 0
    assert playground.page.evaluate("window.hit") is None


def test_fault_37_markup_in_code_tables_headings_and_lists_is_text(
    playground: PlaygroundPage,
) -> None:
    evil = "<img src=x onerror=window.hit=1>"
    text = f"# {evil}\n\n- {evil}\n\n> {evil}\n\n| a |\n|---|\n| {evil} |\n\n```{evil}\n{evil}\n```"
    prose = playground.finished_text(text)
    assert prose.locator("img").count() == 0
    assert prose.evaluate("e => e.textContent").count("onerror") == 5
    assert playground.page.evaluate("window.hit") is None


def test_fault_37_errors_model_names_and_questions_are_text(playground: PlaygroundPage) -> None:
    evil = "<img src=x onerror=window.hit=1>"
    error = {"message": evil, "type": evil, "param": evil, "code": evil}
    playground.finished(playground.play(text=evil, error=error))
    expect(playground.error).to_contain_text(evil)
    playground.answer_to(evil)
    expect(playground.questions.last).to_contain_text(evil)
    assert playground.page.locator("#thread img").count() == 0
    assert playground.page.evaluate("window.hit") is None


def test_fault_37_kept_answers_are_text_after_a_reload(playground: PlaygroundPage) -> None:
    playground.finished_text("<img src=x onerror=window.hit=1> [x](javascript:window.hit=1)")
    playground.page.reload()
    playground.ready()
    expect(playground.answers.first.locator(".prose")).to_contain_text("<img src=x")
    assert playground.page.locator("#thread img, #thread .prose a").count() == 0
    assert playground.page.evaluate("window.hit") is None


def test_links_to_the_web_are_links_that_give_nothing_away(playground: PlaygroundPage) -> None:
    prose = playground.finished_text(
        "[one](https://example.org/a_(b)) and https://example.org/c?d=1&e. ![p](http://example.org/p.png)"
    )
    links = prose.locator("a")
    assert links.evaluate_all("all => all.map(a => a.getAttribute('href'))") == [
        "https://example.org/a_(b)",
        "https://example.org/c?d=1&e",
        "http://example.org/p.png",
    ]
    for link in links.all():
        assert "noopener" in link.get_attribute("rel")
        assert link.get_attribute("target") == "_blank"
    assert prose.locator("img").count() == 0


def test_the_browser_itself_refuses_markup_from_strings(
    browser: Browser, server: LiveServer
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.url}/login/")
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; }"
        " catch (error) { return error.name; } }"
    )
    context.close()
    assert refused == "TypeError"
