"""`ParserRegistry`: parsers by name, extended by a setting or by installed packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Generic, Protocol, TypeVar

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from engine.contract.plugins import selected_entry_points


class NamedParser(Protocol):
    """A parser class."""

    name: ClassVar[str]
    template_marks: ClassVar[tuple[str, ...]]


#: Maximum number of chat templates whose parser is cached.
MAX_REMEMBERED = 64
P = TypeVar("P", bound=NamedParser)


class ParserRegistry(Generic[P]):
    """Built-in parsers, then those of installed packages, then those of the settings; later ones
    replace earlier ones of the same name.

    A package registers classes under the entry point group `quire.<kind>`. In the settings,
    `settings.QUIRE[kind]` is `{"name": "dotted.path.Class"}`.

    Args:
        kind: "tool_parsers" or "reasoning_parsers". base: superclass of all classes.
        own: built-in parsers, in the order in which chat templates are checked. aliases: further
            names of built-in parsers.
    """

    def __init__(
        self,
        kind: str,
        base: type[P],
        builtin: Sequence[type[P]],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self._base = kind, base
        self._aliases = aliases or {}
        self._builtin = {parser.name: parser for parser in builtin}
        self._template_matches: dict[str, type[P] | None] = {}
        setting_changed.connect(self._reset, weak=False)

    def all(self) -> Mapping[str, type[P]]:
        """All parsers by name. Raises TypeError or ImportError for an invalid plug-in."""
        return {
            **self._builtin,
            **{name: self._checked(path) for name, path in self._paths().items()},
        }

    def names(self) -> list[str]:
        """All names that `get` accepts, sorted."""
        return sorted({*self._builtin, *self._aliases, *self._paths()})

    def get(self, name: str) -> type[P] | None:
        """Return the parser of this name or alias."""
        parsers = self.all()
        return parsers.get(name) or parsers.get(self._aliases.get(name, name))

    def for_template(self, template: str) -> type[P] | None:
        """Return the parser for models with this chat template, or None. Plug-ins come first."""
        if template in self._template_matches:
            return self._template_matches[template]
        if len(self._template_matches) >= MAX_REMEMBERED:
            self._template_matches.clear()
        parser = self._template_matches[template] = self._match_template(template)
        return parser

    def _match_template(self, template: str) -> type[P] | None:
        parsers = self.all()
        ours = [parsers[name] for name in self._builtin]
        theirs = [parser for name, parser in parsers.items() if name not in self._builtin]
        for parser in [*theirs, *ours]:
            marks = parser.template_marks
            if marks and all(mark in template for mark in marks):
                return parser
        return None

    def _reset(self, *, setting: str, **_: object) -> None:
        """Reload the settings after `override_settings`."""
        if setting == "QUIRE":
            self._template_matches.clear()

    def _paths(self) -> dict[str, str]:
        """Return the dotted paths of the plug-ins."""
        return {**_installed(f"quire.{self.kind}"), **getattr(settings.QUIRE, self.kind)}

    def _checked(self, path: str) -> type[P]:
        parser = import_string(path)
        if not (isinstance(parser, type) and issubclass(parser, self._base)):
            raise TypeError(f"{path} is no {self._base.__name__}.")
        return parser


@lru_cache(maxsize=8)
def _installed(group: str) -> dict[str, str]:
    return {point.name: point.value.replace(":", ".") for point in selected_entry_points(group)}
