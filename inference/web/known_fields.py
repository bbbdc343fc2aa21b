"""Fields that a schema knows and doesn't support, and those that it doesn't know."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, model_validator

from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import UnsupportedField
from inference.openai.schemas.base import Refused, ignored_names
from inference.web.fails_fast import FailsFast

#: How a chat is rendered is up to the model's template and, where the operator allows it, to
#: requests for chat completions alone. SDKs take `extra_body` apart before they send.
TEMPLATE_FIELDS: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "extra_body": ({},),
}


class KnownFields(FailsFast):
    """A body whose unsupported fields are refused by name, and whose unknown ones are named.

    `UNSUPPORTED`: fields that we know and don't support, with the values that change nothing.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = TEMPLATE_FIELDS

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        for name in cls.UNSUPPORTED.keys() & (data if isinstance(data, dict) else {}):
            if data[name] is not None and data[name] not in cls.UNSUPPORTED[name]:
                raise Refused(UnsupportedField(f"'{name}' is not supported.", param=name))
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.check()
        except InvalidRequest as error:
            raise Refused(error) from None
        return self

    def check(self) -> None:
        """What types alone don't say. Raises `InvalidRequest`."""

    def ignored_fields(self) -> list[str]:
        """Fields without effect: see `ignored_names`."""
        return ignored_names(self.model_extra or {}, self.UNSUPPORTED)


#: A field of a chat's function, as errors name it.
_FUNCTION = re.compile(r"tools\[(\d+)\]\.function(?:\.(\w+))?")
Told = TypeVar("Told", bound=QuireError)


def in_words_of(
    error: Told,
    names: Mapping[str, str],
    function: Callable[[str, str], str] | None = None,
) -> Told:
    """The same error with the field as the client calls it.

    Args:
        names: by the field's first parts; the first that fits counts.
        function: what the client calls a field of the function with this place among the tools.
    """
    ours = error.param or ""
    told = ours
    for mine, theirs in names.items():
        if ours == mine or ours.startswith((f"{mine}.", f"{mine}[")):
            told = theirs + ours[len(mine) :]
            break
    if function is not None and (found := _FUNCTION.match(ours)):
        told = function(found[1], found[2] or "") + ours[found.end() :]
    if told != ours:
        error.rename(told)
    return error
