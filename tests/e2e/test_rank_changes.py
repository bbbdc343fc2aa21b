"""A product whose model's processes change or die while clients stream: no request fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from catalog.heartbeats import read_heartbeats, registered_replicas
from config.connections import socket_url
from engine import SamplingParams
from engine.contract.redis_keys import KEY_PREFIX
from tests.e2e.product import Product, product_pids, running
from tests.engine.families.conftest import checkpoint
from tests.engine.ranks.test_tensor_parallel import running as running_engine
from tests.survey.tiny import prompts

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.slow, pytest.mark.system]

PROMPTS = prompts((1, 47, 16, 64))
TOKENS = 300


def expected_texts(folder: Path) -> list[str]:
    """What one engine says."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with running_engine(folder, 1) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        results = llm.generate(inputs, params, use_tqdm=False)
    return [result.outputs[0].text for result in results]


async def stream(client: httpx.AsyncClient, number: int, started: asyncio.Event) -> str:
    """The text of a completion, which sets `started` with its first token."""
    body: dict[str, Any] = {
        "model": "m", "prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    text = ""
    async with client.stream("POST", "/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = httpx.Response(200, text=line[6:]).json()
                text += event["choices"][0]["text"] if event["choices"] else ""
                started.set()
    return text


def replicas(product: Product) -> list[tuple[str, int]]:
    """State and number of ranks of each replica that lives."""
    with redis.Redis.from_url(socket_url(product.data_dir)) as client:
        ids = registered_replicas(client, KEY_PREFIX)
        beats = read_heartbeats(client, KEY_PREFIX, sorted(ids))
    return [(beat.state, beat.model.num_ranks) for beat in beats.values()]


def connected(product: Product) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {product.api_key}"}
    return httpx.AsyncClient(base_url=product.base_url, headers=headers, timeout=120)


async def test_engines_that_share_experts_say_what_one_says_and_come_back_together(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("mixtral")
    expected = expected_texts(folder)
    flags = ("--model", str(folder), "--served-model-name", "m", "--no-worker")
    flags += ("--data-parallel-size", "2", "--enable-expert-parallel", "--num-threads", "2")
    with running(tmp_path, *flags) as product:
        async with connected(product) as client:

            async def ask_all(started: asyncio.Event) -> list[str]:
                return await asyncio.gather(*(stream(client, n, started) for n in range(4)))

            assert await ask_all(asyncio.Event()) == expected
            engines = product_pids(product, "--data-parallel-size=2")
            assert len(engines) == 2
            started = asyncio.Event()
            asking = asyncio.create_task(ask_all(started))
            await started.wait()
            os.kill(engines[0], signal.SIGKILL)
            assert await asking == expected
            assert set(engines).isdisjoint(product_pids(product, "engine.serving"))
            assert await ask_all(asyncio.Event()) == expected


@pytest.mark.parametrize(
    ("flags", "change", "ranks"),
    [
        ((), "settings={{'num_threads': 2, 'tensor_parallel_size': {size}}}", lambda n: [n]),
        # Engines that share experts, and one that has them all.
        (("--enable-expert-parallel",), "num_replicas={size}", lambda n: [1] * n),
    ],
    ids=["ranks", "engines"],
)
async def test_a_models_ranks_change_under_load_and_no_request_fails(
    flags: tuple[str, ...],
    change: str,
    ranks: Callable[[int], list[int]],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = checkpoint("mixtral")
    expected = expected_texts(folder)
    flags = ("--model", str(folder), "--served-model-name", "m", "--no-worker", *flags)
    with running(tmp_path, *flags, "--num-threads", "2") as product:
        async with connected(product) as client:
            finished = asyncio.Event()

            async def ask(number: int) -> int:
                """Ask the same until it's over; the number of answers."""
                count = 0
                while not finished.is_set():
                    assert await stream(client, number, asyncio.Event()) == expected[number]
                    count += 1
                return count

            asking = [asyncio.create_task(ask(number)) for number in range(len(PROMPTS))]
            for size in (2, 1):
                code = (
                    "from catalog import actions; from catalog.models import ServedModel; "
                    "from tenants.actors import CLI_ACTOR; actions.update_model(actor=CLI_ACTOR, "
                    f"model=ServedModel.objects.get(name='m'), {change.format(size=size)})"
                )
                await asyncio.to_thread(product.manage, "shell", "-c", code)
                async with asyncio.timeout(120):
                    while replicas(product) != [("ready", number) for number in ranks(size)]:
                        assert not any(task.done() for task in asking)
                        assert "ready" in dict(replicas(product))  # at every look
                        await asyncio.sleep(0.2)
                if ranks(size) == [2]:  # streams wait until the group has started again
                    [rank] = product_pids(product, "engine.executor.rank_process")
                    os.kill(rank, signal.SIGKILL)
                    async with asyncio.timeout(120):
                        while product_pids(product, "engine.executor.rank_process") in (
                            [], [rank]
                        ) or replicas(product) != [("ready", 2)]:  # fmt: skip
                            assert not any(task.done() for task in asking)
                            await asyncio.sleep(0.2)
            finished.set()
            counts = await asyncio.gather(*asking)
    print(f"answers: {counts}")
    assert min(counts) > 2


async def test_replicas_of_several_ranks_each_have_all_experts_between_them(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("mixtral")
    expected = expected_texts(folder)
    flags = ("--model", str(folder), "--served-model-name", "m", "--no-worker")
    flags += ("--data-parallel-size", "2", "--tensor-parallel-size", "2")
    with running(tmp_path, *flags, "--enable-expert-parallel", "--num-threads", "2") as product:
        async with connected(product) as client, asyncio.timeout(120):
            while (states := replicas(product)) != [("ready", 2)] * 2:
                assert len(states) <= 2
                await asyncio.sleep(0.2)
            started = asyncio.Event()
            texts = await asyncio.gather(*(stream(client, n % 4, started) for n in range(8)))
            assert texts == expected * 2
