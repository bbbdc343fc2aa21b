"""What the documents say can be done, can be done; where they point, there is something."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.commands import our_options, problems_with
from tools.docs.__main__ import generated_pages
from tools.docs.words import words_by_reader

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *sorted(ROOT.glob("docs/*.md")),
    *ROOT.glob("deploy/*.md"),
    *ROOT.glob("demo/model/*.md"),
    *ROOT.glob("demo/draft/*.md"),
]
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
#: Words of a line that show that its options are another program's.
OTHER_PROGRAMS = re.compile(
    r"python -m|pytest|torchrun |docker |useradd|systemctl|kubectl |pg_dump|dumpdata|install -D"
    r"|--pace-ms|--only"
)


def text_of(path: Path) -> str:
    """With lines that a backslash goes on joined."""
    return path.read_text(encoding="utf-8").replace("\\\n", " ")


@page
def test_commands_are_there_with_their_options(path: Path) -> None:
    matches = re.findall(r"manage\.py +([a-z_]+[^`\n]*)", text_of(path))
    assert [problem for line in matches for problem in problems_with(line)] == []


@page
def test_options_named_alone_are_some_commands(path: Path) -> None:
    unknown = [
        option
        for line in text_of(path).splitlines()
        if not OTHER_PROGRAMS.search(line) and "manage.py check" not in line
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line)
        if option not in our_options()
    ]
    assert unknown == []


@page
def test_modules_and_targets_are_there(path: Path) -> None:
    text = text_of(path)
    for module in re.findall(r"python -m ([a-z_][\w.]*\w)", text):
        assert find_spec(module) is not None, module
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.M), target


@page
def test_files_are_there(path: Path) -> None:
    folders = "engine|kernels|inference|platform|templates|tests|tools|chaos|benchmarks|deploy|docs"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", text_of(path))
    assert [name for name in named if not (ROOT / name).exists()] == []


ADDITIONS = (
    "a sampling parameter",
    "a console page",
    "a quota",
    "a model family",
    "a tool parser",
    "a cache tier",
)


@pytest.mark.parametrize("addition", ADDITIONS)
def test_contributors_learn_which_files_an_addition_touches(addition: str) -> None:
    text = text_of(ROOT / "CONTRIBUTING.md")
    row = re.search(rf"^\| {addition}.*$", text, re.M)
    assert row is not None
    assert len(re.findall(r"`[a-z]+/[\w./-]+`", row[0])) >= 2
    for name, path in re.findall(r"`(\w+)` in `([\w./-]+)`", row[0]):
        files = [ROOT / path] if (ROOT / path).is_file() else (ROOT / path).glob("*.py")
        assert any(name in file.read_text() for file in files), f"{path} has no {name}"


@page
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)]*)?\)", text_of(path)):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor[1:] in anchors(file), f"{target}{anchor}"


def anchors(path: Path) -> set[str]:
    """The anchors that a page's headings make, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@page
def test_lines_have_at_most_120_columns(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    lines = [line for line in prose.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []


def test_people_have_at_most_45000_words_to_read() -> None:
    assert sum(words_by_reader().values()) <= 45_000


def test_the_index_names_every_document() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)#]+)", index))
    remote_names = {path.name for path in (ROOT / "docs").iterdir() if path.is_file()}
    assert remote_names - linked == {"README.md"}


@pytest.mark.parametrize("name", generated_pages())
def test_the_generated_pages_are_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == generated_pages()[name](), "run `make docs`"


def test_every_command_has_its_section() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    files = [
        one
        for pattern in ("platform/*", "chaos")
        for one in ROOT.glob(f"{pattern}/management/commands/*.py")
    ]
    names = {path.stem for path in files} - {"__init__"}
    assert {name for name in names if f"### {name}\n" not in text} == set()
