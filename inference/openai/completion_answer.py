"""A completion in one body."""

from __future__ import annotations

from typing import Any

from engine.contract.protocol import TokenLogprobs
from inference.generation import Generation, Increment
from inference.generation.collected import Collected
from inference.generation.figures import answer_metrics
from inference.openai.completion_options import CompletionOptions
from inference.openai.logprobs import completion_logprobs, joined, prompt_logprobs
from inference.openai.ranking import best_outputs


class CompletionAnswer:
    """Collects increments; `body` is OpenAI's object. Choices are in the order of the prompts."""

    def __init__(self, generation: Generation, options: CompletionOptions) -> None:
        self._generation, self._options = generation, options
        self._outputs = [[Collected() for _ in outputs] for outputs in generation.outputs]
        self._scores: dict[int, list[TokenLogprobs | None]] = {}

    def take(self, increment: Increment) -> None:
        """Add what is new."""
        self._outputs[increment.number][increment.index].take(increment)
        if increment.prompt_logprobs is not None:
            self._scores[increment.number] = increment.prompt_logprobs

    def body(self) -> dict[str, Any]:
        """The `text_completion` object."""
        generation, job = self._generation, self._generation.job
        choices: list[dict[str, Any]] = []
        for number, outputs in enumerate(self._outputs):
            for index in best_outputs(generation.outputs[number], self._options.n):
                choices.append(self._choice(len(choices), number, outputs[index]))
        usage = generation.usage
        if not self._options.shows_output:
            usage.completion_tokens = 0
        body: dict[str, Any] = {
            "id": job.request_id,
            "object": "text_completion",
            "created": int(job.started_at),
            "model": job.served.name,
            "choices": choices,
            "usage": usage.as_openai(),
            "service_tier": self._options.service_tier,
            "system_fingerprint": job.served.fingerprint,
            "kv_transfer_params": None,
        }
        body |= answer_metrics(generation.flights)
        if self._options.metadata is not None:
            body["metadata"] = self._options.metadata
        return body

    def _choice(self, place: int, number: int, output: Collected) -> dict[str, Any]:
        options, prompt = self._options, self._generation.job.known_prompt(number)
        echo, shown = options.echo(number), options.shows_output
        scores = self._scores.get(number)
        choice: dict[str, Any] = {
            "index": place,
            "text": echo + (output.text if shown else ""),
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason if shown else None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        if options.logprobs is not None:
            own = completion_logprobs(output.entries if shown else [], options.names, len(echo))
            choice["logprobs"] = joined(options.echo_logprobs(prompt, scores), own)
        if options.shows_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(scores, options.names)
        if options.return_token_ids:
            choice["token_ids"] = output.token_ids if shown else []
            choice["prompt_token_ids"] = prompt or None
        return choice
