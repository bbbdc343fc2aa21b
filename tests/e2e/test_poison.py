"""A request that kills each replica that computes it, beside others that must not go along."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.poisoned_replica import POISON
from tests.e2e.poisoned_settings import MAX_ATTEMPTS
from tests.e2e.product import ROOT, Product, running
from tests.platform.instance import internal

pytestmark = pytest.mark.timeout(900)

NEIGHBOURS, TOKENS = 6, 300
#: `MAX_ATTEMPTS`, and `MAX_SHARED_CRASHES` before these;
#: tests/inference/test_crash_attribution.py counts exactly.
#: On a busy machine a replica that was silent, and that the request has left, may die of it later.
MAX_DEATHS, LATE = MAX_ATTEMPTS + 2, 2


async def stream(client: httpx.AsyncClient, product: Product, **fields: Any) -> tuple[str, str]:
    """A completion's text, and the code of the error that ended it or ""."""
    body = {"model": product.model, "stream": True, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {product.api_key}"}
    url = f"{product.base_url}/completions"
    text: list[str] = []
    async with client.stream("POST", url, json=body, headers=headers) as response:
        if response.status_code != 200:
            await response.aread()
            return "", response.json()["error"]["code"]
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = httpx.Response(200, text=line[6:]).json()
            if "error" in event:
                return "".join(text), event["error"]["code"]
            text += [choice["text"] for choice in event["choices"]]
    return "".join(text), ""


async def test_a_request_that_kills_replicas_ends_alone_and_its_neighbours_go_on(
    tmp_path: Path,
) -> None:
    deaths = tmp_path / "deaths"
    deaths.touch()
    environment = internal(engine_command=[sys.executable, "-m", "tests.e2e.poisoned_replica"])
    environment["QUIRE_TEST_DEATHS"] = str(deaths)
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'platform'}"
    environment["DJANGO_SETTINGS_MODULE"] = "tests.e2e.poisoned_settings"
    with running(tmp_path, "--replicas", "2", "--no-worker", **environment) as product:
        async with httpx.AsyncClient(timeout=800) as client:

            async def ask_all() -> list[tuple[str, str]]:
                asked = [
                    stream(client, product, prompt=f"Story {n}:", max_tokens=TOKENS, temperature=0)
                    for n in range(NEIGHBOURS)
                ]
                return await asyncio.gather(*asked)

            calm = await ask_all()
            assert [code for _, code in calm] == [""] * NEIGHBOURS
            asking = asyncio.create_task(ask_all())
            poison = stream(client, product, prompt="Hello", max_tokens=20, seed=POISON)
            assert await poison == ("", "engine_fault")
            assert await asking == calm
    counts = [int(line) for line in deaths.read_text().split()]
    assert MAX_DEATHS - 2 <= len(counts) <= MAX_DEATHS + LATE, counts
    assert counts[-2:] == [1] * 2, "it died alone"
