"""Control tokens that a client typed stay text: nobody forges a role by writing `<|im_start|>`.

Characters that begin a control token are replaced in the client's strings by stand-ins (code points
of a private-use plane that the strings don't hold). What looks like a control token after rendering
was therefore written by the template. One character stands for one, so that positions stay, and no
template operation can cut a stand-in in half.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from engine.text.messages import Message

#: Where stand-ins are taken from (supplementary private use area B).
_FIRST_STAND_IN = 0x100000
#: Roles whose messages are the client's own words to the model, or the model's: in them only
#: special tokens are text. A `<think>` or `<tool_call>` there is what the model itself reads.
_OWN_ROLES = frozenset(("assistant", "system", "developer"))


def _alternatives(tokens: frozenset[str]) -> str:
    """A regular expression for any of the tokens, the longest first; never matches when empty."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"


class ControlTokens:
    """The control tokens of one tokenizer.

    Args:
        special: special tokens.
        control: those and the added ones that the chat template writes.
    """

    def __init__(self, special: frozenset[str], control: frozenset[str]) -> None:
        self.pattern = re.compile(_alternatives(control))
        self.first_chars = "".join(sorted({token[0] for token in control if token}))
        initial = f"[{re.escape(self.first_chars)}]" if self.first_chars else "(?!)"
        self._initial = re.compile(initial)
        self._special = re.compile(_alternatives(special))
        self._allowed = re.compile(f"(?P<allowed>{_alternatives(control - special)})|{initial}")

    def may_begin_in(self, value: Any) -> bool:
        """Whether some string in `value` has a character that begins a control token."""
        return any(self._initial.search(text) for text in strings_in(value))

    def find(self, text: str) -> list[str]:
        """The control tokens in `text`, from left to right."""
        return self.pattern.findall(text)

    def forbidden(self, role: str | None) -> re.Pattern[str]:
        """What must stay text in a message of this role; None: outside messages."""
        return self._special if role is None or role in _OWN_ROLES else self.pattern

    def initials(self, role: str | None) -> re.Pattern[str]:
        """Every character that could begin a forbidden token; group `allowed` is left alone."""
        return self._allowed if role is None or role in _OWN_ROLES else self._initial


class Mask:
    """Stand-ins for one request's strings.

    Args:
        tokens: the tokenizer's control tokens.
        inputs: everything of the client's that the template sees.
    """

    def __init__(self, tokens: ControlTokens, inputs: Any) -> None:
        taken = {char for text in strings_in(inputs) if not text.isascii() for char in text}
        free = (char for char in map(chr, range(_FIRST_STAND_IN, 0x110000)) if char not in taken)
        self._tokens = tokens
        self._stand_in = dict(zip(tokens.first_chars, free))
        self._original = str.maketrans({new: old for old, new in self._stand_in.items()})

    def tokens(self, text: str, role: str | None) -> str:
        """`text` with the first character of each forbidden token masked."""
        pattern = self._tokens.forbidden(role)
        while pattern.search(text):  # again for a token that overlapped a masked one
            text = pattern.sub(lambda found: self._stand_in[found[0][0]] + found[0][1:], text)
        return text

    def initials(self, text: str, role: str | None) -> str:
        """`text` with every character masked that could begin a forbidden token."""
        pattern = self._tokens.initials(role)

        def mask(found: re.Match[str]) -> str:
            allowed = found.groupdict().get("allowed")
            return self._stand_in[found[0]] if allowed is None else found[0]

        return pattern.sub(mask, text)

    def unescape(self, text: str) -> str:
        """`text` with stand-ins that a template escaped as JSON (`\\udbc0...`) as characters."""
        for stand_in in self._stand_in.values():
            text = text.replace(json.dumps(stand_in)[1:-1], stand_in)
        return text

    def restore(self, text: str) -> str:
        """`text` with the original characters, each where its stand-in was."""
        return text.translate(self._original)


def masked(value: Any, mask: Any, role: str | None = None) -> Any:
    """`value` with `mask(text, role)` for every string in it, keys of objects included."""
    if isinstance(value, str):
        return mask(value, role)
    if isinstance(value, list):
        return [masked(item, mask, role) for item in value]
    if isinstance(value, dict):
        return {masked(k, mask, role): masked(v, mask, role) for k, v in value.items()}
    return value


def masked_messages(messages: list[Message], mask: Any) -> list[Message]:
    """Messages with every string masked by its message's role."""
    return [masked(message, mask, message["role"]) for message in messages]


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
