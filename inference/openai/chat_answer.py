"""A chat completion in one body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inference.chat import ChatTurn, TurnDelta
from inference.chat.turn import message_of
from inference.generation import TokenEntry
from inference.generation.figures import answer_metrics
from inference.openai.logprobs import chat_logprobs, prompt_logprobs
from inference.openai.ranking import best_outputs
from inference.parsing import Part

#: Fields of a message that are always there, as vLLM has them: clients read them unasked.
NO_MORE: dict[str, Any] = {
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "reasoning": None,
    "reasoning_content": None,
}


@dataclass(slots=True)
class _Output:
    """One output, collected."""

    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswer:
    """Collects deltas; `body` is OpenAI's object."""

    def __init__(self, turn: ChatTurn) -> None:
        self._turn, self._options = turn, turn.options
        self._outputs = [[_Output() for _ in outputs] for outputs in turn.generation.outputs]
        self._prompt_logprobs: dict[int, Any] = {}

    def take(self, delta: TurnDelta) -> None:
        """Add what is new."""
        increment = delta.increment
        output = self._outputs[increment.number][delta.index]
        output.parts += delta.parts
        output.token_ids += increment.token_ids
        output.entries += increment.entries
        output.finish_reason, output.stop_reason = delta.finish_reason, increment.stop_reason
        if increment.prompt_logprobs is not None:
            self._prompt_logprobs[increment.number] = increment.prompt_logprobs

    def body(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        generation, job = self._turn.generation, self._turn.job
        body: dict[str, Any] = {
            "id": job.request_id,
            "object": "chat.completion",
            "created": int(job.started_at),
            "model": job.served.name,
            "choices": self._choices(),
            "usage": generation.usage.as_openai(),
            "service_tier": self._options.service_tier,
            "system_fingerprint": job.served.fingerprint,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": None,
        }
        body |= answer_metrics(generation.flights)
        if self._options.metadata is not None:
            body["metadata"] = self._options.metadata
        if job.sampling.prompt_logprobs is not None:
            scores = self._prompt_logprobs.get(0)
            body["prompt_logprobs"] = prompt_logprobs(scores, self._options.names)
        if self._options.return_token_ids:
            body["prompt_token_ids"] = job.prompts[0]
        return body

    def _choices(self) -> list[dict[str, Any]]:
        """Of each conversation in turn (of a batch; elsewhere there is one)."""
        chosen = [
            self._outputs[number][index]
            for number, outputs in enumerate(self._turn.generation.outputs)
            for index in best_outputs(outputs, self._options.n)
        ]
        return [self._choice(place, output) for place, output in enumerate(chosen)]

    def _choice(self, index: int, output: _Output) -> dict[str, Any]:
        options = self._options
        message = {"role": options.role, **NO_MORE, **message_of(output.parts)}
        if options.echo:
            message["content"] = options.echo + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": None,
        }
        if options.top_logprobs is not None:
            content = chat_logprobs(
                output.entries, options.names, options.top_logprobs, asked=options.asks_tokens
            )
            choice["logprobs"] = {"content": content, "refusal": None}
        if options.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice
