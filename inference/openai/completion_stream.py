"""A completion as a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inference.generation import Generation, Increment
from inference.openai.chunks import ChunkEncoder
from inference.openai.completion_options import CompletionOptions
from inference.openai.logprobs import completion_logprobs, joined
from inference.openai.serving import DONE, StreamWriter

_PLACE = '"\\u0000text"'
_TEXT_MARK = "\0text"


class CompletionStreamWriter(StreamWriter[Increment]):
    """OpenAI's streamed `text_completion`s. A choice's echo comes with its first text."""

    def __init__(self, generation: Generation, options: CompletionOptions) -> None:
        job = generation.job
        self._generation, self._options = generation, options
        head = {
            "id": job.request_id,
            "object": "text_completion",
            "created": int(job.started_at),
            "model": job.served.name,
            "system_fingerprint": job.served.fingerprint,
        }
        self._chunks = ChunkEncoder(
            head,
            generation,
            usage=options.include_usage,
            continuous=options.continuous_usage,
        )
        self._begun: set[int] = set()
        self._plain = (
            options.logprobs is None and not options.return_token_ids and options.shows_output
        )

    def write(self, increments: Iterable[Increment]) -> bytes:
        """Chunks for what is new."""
        return b"".join(map(self._write, increments))

    def _write(self, increment: Increment) -> bytes:
        options = self._options
        index = increment.number * options.n + increment.index
        first = index not in self._begun
        self._begun.add(index)
        text = increment.text if options.shows_output else ""
        if first:
            text = options.echo(increment.number) + text
        if self._plain and increment.finish_reason is None:
            return self._chunks.text(index, text, self._text_choice, _PLACE) if text else b""
        choice = self._choice(index, text)
        choice["finish_reason"] = increment.finish_reason
        if options.shows_output:
            choice["stop_reason"] = increment.stop_reason
        self._add_tokens(choice, increment, first)
        return self._chunks.choice(choice)

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }

    def _text_choice(self, index: int) -> dict[str, Any]:
        return self._choice(index, _TEXT_MARK)

    def _add_tokens(self, choice: dict[str, Any], increment: Increment, first: bool) -> None:
        """Log probabilities and token ids, as far as they are asked for."""
        options = self._options
        prompt = self._generation.job.known_prompt(increment.number)
        entries = increment.entries if options.shows_output else []
        if options.logprobs is not None:
            start = len(options.echo(increment.number))
            own = completion_logprobs(entries, options.names, start)
            echo = options.echo_logprobs(prompt, increment.prompt_logprobs) if first else None
            choice["logprobs"] = joined(echo, own)
        if options.return_token_ids:
            choice["token_ids"] = increment.token_ids if options.shows_output else []
            if first:
                choice["prompt_token_ids"] = prompt or None

    def end(self) -> bytes:
        """The usage when asked for, and the end mark."""
        return self._chunks.final_usage() + DONE
