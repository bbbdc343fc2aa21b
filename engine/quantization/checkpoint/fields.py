"""Fields of `quantization_config`, each checked as it's read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.contract.errors import ModelLoadError
from engine.name_patterns import NamePattern

#: Of a pattern, in a message.
_MOST_SHOWN = 64


class Fields:
    """An object of config.json. `ModelLoadError` names what is wrong, with its path as `param`."""

    def __init__(self, values: Any, path: str = "quantization_config") -> None:
        if not isinstance(values, Mapping):
            raise ModelLoadError(f"config.json: {path} must be an object.", param=path)
        self._values, self.path = values, path

    def wrong(self, name: str, why: str) -> ModelLoadError:
        """An error that names the field."""
        path = f"{self.path}.{name}"
        return ModelLoadError(f"config.json: {path} {why}.", param=path)

    def get(self, name: str) -> Any:
        """Whatever is there; None: nothing."""
        return self._values.get(name)

    def names(self) -> Iterable[str]:
        """Of all fields."""
        return self._values.keys()

    def integer(self, name: str, default: int | None, known: Iterable[int] = ()) -> int:
        """A whole number; of `known` ones where they're given."""
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) is not int:
            raise self.wrong(name, f"must be a whole number, not {value!r}")
        if known and value not in known:
            raise self.wrong(name, f"is {value}; known are {', '.join(map(str, known))}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.wrong(name, f"must be true or false, not {value!r}")
        return value

    def word(self, name: str, default: str = "") -> str:
        """A string, in lower case."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.wrong(name, f"must be a string, not {value!r}")
        return value.lower()

    def words(self, name: str) -> list[str]:
        """A list of strings."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(name, "must be a list of strings")
        return value

    def object(self, name: str) -> Fields | None:
        """An object within it; None: there is none."""
        value = self._values.get(name)
        return None if value is None else Fields(value, f"{self.path}.{name}")

    def pair(self, name: str) -> tuple[int, int] | None:
        """Two positive whole numbers; None: they aren't there."""
        value = self._values.get(name)
        if value is None:
            return None
        sound = isinstance(value, list) and len(value) == 2
        if not sound or not all(type(size) is int and size > 0 for size in value):
            raise self.wrong(name, f"must be two positive whole numbers, not {value!r}")
        return value[0], value[1]


def pattern(fields: Fields, name: str, text: str) -> NamePattern:
    """A `re:` pattern of a list of layers. Raises `ModelLoadError` for one that isn't read."""
    try:
        return NamePattern(text)
    except ValueError as error:
        raise fields.wrong(
            name, f"has the pattern {text[:_MOST_SHOWN]!r}, which {error}"
        ) from error
