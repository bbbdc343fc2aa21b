"""A setting of vLLM's that Quire has no setting for: what it means here. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.contract.errors import ConfigError

Kind = type[bool] | type[int] | type[float] | type[str] | type[dict] | type[list]


@dataclass(frozen=True)
class Foreign:
    """A setting of vLLM's.

    Attributes:
        name, kind, short: as in vLLM's command line.
        note: what it means here, for the table and for a refusal.
        takes: values that change nothing here; None: every value of its kind.
        becomes: settings of ours that a value stands for.
        choices: words that vLLM knows for it, where we take some of them.
    """

    name: str
    kind: Kind
    note: str
    takes: tuple[Any, ...] | None = ()
    becomes: Callable[[Any], dict[str, Any]] | None = None
    short: tuple[str, ...] = ()

    def resolve(self, value: Any) -> dict[str, Any]:
        """The settings of ours that this value stands for. Raises `ConfigError`."""
        if value is None:
            return {}
        if not self._fits(value):
            raise ConfigError(
                f"{self.name} must be {self.kind.__name__}, got {value!r}.", param=self.name
            )
        if self.becomes is not None:
            return self.becomes(value)
        if self.takes is None or any(_same(value, taken) for taken in self.takes):
            return {}
        raise ConfigError(f"{self.name}={value!r} can't be used: {self.note}", param=self.name)

    def _fits(self, value: Any) -> bool:
        if self.kind is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        if self.kind is int:
            return isinstance(value, int) and not isinstance(value, bool)
        if self.kind is dict:
            return isinstance(value, Mapping)
        if self.kind is list:
            return isinstance(value, Sequence) and not isinstance(value, str)
        return isinstance(value, self.kind)

    @property
    def outcome(self) -> str:
        """ "becomes", "accepted", "refused", or "accepted as ..." where only some values are."""
        if self.becomes is not None:
            return "becomes ours"
        if self.takes is None:
            return "accepted, changes nothing"
        neutral = [taken for taken in self.takes if taken not in (None, False, "", {}, [])]
        if neutral:
            return f"accepted as {' or '.join(map(str, neutral))}"
        return "refused"


def _same(value: Any, taken: Any) -> bool:
    if isinstance(value, bool) or isinstance(taken, bool):
        return value is taken
    return bool(value == taken)


def nothing(name: str, kind: Kind, note: str, **more: Any) -> Foreign:
    """One that is taken and changes nothing."""
    return Foreign(name, kind, note, takes=None, **more)


def only(name: str, kind: Kind, takes: tuple[Any, ...], note: str, **more: Any) -> Foreign:
    """One of which some values change nothing, and others are refused."""
    return Foreign(name, kind, note, takes=takes, **more)


def several(make: Callable[[str], Foreign], names: str) -> tuple[Foreign, ...]:
    """Those with one meaning, by their names."""
    return tuple(make(name) for name in names.split())
