"""Chat templates in a Jinja sandbox, with the helpers that model folders expect.

The environment is that of the `transformers` library, with limits on the size of a template and of
its result, and on its steps, time and memory. A template is a program from a model or a request:
each iteration of a loop and each call of a macro counts as a step, and the size of texts and lists
is checked before they grow.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_environment, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from engine.contract.errors import InvalidRequest

MAX_TEMPLATE_CHARS = 512 * 1024
CACHED_TEMPLATES = 64
MAX_RENDERED_CHARS = 16 * 1024 * 1024
#: Maximum bits of an integer: Python formats at most 4,300 digits.
_MAX_BITS = 4096
#: Additional size of a list's element, in characters.
_OF_ELEMENT = 8
#: Maximum indentation and separator length of JSON.
_MAX_INDENT = 32
#: Number of steps between two checks of the clock.
_CLOCK_EVERY = 64
#: Widths in `%` and `str.format` that are huge, or arguments.
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)")
_FORMAT_WIDTH = re.compile(r"\{[^{}]*:[^{}]*(\d{6}|\{)")
_PADDING = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))


class TemplateLimit(InvalidRequest):
    """The template exceeded its steps or its time."""

    code = "render_timeout"


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one rendering. `seconds`: checked between steps."""

    steps: int = 2_000_000
    seconds: float = 60.0
    chars: int = MAX_RENDERED_CHARS


DEFAULT_LIMITS = RenderLimits()


class _Budget(threading.local):
    """The remaining limits of this thread."""

    steps = 0
    deadline = 0.0


_budget = _Budget()


@contextmanager
def budget(limits: RenderLimits) -> Iterator[None]:
    """Set the limits for rendering in this context and thread."""
    _budget.steps = limits.steps
    _budget.deadline = time.monotonic() + limits.seconds
    yield


def count_step() -> str:
    """Count a step. Raises `TemplateLimit` when none remain."""
    _budget.steps -= 1
    if _budget.steps < 0:
        raise TemplateLimit("The chat template takes too many steps.", param="messages")
    if _budget.steps % _CLOCK_EVERY == 0 and time.monotonic() > _budget.deadline:
        raise TemplateLimit("The chat template takes too long.", param="messages")
    return ""


def concat(*values: Any) -> str:
    """`a ~ b`, with a size limit."""
    return "".join(map(str, check_size(values)))


def check_size(value: Any) -> Any:
    """Return the value unless its text is over the size limit; repeated elements count again."""
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            item = [*item.keys(), *item.values()]
        total += len(item) if isinstance(item, str) else _OF_ELEMENT
        if isinstance(item, list | tuple):
            total += _OF_ELEMENT * len(item)
            raise_too_large(total > MAX_RENDERED_CHARS)
            total += sum(len(inner) for inner in item if isinstance(inner, str))
            pending += [inner for inner in item if isinstance(inner, list | tuple | dict)]
        raise_too_large(total > MAX_RENDERED_CHARS)
    return value


class StepCounter(NodeTransformer):
    """Inserts `count_step` into each loop and macro, and a size check into `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def _ticking(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        call = _call("tick", [], node.lineno)
        node.body = [nodes.ExprStmt(call, lineno=node.lineno), *node.body]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("weighed_concat", list(node.nodes), node.lineno)


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(target, arguments, [], None, None, lineno=line)


def raise_too_large(too_large: bool) -> None:
    """Raise the error for exceeding a size limit."""
    if too_large:
        raise jinja2.TemplateError("a text or list in the template is too large")


def check_operator(operator: str, lhs: Any, rhs: Any) -> None:
    """Check the result size of `left * right`, `+`, `**` or `%` before computing it."""
    if operator == "*":
        for text, count in ((lhs, rhs), (rhs, lhs)):
            if isinstance(text, str | list | tuple) and isinstance(count, int):
                raise_too_large(len(text) * count > MAX_RENDERED_CHARS)
        if isinstance(lhs, int) and isinstance(rhs, int):
            raise_too_large(lhs.bit_length() + rhs.bit_length() > _MAX_BITS)
    elif operator == "+":
        if isinstance(lhs, str | list | tuple) and isinstance(rhs, str | list | tuple):
            raise_too_large(len(lhs) + len(rhs) > MAX_RENDERED_CHARS)
    elif operator == "%":
        if isinstance(lhs, str):
            raise_too_large(_PERCENT_WIDTH.search(lhs) is not None)
            check_size(rhs)
    elif isinstance(lhs, int) and isinstance(rhs, int):
        raise_too_large(lhs.bit_length() * rhs > _MAX_BITS)


def check_call(function: Any, arguments: tuple[Any, ...]) -> None:
    """Check the result size of a string method that may return a longer string."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, str):
        return
    name = getattr(function, "__name__", "")
    if name in _PADDING:
        raise_too_large(
            any(
                isinstance(argument, int) and argument > MAX_RENDERED_CHARS
                for argument in arguments
            )
        )
    elif name == "replace" and len(arguments) >= 2:
        _check_replace(owner, arguments[0], arguments[1])
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple | str):
        raise_too_large(len(owner) * len(check_size(arguments[0])) > MAX_RENDERED_CHARS)


def check_format(function: Any) -> None:
    """Limit the size of `str.format`'s result."""
    text = getattr(function, "__self__", None)
    if isinstance(text, str) and getattr(function, "__name__", "") in ("format", "format_map"):
        raise_too_large(_FORMAT_WIDTH.search(text) is not None)


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        raise_too_large(text.count(old) * len(new) > MAX_RENDERED_CHARS)


