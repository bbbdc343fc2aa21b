"""Programs and command lines of texts about vLLM, with nothing but `vllm` replaced by `engine`.

A text is Markdown with fences, or what a browser copies from a page, without them. Pages that were
printed break listings, number their lines and wrap them with an arrow: that is undone.
"""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

#: Begins a command line, behind a prompt or not.
COMMAND = re.compile(r"\s*(\$ ?)?([A-Z_]+=\S+ )*(vllm|quire|python3?|curl|export|torchrun)( |$)")
PAGE_BREAK = re.compile(r"\s*(\(continue\w* (on|from) (next|previous) page\))?\s*")
HEADING = re.compile(r"(\d+\.)+\d+ ")
NUMBER = re.compile(r"(\d+)( |$)")
SOURCE = re.compile(r"Source https://\S+/examples/(\w+)\.py")
#: Unbroken listings are no longer than this.
MAX_LINES = 60


@dataclass(frozen=True)
class Snippet:
    """A program or a command line.

    `kind`: python, shell or text. `section`: its heading. `example`: the name of vLLM's example
    that it is, or an empty string. `source` has `engine` and `quire` for `vllm`.
    """

    document: str
    line: int
    kind: str
    section: str
    example: str
    source: str


def read_snippets(path: Path) -> list[Snippet]:
    """The snippets of a text, in its order; parts of one program are one snippet."""
    lines = path.read_text().splitlines()
    listings = list(_fenced(lines) if any(map(_is_fence, lines)) else _unfenced(lines))
    snippets: list[Snippet] = []
    for line, listing in listings:
        section, example = _heading(lines[: line - 1])
        source = replace_vllm(_undamaged(listing))
        kind = _kind(source)
        while kind == "python" and snippets and _continues(snippets[-1], source, section):
            line, source = snippets[-1].line, f"{snippets.pop().source}\n{source}"
        snippets.append(Snippet(path.name, line, kind, section, example, source))
    return snippets


def replace_vllm(source: str) -> str:
    """The source with the engine's names."""
    source = re.sub(r"(?<=from )vllm\b|(?<=import )vllm\b|(?<=')vllm(?=\.)", "engine", source)
    source = re.sub(r"\bvllm(?=\.\w+\()", "engine", source)
    source = re.sub(r"(?<=-m )vllm\b", "engine", source)
    return re.sub(r"^((?:[A-Z_]+=\S+ )*)vllm(?= serve)", r"\1quire", source, flags=re.MULTILINE)


def parse(source: str) -> ast.Module | None:
    """The program, or None if it's none."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _is_fence(line: str) -> bool:
    return line.lstrip().startswith("```")


def _fenced(lines: list[str]) -> Iterator[tuple[int, list[list[str]]]]:
    """(line, pages of a listing), where a page's end breaks none."""
    fences = [index for index, line in enumerate(lines) if _is_fence(line)]
    listings: list[tuple[int, list[list[str]]]] = []
    last = -1
    for first, end in zip(fences[::2], fences[1::2], strict=False):
        between = lines[last + 1 : first]
        broken = any(line.strip() for line in between)
        if listings and broken and all(PAGE_BREAK.fullmatch(line) for line in between):
            listings[-1][1].append(lines[first + 1 : end])
        else:
            listings.append((first + 2, [lines[first + 1 : end]]))
        last = end
    yield from listings


def _unfenced(lines: list[str]) -> Iterator[tuple[int, list[list[str]]]]:
    """(line, pages of a listing) of the longest programs and command lines."""
    index = 0
    while index < len(lines):
        length = 0
        if re.match(r"(from|import)( |$)", lines[index]):
            length = _program_length(lines[index : index + MAX_LINES])
        elif COMMAND.match(lines[index]):
            length = _command_length(lines[index : index + MAX_LINES])
        if length:
            yield index + 1, [lines[index : index + length]]
        index += max(1, length)


