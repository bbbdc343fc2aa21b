"""Chat templates as Jinja in a sandbox, with the helpers that model folders count on.

The environment is the one that the `transformers` library renders with, and bounded besides: in the
size of a template and of what it writes, and in its steps, time and memory (`jinja_limits`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.contract.errors import InvalidRequest
from engine.text import jinja_limits as limits
from engine.text.jinja_limits import DEFAULT_LIMITS, RenderLimits

MAX_TEMPLATE_CHARS = 512 * 1024
CACHED_TEMPLATES = 64


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's part for training: here its body, no more."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also refuses to make gigabytes out of something."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limits.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        limits.check_call(__obj, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        limits.check_format(value)
        return super().wrap_str_format(value)

    #: What `StepCounter` has templates call.
    tick = staticmethod(limits.count_step)
    weighed_concat = staticmethod(limits.concat)


class _Dict:
    """`dict(...)` for templates, without the class and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)` that takes no names with a leading underscore."""

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
    """Plain JSON: Jinja's own filter escapes HTML, which a model must not see."""
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
        finalize=limits.check_size,
    )
    environment.filters["tojson"] = _tojson
    environment.filters |= limits.bounded_filters(environment.filters)
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
        """The text for `context`.

        Raises:
            TemplateLimit: it takes more steps or time than `allowed`.
            InvalidRequest: the template refuses (with its own message), fails or writes more
                characters than `allowed`.
        """
        parts: list[str] = []
        size = 0
        try:
            with limits.budget(allowed):
                for part in self.compiled.generate(context):
                    parts.append(part)
                    size += len(part)
                    _check_size(size, allowed.chars)
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequest(str(error.message or error), param="messages") from error
        except Exception as error:  # a template is a program: whatever it raises is the request's
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
    """A template ready to render; the last `CACHED_TEMPLATES` are kept.

    Raises:
        InvalidRequest: too long, or no valid Jinja.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(
            f"The chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} may be.",
            param="chat_template",
        )
    try:
        metered = limits.StepCounter().visit(_ENVIRONMENT.parse(source))
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
