"""`ChatSession`: one answer to a chat, from a validated request to parsed deltas."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.contract.reasoning import ReasoningPhase, ReasoningState
from inference.chat.job import ChatOptions, build_chat_job
from inference.chat.parsers import OutputParser
from inference.generation.generation import Generation
from inference.generation.model_resolution import check_queue, resolve_model
from inference.generation.output import OutputDelta
from inference.metrics.recorder import recorder
from inference.parsers.state_machine import START_KINDS, Part
from inference.request.context import RequestContext
from inference.request.job import Job, Usage
from inference.schemas.chat import ChatRequest
from metering.access import Admission

#: Call ids that parsers generate.
MODEL_CALL_ID = re.compile("call_[0-9a-f]{24}")


@dataclass(slots=True)
class TurnDelta:
    """Increment of one output.

    Attributes:
        index: of the output.
        parts: the new text, parsed, in the model's order.
        increment: the tokens of the text, their log probabilities, the stop reason.
        finish_reason: OpenAI's, on the last delta: "stop", "length" or "tool_calls".
    """

    index: int
    parts: list[Part]
    increment: OutputDelta
    finish_reason: str | None = None


class ChatSession:
    """A running answer. Read deltas with `next` until `finished`; `release` it in any case."""

    def __init__(self, generation: Generation, options: ChatOptions) -> None:
        self.generation, self.options = generation, options
        plan = options.parsers
        self._parsers = [
            [None if plan.is_plain_text else OutputParser(plan) for _ in outputs]
            for outputs in generation.outputs
        ]

        if plan.reasoning is not None:
            generation.reasoning_tokens = 0
        self._thinking = [
            [ReasoningState(plan.thinking) if plan.thinking is not None else None for _ in outputs]
            for outputs in generation.outputs
        ]

    @classmethod
    async def start(
        cls,
        chat: ChatRequest,
        ctx: RequestContext,
        *,
        endpoint: str = "chat.completions",
        id_prefix: str = "chatcmpl",
    ) -> ChatSession:
        """Render, check, admit and submit a chat.

        Args:
            endpoint: for the ledger. id_prefix: of the request's id.

        Raises:
            InvalidRequest: with the name of the client's field. ModelNotFound, EngineUnavailable.
            RateLimited: a limit is reached. ServiceUnavailable: the limits can't be read.
        """
        served = await resolve_model(ctx, chat.model, sticky=chat.sticky_key)
        priority, _ = chat.resolve_service_tier(ctx.caller.max_priority)
        check_queue(ctx, served, priority, stream=chat.stream)
        job, options = await build_chat_job(
            chat, served, ctx, endpoint=endpoint, id_prefix=id_prefix
        )
        return cls(await Generation.start(job), options)

    @classmethod
    async def start_many(cls, chats: Sequence[ChatRequest], ctx: RequestContext) -> ChatSession:
        """Start several conversations with the same settings as one request.

        `increment.number` of a delta is the conversation's index.
        """
        served = await resolve_model(ctx, chats[0].model, sticky=chats[0].sticky_key)
        check_queue(ctx, served, chats[0].resolve_service_tier(ctx.caller.max_priority)[0])
        jobs = [
            await build_chat_job(
                chat, served, ctx, endpoint="chat.completions", id_prefix="chatcmpl"
            )
            for chat in chats
        ]
        job, options = jobs[0]
        job.prompts = [prompt for chat_job, _ in jobs for prompt in chat_job.prompts]
        if any(chat_job.media for chat_job, _ in jobs):
            job.media = [items for chat_job, _ in jobs for items in chat_job.media or [[]]]
            job.media_data = {k: v for chat_job, _ in jobs for k, v in chat_job.media_data.items()}
        return cls(await Generation.start(job), options)

    @property
    def job(self) -> Job:
        return self.generation.job

    @property
    def admission(self) -> Admission:
        return self.generation.admission

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return self.generation.finished

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self.generation.usage

    async def next(self, wait_s: float | None = None) -> list[TurnDelta]:
        """The next deltas, at most one per output; [] after `wait_s` seconds without any.

        Raises: errors of the engine or the gateway. The turn is released then.
        """
        return [self._delta(increment) for increment in await self.generation.next(wait_s)]

    def _delta(self, increment: OutputDelta) -> TurnDelta:
        self._count(increment)
        is_final = increment.finish_reason is not None
        parser = self._parsers[increment.number][increment.index]
        if parser is None:
            parts = [Part("content", increment.text)] if increment.text else []
            return TurnDelta(increment.index, parts, increment, increment.finish_reason)
        parts = parser.push(increment.text, is_final=is_final)
        for part in parts:
            if part.kind in START_KINDS and MODEL_CALL_ID.fullmatch(part.id):
                part.id = self._call_id(increment, part.call)
        reason = increment.finish_reason
        if is_final and self.options.parsers.tools is not None:
            recorder.record_tool_parse(self.job, called=parser.num_calls > 0)
        if reason == "stop" and parser.num_calls and not self.options.parsers.named_tool:
            reason = "tool_calls"
        return TurnDelta(increment.index, parts, increment, reason)

    def _call_id(self, increment: OutputDelta, call: int) -> str:
        """Id of a call to which the model gave none; the same in every gateway that reads it."""
        source = f"{self.job.request_id}/{increment.number}/{increment.index}/{call}"
        return f"call_{hashlib.sha256(source.encode()).hexdigest()[:24]}"

    def _count(self, increment: OutputDelta) -> None:
        """Count the reasoning tokens, markers included."""
        thinking = self._thinking[increment.number][increment.index]
        if thinking is not None and thinking.phase is not ReasoningPhase.PAST:
            counted = sum(map(thinking.advance, increment.token_ids))
            so_far = self.generation.reasoning_tokens or 0
            self.generation.reasoning_tokens = so_far + counted

    def release(self) -> None:
        """Abort what still runs and settle the usage, once. Callable from any thread."""
        self.generation.release()


def build_message(parts: list[Part]) -> dict[str, Any]:
    """All parts of an output as OpenAI's message fields: content, reasoning, tool_calls.

    `content` is None if there are only calls. Empty fields are left out.
    """
    texts = {"content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif part.kind == "arguments":
            calls[part.call]["function"]["arguments"] += part.text
        elif part.kind == "custom":
            custom = {"name": part.text, "input": ""}
            calls.append({"id": part.id, "type": "custom", "custom": custom})
        elif part.kind == "input":
            calls[part.call]["custom"]["input"] += part.text
        else:
            texts[part.kind] += part.text
    message: dict[str, Any] = {"content": texts["content"]}
    if texts["reasoning"]:
        message["reasoning"] = message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    return message
