"""vLLM's answers with token ids, in one body and as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from engine.contract.protocol import TokenLogprobs
from inference.generation import Generation, Increment, TokenEntry
from inference.generation.collected import Collected
from inference.openai.logprobs import TokenNames, chat_logprobs, finite, prompt_logprobs
from inference.openai.ranking import best_outputs
from inference.openai.serving import DONE, StreamWriter
from inference.tokens.schemas import TokensRequest

_encode = msgspec.json.Encoder().encode


class _Choices:
    """Choices in the form that the request asked for: ids alone, or their text too."""

    def __init__(self, generation: Generation, request: TokensRequest, alternatives: int | None):
        self._text = request.output_mode == "text"
        self._alternatives = alternatives
        self._asked = generation.job.sampling.logprob_token_ids is not None
        self.names = TokenNames(generation.job.served.tokenizer, as_ids=False)

    def choice(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        entries: Sequence[TokenEntry],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> dict[str, Any]:
        """One output, or what is new of it."""
        made: dict[str, Any] = {
            "index": index,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": token_ids,
            "logprobs": None,
        }
        if self._text:
            made["text"] = text
        if self._alternatives is not None:
            made["logprobs"] = {"content": self._logprobs(entries, self._alternatives)}
        return made

    def _logprobs(self, entries: Sequence[TokenEntry], top: int) -> list[dict[str, Any]]:
        if self._text:
            return chat_logprobs(entries, self.names, top, asked=self._asked)
        return [
            {
                **_scored(entry.logprobs, 0),
                # Without alternatives it's the token itself, as vLLM has it.
                "top_logprobs": [
                    _scored(entry.logprobs, place)
                    for place in range(1, len(entry.logprobs.token_ids)) or (0,)
                ],
            }
            for entry in entries
        ]


def _scored(scores: TokenLogprobs, place: int) -> dict[str, Any]:
    return {
        "token_id": scores.token_ids[place],
        "logprob": finite(scores.logprobs[place]),
        "rank": scores.ranks[place],
    }


class TokensAnswer:
    """Collects increments; `body` is vLLM's object."""

    def __init__(
        self, generation: Generation, request: TokensRequest, alternatives: int | None
    ) -> None:
        self._generation, self._request = generation, request
        self._choices = _Choices(generation, request, alternatives)
        self._outputs = [Collected() for _ in generation.outputs[0]]
        self._scores: list[TokenLogprobs | None] | None = None

    def take(self, increment: Increment) -> None:
        """Add what is new."""
        self._outputs[increment.index].take(increment)
        if increment.prompt_logprobs is not None:
            self._scores = increment.prompt_logprobs

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        generation, job, request = self._generation, self._generation.job, self._request
        best = best_outputs(generation.outputs[0], job.sampling.n)
        chosen = [self._outputs[index] for index in best]
        return {
            "output_mode": request.output_mode,
            "request_id": request.request_id or job.request_id,
            "model": job.served.name,
            "created": int(job.started_at),
            "choices": [
                self._choices.choice(
                    place, out.text, out.token_ids, out.entries, out.finish_reason, out.stop_reason
                )
                for place, out in enumerate(chosen)
            ],
            "usage": generation.usage.as_openai(),
            "prompt_logprobs": prompt_logprobs(self._scores, self._choices.names),
            "prompt_token_ids": job.prompts[0] if request.return_token_ids else None,
            "kv_transfer_params": None,
        }


class TokensStreamWriter(StreamWriter[Increment]):
    """The same in chunks, then `[DONE]`."""

    def __init__(
        self, generation: Generation, request: TokensRequest, alternatives: int | None
    ) -> None:
        self._generation, self._request = generation, request
        self._choices = _Choices(generation, request, alternatives)
        self._is_first = True

    def write(self, news: Iterable[Increment]) -> bytes:
        """A chunk an output."""
        return b"".join(map(self._write, news))

    def _write(self, increment: Increment) -> bytes:
        options = self._request.stream_options
        continuous = options and options.include_usage and options.continuous_usage_stats
        choice = self._choices.choice(
            increment.index,
            increment.text,
            increment.token_ids,
            increment.entries,
            increment.finish_reason,
            increment.stop_reason,
        )
        return self._chunk([choice], usage=bool(continuous))

    def _chunk(self, choices: list[dict[str, Any]], *, usage: bool) -> bytes:
        job = self._generation.job
        body: dict[str, Any] = {
            "output_mode": self._request.output_mode,
            "request_id": self._request.request_id or job.request_id,
            "choices": choices,
            "usage": self._generation.usage.as_openai() if usage else None,
        }
        if self._is_first:
            shown = self._request.return_token_ids
            body["prompt_token_ids"] = job.prompts[0] if shown else None
            self._is_first = False
        return b"data: " + _encode(body) + b"\n\n"

    def end(self) -> bytes:
        """The usage when asked for, and the end mark."""
        options = self._request.stream_options
        usage = options is not None and options.include_usage
        return (self._chunk([], usage=True) if usage else b"") + DONE
