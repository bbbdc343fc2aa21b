"""Streams of every kind, and what a client has of one when it has ended."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import redis

from config.redis_urls import socket_url
from engine.contract import protocol
from engine.contract.protocol import Heartbeat
from tests.e2e.product import Product

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 6},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 16},
    },
    "required": ["name", "tags", "ages"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "store", "parameters": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "logprobs": {"ignore_eos": True, "logprobs": True, "top_logprobs": 3},
    "grammar": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
        }
    },
    "tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "store"}},
    },
    "several": {"ignore_eos": True, "n": 3},
    "stop": {"ignore_eos": True, "stop": ["zqx zqx", "\n\n\n\n\n\n"]},
    "penalties": {"ignore_eos": True, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "usage": {"ignore_eos": True, "stream_options": {"continuous_usage_stats": True}},
    # The prompt has opened the reasoning; the budget closes it.
    "reasoning": {
        "ignore_eos": True,
        "messages": [
            {"role": "user", "content": "Tell me a story."},
            {"role": "assistant", "content": "<think>\nLet me think"},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "thinking_token_budget": 40,
    },
}


@dataclass
class Choice:
    """One choice, put together from its chunks."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """One stream's end. `same` is what must not depend on any fault.

    Attributes:
        cached: every count of cached prompt tokens that it was told: one, whatever was resumed.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    id: str = ""
    cached: set[int] = field(default_factory=set)

    def take(self, chunk: dict[str, Any]) -> None:
        self.id = chunk["id"]
        if usage := chunk.get("usage"):
            self.usage = usage
            self.cached.add((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        for part in chunk["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            choice.text += part["delta"].get("content") or ""
            choice.reasoning += part["delta"].get("reasoning") or ""
            for call in part["delta"].get("tool_calls") or ():
                known = choice.calls.setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
            for entry in (part["logprobs"] or {}).get("content") or ():
                choice.tokens.append(entry["token"])
                choice.logprobs.append(entry["logprob"])
            choice.finish_reason = part["finish_reason"] or choice.finish_reason

    @property
    def same(self) -> dict[str, Any]:
        used = {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens")}
        return {
            "choices": {
                index: (
                    *(choice.text, choice.reasoning, choice.calls),
                    *(choice.tokens, choice.logprobs, choice.finish_reason),
                )
                for index, choice in self.choices.items()
            },
            "usage": used | {"numerics_changed": self.usage.get("numerics_changed", False)},
            "reasoning_tokens": (self.usage.get("completion_tokens_details") or {}).get(
                "reasoning_tokens"
            ),
            "ended": self.ended,
        }


def bodies(product: Product, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests of all kinds in turn, every second one greedy, the others seeded."""
    kinds = list(KINDS)
    made = []
    for number in range(count):
        turn, place = divmod(number, len(kinds))
        kind = kinds[place]
        greedy = (place + turn) % 2 == 0
        made.append(
            {
                "model": product.model,
                "messages": [{"role": "user", "content": f"Tell me story {number}."}],
                "max_tokens": max_tokens,
                "stream": True,
                **({"temperature": 0} if greedy else {"temperature": 1, "seed": number}),
                **KINDS[kind],
                "stream_options": {"include_usage": True, **KINDS[kind].get("stream_options", {})},
            }
        )
    return made


def stop_within(text: str, size: int = 16) -> str:
    """A piece of a text that stands there once, behind its first half if there is such a one."""
    places = [*range(len(text) // 2, len(text) - size), *range(len(text) // 2)]
    return next(text[at : at + size] for at in places if text.find(text[at : at + size]) == at)


async def ask(
    client: httpx.AsyncClient,
    product: Product,
    body: dict[str, Any],
    on_chunk: Callable[[], None] = lambda: None,
) -> Answer:
    """Read a stream to its end."""
    answer = Answer()
    headers = {"Authorization": f"Bearer {product.api_key}"}
    url = f"{product.base_url}/chat/completions"
    async with client.stream("POST", url, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            assert '"error"' not in line[:20], line
            if line == "data: [DONE]":
                answer.ended = True
            elif line.startswith("data: "):
                answer.take(json.loads(line.removeprefix("data: ")))
                on_chunk()
    return answer


def heartbeats(product: Product) -> list[Heartbeat]:
    """Of the product's replicas that serve its first model."""
    with redis.Redis.from_url(socket_url(product.data_dir)) as client:
        ids = [one.decode() for one in client.smembers(protocol.replicas_key())]
        found = client.mget([protocol.replica_key(one) for one in sorted(ids)])
    beats = [protocol.decode_heartbeat(data) for data in found if data is not None]
    return [beat for beat in beats if beat.model.name == product.model]


async def until(condition: Callable[[], object], limit_s: float = 300.0) -> None:
    """Wait until it holds. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        for _ in itertools.count():
            if condition():
                return
            await asyncio.sleep(0.02)


class Killer:
    """Kills a replica whenever so many chunks have come since the last time.

    Args:
        chunks: that all streams together will have, about.
    """

    def __init__(self, product: Product, kills: int, chunks: int, seed: int) -> None:
        self._product, self._rng = product, random.Random(seed)
        mean = 0.9 * chunks / kills
        # Not one right after the other: whoever kills three in a row before a token came of them
        # is taken for the reason of their deaths.
        self._gaps = [self._rng.uniform(0.2, 1.8) * mean for _ in range(kills)]
        self._seen = 0
        self.killed = Counter[str]()

    def chunk(self) -> None:
        """One more chunk came."""
        self._seen += 1

    async def run(self) -> None:
        """Until all kills are done."""
        for gap in self._gaps:
            at = self._seen + gap
            await until(lambda at=at: self._seen >= at)
            await self._kill()

    def _ready(self) -> list[Heartbeat]:
        return [beat for beat in heartbeats(self._product) if beat.state == "ready"]

    async def _kill(self) -> None:
        """A ready one; where none is, the next to be."""
        await until(self._ready)
        victim = self._rng.choice(self._ready() or heartbeats(self._product))
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:  # it died since that heartbeat
            await asyncio.sleep(0.1)
            await self._kill()
            return
        self.killed[victim.replica_id] += 1
