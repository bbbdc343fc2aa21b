"""The facts that a picker reads from a request: its model and the start of its prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from inference.engine_client.fleet import PREFIX_BYTES, text_prefix_key

_EMPTY = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """Fields of the API's bodies that name the model or begin the prompt, in the prompt's order."""

    model: str = ""
    instructions: msgspec.Raw = _EMPTY
    system: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY


_DECODER = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """
    Attributes:
        model: the body's model; "" if it has none, or isn't JSON.
        prefix_key: equal for requests with the same key and model whose prompts begin alike.
        subset: endpoints ("host:port") that may be picked; None for any.
    """

    model: str
    prefix_key: bytes
    subset: Collection[str] | None = None

    @classmethod
    def from_http(
        cls, headers: Mapping[str, str], body: bytes, subset: Collection[str] | None
    ) -> RequestFacts:
        """Read a request. Gateways reject invalid requests, so this raises nothing."""
        try:
            fields = _DECODER.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            fields = _Body()
        parts = (fields.instructions, fields.system, fields.messages, fields.prompt, fields.input)
        text = b"".join(bytes(part)[:PREFIX_BYTES] for part in parts)
        # Caches are separated by tenant, which the API key identifies here without being checked.
        client = headers.get("authorization") or headers.get("x-api-key", "")
        return cls(fields.model, text_prefix_key(text, f"{client}\n{fields.model}"), subset)
