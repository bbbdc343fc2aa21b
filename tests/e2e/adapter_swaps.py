"""An adapter's name that is turned from content to content while answers come and replicas die."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis

from adapters.cards import TTL_S
from chaos.instance import Instance
from chaos.kills import _kill, _victims
from chaos.kinds import ADAPTER, OTHER_ADAPTER
from config.connections import socket_url
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.lora import AdapterRef
from engine.contract.messages import ControlRequest

READERS, PROMPTS, TOKENS = 6, 3, 120
#: Answers at the least, and seconds from one turn of the name to the next: gateways look it up
#: every two.
ANSWERS, APART_S = 13, 1.0
#: Between two answers of a reader.
REST_S = 0.2
#: Both contents have passed their check under names of their own.
_SWAP = """
import itertools, time
from pathlib import Path
from django.db import transaction
from adapters import actions
from adapters.models import Adapter, VersionState
from adapters.store import content_path
from tenants.actors import CLI_ACTOR
one, two = (Adapter.objects.get(tenant=None, name=name) for name in ({name!r}, {other!r}))
first, other = one.versions.get(), two.versions.get()
with transaction.atomic():
    second = actions.add_from_folder(
        actor=CLI_ACTOR, tenant=None, served_model=one.served_model, name=one.name,
        path=str(content_path(other.digest)),
    )
    second.state, second.rank, second.report = VersionState.READY, other.rank, other.report
    second.save()
enough = Path({enough!r})
for turn in itertools.count():
    if enough.exists():
        break
    if turn % 3 == 2:
        actions.take_offline(actor=CLI_ACTOR, adapter=one)
    else:
        actions.promote(actor=CLI_ACTOR, version=second if turn % 3 == 0 else first)
    time.sleep({apart})
actions.promote(actor=CLI_ACTOR, version=first)
"""


@dataclass
class Swapped:
    """What came of it.

    Attributes:
        expected: texts by digest and prompt, without any harm.
        answers: (digest, prompt, text) of each answer meanwhile. ids: (answer's id, digest).
        refused: status and code of each refusal.
        kills: replicas that were killed.
    """

    expected: dict[tuple[str, int], str] = field(default_factory=dict)
    answers: list[tuple[str, int, str]] = field(default_factory=list)
    ids: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    kills: int = 0

    def answered(self) -> set[str]:
        """The digests whose words came back meanwhile."""
        return {digest for digest, *_ in self.answers}

    def are_distinguishable(self) -> bool:
        """Whether a digest's words are its own: else none could be wrong."""
        return len(set(self.expected.values())) == len(self.expected)

    def mismatches(self) -> list[tuple[str, int, str]]:
        """Answers that aren't their digest's own."""
        return [answer for answer in self.answers if self.expected.get(answer[:2]) != answer[2]]


async def swapped_under_kills(instance: Instance, kills: int, seed: int, folder: Path) -> Swapped:
    """Ask by one name, while it's turned, taken offline, its weights are unloaded, replicas die.

    It goes on until both contents have answered: how long that takes is the machine's affair.

    Args:
        folder: an empty one.
    """
    swapped, enough = Swapped(), folder / "enough"
    headers = {"authorization": f"Bearer {instance.api_key}"}
    async with httpx.AsyncClient(
        base_url=instance.url, headers=headers, timeout=120, trust_env=False
    ) as http:
        for name, prompt in itertools.product((ADAPTER, OTHER_ADAPTER), range(PROMPTS)):
            await _ask(http, instance.model, name, prompt, swapped)
        swapped.expected = {(digest, prompt): text for digest, prompt, text in swapped.answers}
        swapped.answers.clear()
        program = _SWAP.format(name=ADAPTER, other=OTHER_ADAPTER, apart=APART_S, enough=str(enough))
        swapping = asyncio.create_task(asyncio.to_thread(instance.manage, "shell", "-c", program))

        async def reader(number: int) -> None:
            for prompt in itertools.count(number):
                await _ask(http, instance.model, ADAPTER, prompt % PROMPTS, swapped)
                if (
                    harming.done()
                    and swapped.answered() == digests
                    and len(swapped.answers) >= ANSWERS
                ):
                    enough.touch()
                if swapping.done():
                    return
                await asyncio.sleep(REST_S)

        digests = {digest for digest, _ in swapped.expected}
        harming = asyncio.create_task(_harm(instance, kills, seed, digests, swapped))
        await asyncio.gather(swapping, harming, *map(reader, range(READERS)))
    await asyncio.sleep(2 * TTL_S)  # until each gateway has seen the last turn
    return swapped


async def _ask(
    http: httpx.AsyncClient, model: str, adapter: str, prompt: int, swapped: Swapped
) -> None:
    body = {
        "model": f"{model}:{adapter}",
        "messages": [{"role": "user", "content": f"Tell me about ship {prompt}."}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        **({"temperature": 1, "seed": prompt} if prompt % 2 else {"temperature": 0}),
    }
    text: list[str] = []
    name = ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            error = json.loads(await response.aread())["error"]
            swapped.refused.append((response.status_code, error["code"]))
            await asyncio.sleep(0.2)
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                name = chunk["id"]
                text += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    digest = response.headers["x-quire-adapter"]
    swapped.answers.append((digest, prompt, "".join(text)))
    swapped.ids.append((name, digest))


async def _harm(
    instance: Instance, kills: int, seed: int, digests: set[str], swapped: Swapped
) -> None:
    """Kill replicas that stream, one after another; have all let go of the weights in between."""
    rng = random.Random(seed)
    while swapped.kills < kills:
        await asyncio.to_thread(_unload, instance, digests)
        await asyncio.sleep(rng.uniform(0.5, 1.5))
        victims = await asyncio.to_thread(_victims, instance)
        swapped.kills += bool(victims) and _kill(rng.choice(victims).pid)


def _unload(instance: Instance, digests: set[str]) -> None:
    with redis.Redis.from_url(socket_url(instance.data_dir), socket_timeout=5) as client:
        for beat in instance.heartbeats():
            for digest in sorted(digests):
                message = ControlRequest(
                    command="unload_adapter", adapter=AdapterRef(digest=digest)
                )
                client.xadd(
                    redis_keys.inbox_key(beat.replica_id),
                    {protocol.STREAM_FIELD: protocol.encode(message)},
                )
