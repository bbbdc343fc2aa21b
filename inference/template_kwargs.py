"""Variables of a model's chat template that a request or the operator may set."""

from __future__ import annotations

from collections.abc import Iterable

from engine.contract.errors import InvalidRequest
from inference.errors import UnsupportedField

#: Names that `render_chat` gives a meaning of its own.
RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenizer",
        "limits",
        "content_format",
        "most_tokens",
    }
)


def check_template_kwargs(names: Iterable[str]) -> None:
    """Raise `InvalidRequest` for a name that no variable may have."""
    for name in names:
        if name == "chat_template":
            raise UnsupportedField(
                "chat_template_kwargs can't hold a chat template.",
                param="chat_template_kwargs.chat_template",
            )
        if name in RESERVED_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(
                f"chat_template_kwargs can't hold {name[:50]!r}.", param="chat_template_kwargs"
            )
