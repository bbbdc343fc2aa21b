"""`ToolFunction`: what a model may call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolFunction:
    """A function that the model may call. `parameters`: its JSON schema, {} for none.

    `strict`: calls must follow the schema even where the model chooses freely. `grammar`: Lark, of
    the one parameter that a custom tool has; "" for any text.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    grammar: str = ""
