"""A chat completion as a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inference.generation import Generation, Increment
from inference.openai.chat_options import ChatOptions
from inference.openai.chunks import ChunkEncoder
from inference.openai.logprobs import chat_logprobs
from inference.openai.serving import DONE
from inference.tools import ParsedText, ToolParser

_PLACE = '"\\u0000text"'
_TEXT_MARK = "\0text"


class ChatStreamWriter:
    """OpenAI's `chat.completion.chunk`s: role, text, finish reason, usage, `[DONE]`."""

    def __init__(self, generation: Generation, options: ChatOptions) -> None:
        job = generation.job
        self._generation, self._options = generation, options
        head = {
            "id": job.request_id,
            "object": "chat.completion.chunk",
            "created": int(job.started_at),
            "model": job.served.name,
            "service_tier": None,
            "system_fingerprint": job.served.fingerprint,
        }
        self._chunks = ChunkEncoder(
            head,
            generation,
            usage=options.include_usage,
            continuous=options.continuous_usage,
        )
        self._parsers: dict[int, ToolParser] = {}
        self._calls: dict[int, int] = {}
        # Nothing but text: the chunk is put together from pieces that are encoded already.
        self._plain = not (
            options.parser or options.return_token_ids or options.top_logprobs is not None
        )

    def begin(self) -> bytes:
        """A chunk with the role for each choice, and one with the echoed message."""
        out = b""
        for index in range(self._options.n):
            first = self._choice(index, {"role": self._options.role, "content": ""})
            if self._options.return_token_ids:
                first["prompt_token_ids"] = self._generation.job.prompts[0]
            out += self._chunks.choice(first)
            if self._options.echo:
                out += self._chunks.choice(self._choice(index, {"content": self._options.echo}))
        return out

    def write(self, increments: Iterable[Increment]) -> bytes:
        """Chunks for what is new."""
        return b"".join(map(self._write, increments))

    def _write(self, increment: Increment) -> bytes:
        if self._plain and increment.finish_reason is None:
            return self._text(increment.index, increment.text)
        delta, called = self._delta(increment)
        if increment.finish_reason is None:
            return self._chunks.choice(self._full(increment, delta)) if delta else b""
        out = b""
        if delta:
            out += self._chunks.choice(self._full(increment, delta))
            increment.entries, increment.token_ids = [], []
        last = self._full(increment, {})
        last["finish_reason"] = increment.finish_reason
        if called and increment.finish_reason == "stop":
            last["finish_reason"] = "tool_calls"
        last["stop_reason"] = increment.stop_reason
        return out + self._chunks.choice(last)

    def _text(self, index: int, text: str) -> bytes:
        template = self._choice(index, {"content": _TEXT_MARK})
        return self._chunks.text(index, text, template, _PLACE)

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _full(self, increment: Increment, delta: dict[str, Any]) -> dict[str, Any]:
        """A choice with the increment's tokens as far as they are asked for."""
        options = self._options
        choice = self._choice(increment.index, delta)
        if options.top_logprobs is not None and increment.entries:
            content = chat_logprobs(increment.entries, options.names, options.top_logprobs)
            choice["logprobs"] = {"content": content, "refusal": None}
        if options.return_token_ids:
            choice["token_ids"] = increment.token_ids
        return choice

    def _delta(self, increment: Increment) -> tuple[dict[str, Any], bool]:
        """The increment's text as a delta, and whether the output has called a tool so far."""
        index = increment.index
        parsed = self._parse(increment)
        delta: dict[str, Any] = {"content": parsed.content} if parsed.content else {}
        if not delta and self._shows_tokens(increment):
            delta = {"content": ""}
        first = self._calls.get(index, 0)
        if parsed.calls:
            delta["tool_calls"] = [
                {
                    "index": first + place,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for place, call in enumerate(parsed.calls)
            ]
            self._calls[index] = first + len(parsed.calls)
        return delta, self._calls.get(index, 0) > 0

    def _shows_tokens(self, increment: Increment) -> bool:
        """Whether tokens have to be written although they made no text."""
        options = self._options
        return bool(
            (options.top_logprobs is not None and increment.entries)
            or (options.return_token_ids and increment.token_ids)
        )

    def _parse(self, increment: Increment) -> ParsedText:
        choice = self._options.parser
        if choice is None:
            return ParsedText(increment.text)
        parser = self._parsers.get(increment.index)
        if parser is None:
            parser = self._parsers[increment.index] = choice.make()
        parsed = parser.push(increment.text)
        if increment.finish_reason is not None:
            parsed.add(parser.flush())
        if not choice.parallel:
            del parsed.calls[1 - min(1, self._calls.get(increment.index, 0)) :]
        return parsed

    def end(self) -> bytes:
        """The usage when asked for, and the end mark."""
        return self._chunks.final_usage() + DONE
