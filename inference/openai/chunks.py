"""Chunks of a stream as bytes: what doesn't change is encoded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from inference.generation import Generation, Usage
from inference.generation.figures import answer_metrics

_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Encodes one stream's chunks. The frequent one, text alone, is three joined pieces."""

    def __init__(
        self, head: dict[str, Any], generation: Generation, *, usage: bool, continuous: bool
    ) -> None:
        """`head`: id, object, created, model, fingerprint. `usage`: a `usage` field on each."""
        self._head, self._generation = head, generation
        self._usage, self._continuous = usage, continuous
        # `{"id":...,"choices":[` with the closing brace of the head cut off.
        self._start = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._texts: dict[int, tuple[bytes, bytes]] = {}

    def choice(self, choice: dict[str, Any]) -> bytes:
        """A chunk with one choice."""
        return self._start + _encode(choice) + self._tail()

    def first(self, choice: dict[str, Any], prompt_token_ids: list[int] | None = None) -> bytes:
        """A chunk with one choice, before any token: the prompt's are all that is used so far."""
        chunk: dict[str, Any] = {
            **self._head,
            "prompt_token_ids": prompt_token_ids,
            "choices": [choice],
        }
        if self._usage:
            used = Usage(prompt_tokens=self._generation.usage.prompt_tokens)
            chunk["usage"] = used.as_openai() if self._continuous else None
        return b"data: " + _encode(chunk) + b"\n\n"

    def text(
        self, index: int, text: str, template: Callable[[int], dict[str, Any]], place: str
    ) -> bytes:
        """The same, where only the text differs: `place` is where the encoded template has it."""
        parts = self._texts.get(index)
        if parts is None:
            before, _, after = _encode(template(index)).partition(place.encode())
            parts = self._texts[index] = (self._start + before, after)
        return parts[0] + _encode(text) + parts[1] + self._tail()

    def _tail(self) -> bytes:
        if not self._continuous:
            return self._end
        return b'],"usage":' + _encode(self._generation.usage.as_openai()) + b"}\n\n"

    def final_usage(self) -> bytes:
        """The chunk after the last choice: the whole usage and no choices; b"" if not asked for."""
        if not self._usage:
            return b""
        usage = _encode(self._generation.usage.as_openai())
        metrics = answer_metrics(self._generation.flights)
        told = b"," + _encode(metrics)[1:-1] if metrics else b""
        return self._start + b'],"usage":' + usage + told + b"}\n\n"