def _program_length(lines: list[str]) -> int:
    """Number of lines of the longest program at the start, 0 if there is none."""
    for length in range(len(lines), 1, -1):
        module = parse(_joined_words(lines[:length]))
        if module and not _is_word(module.body[-1]):
            return length
    return 0


def _is_word(statement: ast.stmt) -> bool:
    """A heading of one word is an expression too."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name | ast.BinOp)


def _command_length(lines: list[str]) -> int:
    # A browser copies the first word of a highlighted command as a line of its own.
    first = 2 if len(lines[0].split()) == 1 else 1
    if first == 2 and not (len(lines) > 1 and lines[1].startswith(" ")):
        return 0
    for length in range(first, len(lines) + 1):
        text = "\n".join(lines[:length])
        if not text.endswith("\\") and _is_command(text):
            return length
    return 0


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:
        return False


def _joined_words(lines: list[str]) -> str:
    """Lines of which the first word may be a line of its own, above an indent of one."""
    text = "\n".join(line for line in lines if line.strip())
    return re.sub(r"^( *)(from|import|python3?|vllm|curl)\n *", r"\1\2 ", text, flags=re.MULTILINE)


def _undamaged(pages: list[list[str]]) -> str:
    """The listing without arrows, prompts and the numbers of its lines."""
    pages = [_unwrapped(page) for page in pages]
    lines = [line for page in pages for line in page]
    written = [line for line in lines if line.strip()]
    if sum(bool(NUMBER.match(line)) for line in written) > len(written) / 2:
        return _without_numbers(pages)
    if any(re.match(r"\s*\$ ", line) for line in lines):
        lines = [re.sub(r"^\s*\$ ", "", line) for line in lines]
    text = "\n".join(lines)
    return textwrap.dedent(text if parse(text) else _joined_words(lines))


def _unwrapped(lines: list[str]) -> list[str]:
    """Lines that an arrow goes on with, joined."""
    text = re.sub(r"_?\n *[↪↳→] ?", "", "\n".join(lines))
    return [line.rstrip() for line in text.split("\n")]


def _without_numbers(pages: list[list[str]]) -> str:
    """The program without line numbers: the code of a page begins at one column."""
    columns = list(product((3, 2), (3, 4, 5, 2)))
    choices = [list(dict.fromkeys(_code_from(page, *pair) for pair in columns)) for page in pages]
    for code in product(*choices):
        source = textwrap.dedent("\n".join(code))
        if parse(source):
            return source
    return "\n".join(choice[0] for choice in choices)


def _code_from(page: list[str], narrow: int, wide: int) -> str:
    """The page's code, from column `narrow` behind numbers of one digit, else from `wide`."""
    code = []
    for line in page:
        number = NUMBER.match(line)
        column = (narrow if number and len(number[1]) == 1 else wide) if number else 0
        if line[:column].strip(" 0123456789"):
            column = 0 if not number else number.end(1) + 1
        code.append(line[column:])
    return "\n".join(code)


def _kind(source: str) -> str:
    if parse(source) and not COMMAND.match(source):
        return "python"
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith("#")]
    return "shell" if lines and COMMAND.match(lines[0]) else "text"


def _continues(last: Snippet, source: str, section: str) -> bool:
    """Whether a program uses names that only the program before it, in its chapter, has."""
    modules = parse(last.source), parse(source)
    if last.kind != "python" or _chapter(last.section) != _chapter(section) or None in modules:
        return False
    (defined, _), (names, used) = (_names(module) for module in modules if module)
    return not (used - names).isdisjoint(defined)


def _names(module: ast.Module) -> tuple[set[str], set[str]]:
    """(names that it defines, names that it reads)."""
    defined, used = set(), set()
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
    return defined, used


def _chapter(section: str) -> list[str]:
    return section.partition(" ")[0].split(".")[:2]


def _heading(lines: list[str]) -> tuple[str, str]:
    """(section, name of vLLM's example) at the end of these lines."""
    example = ""
    for line in reversed(lines):
        if match := SOURCE.match(line):
            example = match[1]
        if HEADING.match(line):
            return line.strip(), example
    return "", ""
