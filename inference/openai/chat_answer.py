"""A chat completion in one body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inference.generation import Generation, Increment, TokenEntry
from inference.openai.chat_options import ChatOptions
from inference.openai.logprobs import chat_logprobs, prompt_logprobs
from inference.openai.ranking import best_outputs
from inference.tools import ParsedText


@dataclass(slots=True)
class _Output:
    """One output, collected."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswer:
    """Collects increments; `body` is OpenAI's object."""

    def __init__(self, generation: Generation, options: ChatOptions) -> None:
        self._generation, self._options = generation, options
        self._outputs = [_Output() for _ in generation.outputs[0]]
        self._prompt_logprobs: Any = None

    def take(self, increment: Increment) -> None:
        """Add what is new."""
        output = self._outputs[increment.index]
        output.text += increment.text
        output.token_ids += increment.token_ids
        output.entries += increment.entries
        output.finish_reason, output.stop_reason = increment.finish_reason, increment.stop_reason
        self._prompt_logprobs = increment.prompt_logprobs or self._prompt_logprobs

    def body(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        generation, job = self._generation, self._generation.job
        chosen = best_outputs(generation.outputs[0], self._options.n)
        body: dict[str, Any] = {
            "id": job.request_id,
            "object": "chat.completion",
            "created": int(job.started_at),
            "model": job.served.name,
            "choices": [
                self._choice(place, self._outputs[index]) for place, index in enumerate(chosen)
            ],
            "usage": generation.usage.as_openai(),
            "service_tier": None,
            "system_fingerprint": job.served.fingerprint,
        }
        if job.sampling.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs, self._options.names)
        if self._options.return_token_ids:
            body["prompt_token_ids"] = job.prompts[0]
        return body

    def _choice(self, index: int, output: _Output) -> dict[str, Any]:
        options = self._options
        parsed = self._parse(output.text)
        message: dict[str, Any] = {
            "role": options.role,
            "content": options.echo + parsed.content,
            "refusal": None,
        }
        finish_reason = output.finish_reason
        if parsed.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.calls
            ]
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": output.stop_reason,
        }
        if options.top_logprobs is not None:
            content = chat_logprobs(output.entries, options.names, options.top_logprobs)
            choice["logprobs"] = {"content": content, "refusal": None}
        if options.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _parse(self, text: str) -> ParsedText:
        choice = self._options.parser
        if choice is None:
            return ParsedText(text)
        parser = choice.make()
        parsed = parser.push(text)
        parsed.add(parser.flush())
        if not choice.parallel:
            del parsed.calls[1:]
        return parsed
