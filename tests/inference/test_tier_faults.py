"""A folder of KV blocks that is damaged while requests read it: no error and no wrong token."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.kv_transfer.storage_tier import HEADER, RecordHeader
from inference.engine_client.client import get_engine_client
from tests.engine.kv_transfer.test_disk_tier import segments
from tests.engine.models import VOCAB, make_model
from tests.engine.replica import replica
from tests.inference.conftest import Gateway

NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 24, 100, 6


def expected_tokens(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What a process without tiers answers."""
    core = EngineCore(
        EngineConfig(model=str(model), num_gpu_blocks_override=256, max_model_len=256)
    )
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add_request(
            EngineRequest(
                request_id=str(number), gateway_id="", prompt_token_ids=prompt, sampling=sampling
            )
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for delta in core.step():
            tokens[int(delta.request_id)] += delta.token_ids
    core.shutdown()
    return tokens


def damage(folder: Path, rng: random.Random) -> None:
    """Damage a segment where it has been written, as a disk, an operator or another process may."""
    paths = segments(folder)
    contents = [path.read_bytes() for path in paths]
    written = [number for number, content in enumerate(contents) if content.strip(b"\0")]
    if not written:
        return
    number = rng.choice(written)
    path, end = paths[number], len(contents[number].rstrip(b"\0"))
    kind = rng.choice(("flip", "flip", "truncate", "exchange", "zero", "delete"))
    if kind == "delete":
        path.unlink()
        return
    with path.open("r+b") as file:
        start = rng.randrange(end)
        if kind == "truncate":
            file.truncate(start)
        elif kind == "exchange":
            file.write(contents[rng.choice(written)])
        else:
            file.seek(start)
            flipped = bytes([contents[number][start] ^ 1 << rng.randrange(8)])
            file.write(flipped if kind == "flip" else bytes(100))


class Records:
    """The blocks in a folder, in the order in which they were written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[Path, int] = {}

    def new(self) -> list[tuple[Path, int, int]]:
        """Segment, start and end of what is sealed, of the blocks since the last call."""
        records = []
        for path in segments(self._folder):
            content, end = path.read_bytes(), self._ends.get(path, 0)
            while any(content[end : end + HEADER.size]):
                start = end + HEADER.size
                end = start + RecordHeader.unpack(content[end:]).length
                records.append((path, start, end))
            self._ends[path] = end
        return records


def damage_record(record: tuple[Path, int, int], other: bytes, rng: random.Random) -> None:
    """Damage a sealed block: flip a bit, clear it in part, or exchange it for another's."""
    path, start, end = record
    with path.open("r+b") as file:
        file.seek(start)
        sealed = bytearray(file.read(end - start))
        match rng.choice(("flip", "zero", "exchange")):
            case "flip":
                sealed[rng.randrange(len(sealed))] ^= 1 << rng.randrange(8)
            case "zero":
                sealed[: len(sealed) // 2] = bytes(len(sealed) // 2)
            case "exchange":
                sealed[:] = other
        file.seek(start)
        file.write(sealed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_faults", [20, pytest.param(600, marks=pytest.mark.slow)])
async def test_clients_see_nothing_of_faults_of_a_folder(
    gateway: Gateway, tmp_path: Path, num_faults: int
) -> None:
    """A prefill replica writes the folder, and another one reads it. First a block of each prompt
    is damaged, which is read and counted once; then anything at random moments.
    """
    rng, folder = random.Random(num_faults), tmp_path / "tier"
    model = make_model("llama", tmp_path / "model")
    prompts = [
        rng.choices(range(3, VOCAB), k=PROMPT_TOKENS) for _ in range(NUM_PROMPTS + num_faults)
    ]
    expected = expected_tokens(model, prompts)
    flags = (
        *("--served-model-name", "fake", "--max-model-len", "256"),
        *("--max-num-batched-tokens", "32", "--num-gpu-blocks-override", "40"),
        *("--kv-offloading-size", "0.1", "--kv-offloading-backend", str(folder)),
    )
    fleet, statuses = get_engine_client().fleet, set[int]()

    async def ask(number: int) -> None:
        body = {
            "model": "fake", "prompt": prompts[number], "max_tokens": NUM_TOKENS,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = await gateway.client.post("/v1/completions", body)
        statuses.add(answer.status)
        assert answer.json()["choices"][0]["token_ids"] == expected[number]

    async def count(is_enough: Callable[[int, int], bool]) -> tuple[int, int]:
        """Damaged blocks and loaded tokens, as soon as the replicas tell of so many."""
        deadline = time.monotonic() + 30
        while True:
            await gateway.refresh()
            stats = [entry.heartbeat.stats for entry in fleet]
            num_failures = sum(sum(entry.kv_tier_failures_total.values()) for entry in stats)
            num_hits = sum(entry.external_prefix_cache_hits_total for entry in stats)
            if is_enough(num_failures, num_hits) or time.monotonic() > deadline:
                return num_failures, num_hits
            await asyncio.sleep(0.1)

    async def damage_often() -> None:
        for _ in range(num_faults):
            await asyncio.sleep(rng.uniform(0, 0.1))
            damage(folder, rng)

    with ExitStack() as stack:
        for role in ("kv_producer", "kv_consumer"):
            config = ("--kv-transfer-config", f'{{"kv_role": "{role}"}}')
            process = replica(
                gateway.redis_url, gateway.prefix, model, *flags, *config, replica_id=role
            )
            stack.enter_context(process)
        deadline = time.monotonic() + 120
        while [entry.ready for entry in fleet] != [True, True]:
            assert time.monotonic() < deadline
            await gateway.refresh()
            await asyncio.sleep(0.1)
        written, numbers = Records(folder), range(NUM_PROMPTS, len(prompts))
        records = {}
        for number in numbers:
            await ask(number)
            records[number] = written.new()
        assert {len(of_prompt) for of_prompt in records.values()} == {PROMPT_TOKENS // 16}
        num_tokens = num_faults * (PROMPT_TOKENS // 16) * 16
        assert await count(lambda _, hits: hits >= num_tokens) == (0, num_tokens)
        for number in numbers:
            position = rng.randrange(PROMPT_TOKENS // 16)
            path, start, end = records[number][position - 1]
            damage_record(records[number][position], path.read_bytes()[start:end], rng)
            await ask(number)
            num_tokens += position * 16
        counts = await count(lambda faults, hits: (faults, hits) >= (num_faults, num_tokens))
        assert counts == (num_faults, num_tokens)

        damaging = asyncio.create_task(damage_often())
        while not damaging.done():
            await asyncio.gather(*(ask(rng.randrange(NUM_PROMPTS)) for _ in range(3)))
        await damaging
        counts = await count(lambda faults, hits: faults > num_faults and hits > num_tokens)
    assert statuses == {200}
    assert counts[0] > num_faults
    assert counts[1] > num_tokens