def bounded_filters(library: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the library's filters that may return longer texts or lists, with a size check."""
    filters = dict(library)

    def center(value: Any, width: int = 80) -> Any:
        raise_too_large(width > MAX_RENDERED_CHARS)
        return filters["center"](str(value), width)

    def indent(value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> Any:
        size = width if isinstance(width, int) else len(str(width))
        raise_too_large(size * (str(value).count("\n") + 1) > MAX_RENDERED_CHARS)
        return filters["indent"](str(value), width, *args, **kwargs)

    def format_(value: Any, *args: Any, **kwargs: Any) -> Any:
        raise_too_large(_PERCENT_WIDTH.search(str(value)) is not None)
        return filters["format"](value, *check_size(args), **check_size(kwargs))

    def batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
        raise_too_large(linecount > MAX_RENDERED_CHARS)
        return filters["batch"](value, linecount, fill_with)

    def slice_(context: Any, value: Any, slices: int, fill_with: Any = None) -> Any:
        raise_too_large(slices > MAX_RENDERED_CHARS)
        return filters["slice"](context, value, slices, fill_with)

    def sum_(context: Any, value: Any, attribute: Any = None, start: Any = 0) -> Any:
        values = list(value)
        if not isinstance(start, int | float):
            check_size(values)
        return filters["sum"](context, values, attribute, start)

    def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        values = check_size(list(value))
        raise_too_large(len(str(d)) * len(values) > MAX_RENDERED_CHARS)
        return filters["join"](context, values, d, attribute)

    def replace(context: Any, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
        _check_replace(str(check_size(s)), str(old), str(new))
        return filters["replace"](context, s, old, new, count)

    def wordwrap(context: Any, s: Any, *args: Any, **kwargs: Any) -> Any:
        wraps = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, str)]
        raise_too_large(
            len(str(check_size(s))) * max(map(len, wraps), default=1) > MAX_RENDERED_CHARS
        )
        return filters["wordwrap"](context, s, *args, **kwargs)

    def tojson(value: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            for part in argument if isinstance(argument, list | tuple) else (argument,):
                size = part if isinstance(part, int) else len(part) if isinstance(part, str) else 0
                raise_too_large(size > _MAX_INDENT)
        return filters["tojson"](check_size(value), *args, **kwargs)

    bounded: dict[str, Callable[..., Any]] = {"center": center, "indent": indent, "batch": batch}
    bounded |= {"format": format_}
    bounded |= {"slice": pass_eval_context(slice_), "tojson": tojson, "sum": pass_environment(sum_)}
    bounded |= {"join": pass_eval_context(join), "replace": pass_eval_context(replace)}
    bounded["wordwrap"] = pass_environment(wordwrap)
    for name in ("string", "pprint", "upper", "lower", "title", "capitalize", "trim"):
        bounded[name] = _of_weighed(filters[name])
    return bounded


def _of_weighed(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that converts its input to text, with a size check."""

    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        return filter_(check_size(value), *args, **kwargs)

    return bounded


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's part for training; renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also limits the size of results."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        check_call(__obj, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        check_format(value)
        return super().wrap_str_format(value)

    #: Functions that `StepCounter` inserts calls of.
    tick = staticmethod(count_step)
    weighed_concat = staticmethod(concat)


class _Dict:
    """`dict(...)` for templates, without access to the class and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)` that rejects names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
        finalize=check_size,
    )
    environment.filters["tojson"] = _tojson
    environment.filters |= bounded_filters(environment.filters)
    del environment.globals["lipsum"], environment.filters["urlize"]
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


_ENVIRONMENT = _environment()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled chat template and its source."""

    source: str
    compiled: jinja2.Template

    def render(self, context: Mapping[str, Any], allowed: RenderLimits = DEFAULT_LIMITS) -> str:
        """Return the rendered text for `context`.

        Raises:
            TemplateLimit: it exceeds the steps or time of `allowed`.
            InvalidRequest: the template refuses (with its message), fails, or writes more
                characters than `allowed`.
        """
        parts: list[str] = []
        size = 0
        try:
            with budget(allowed):
                for part in self.compiled.generate(context):
                    parts.append(part)
                    size += len(part)
                    _check_size(size, allowed.chars)
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequest(str(error.message or error), param="messages") from error
        except Exception as error:  # a template is a program that may raise anything
            raise InvalidRequest(
                f"The chat template failed: {type(error).__name__}: {error}", param="messages"
            ) from error
        return "".join(parts)


def _check_size(size: int, max_chars: int) -> None:
    if size > max_chars:
        raise InvalidRequest(
            f"The chat template writes more than {max_chars} characters.", param="messages"
        )


@lru_cache(maxsize=CACHED_TEMPLATES)
def compile_template(source: str) -> ChatTemplate:
    """Return a template ready to render; the last `CACHED_TEMPLATES` are cached.

    Raises:
        InvalidRequest: the source is too long or not valid Jinja.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(
            f"The chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} may be.",
            param="chat_template",
        )
    try:
        metered = StepCounter().visit(_ENVIRONMENT.parse(source))
        compiled = _ENVIRONMENT.from_string(metered)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(
            f"The chat template is no valid Jinja: {error.message} (line {error.lineno}).",
            param="chat_template",
        ) from error
    except (RecursionError, SyntaxError, MemoryError) as error:
        raise InvalidRequest(
            "The chat template is nested too deeply.", param="chat_template"
        ) from error
    return ChatTemplate(source, compiled)
