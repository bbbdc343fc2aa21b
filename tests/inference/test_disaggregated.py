"""Real prefill and decode replicas: the same tokens, whichever of them is killed when."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis import asyncio as aioredis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest, ReplicaEvent
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from inference.engine_client.client import EngineClient, get_engine_client
from inference.engine_client.flight import Submission
from tests.e2e.test_images import NUM_TOKENS as NUM_SEEING_TOKENS
from tests.e2e.test_images import chat_parts
from tests.engine.models import VOCAB, make_model
from tests.engine.multimodal.models import IMAGE_TOKEN, expected, llava, picture
from tests.engine.replica import replica
from tests.inference.conftest import Gateway

MODEL, PROMPT_TOKENS, NUM_TOKENS = "tiny", 200, 300
#: In whole blocks of 16 tokens, but for at least one token that whoever answers computes.
LOADED_TOKENS = 192
#: Blocks stay in a prefill replica's memory.
PEER = "tcp://127.0.0.1:0"


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=PROMPT_TOKENS)


def request_of(seed: int) -> EngineRequest:
    return EngineRequest(
        request_id=f"r{seed}",
        gateway_id="",
        prompt_token_ids=prompt_of(seed),
        sampling=SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    )


@dataclass
class Cluster:
    """Replicas of one model, and a gateway's client.

    `backend`: "" for a folder that they share.
    """

    folder: Path
    model: Path
    url: str
    prefix: str
    client: EngineClient
    backend: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @contextmanager
    def start(self, *replica_ids: str) -> Iterator[None]:
        """Replicas, of which those compute prompts alone whose ids begin with "p"."""
        with ExitStack() as stack:
            for replica_id in replica_ids:
                role = "kv_producer" if replica_id.startswith("p") else "kv_consumer"
                flags = (
                    *("--served-model-name", MODEL, "--max-num-batched-tokens", "32"),
                    *("--max-model-len", "512"),
                    *("--kv-offloading-size", "0.01"),
                    *("--kv-offloading-backend", self.backend or str(self.folder / "tier")),
                    *("--kv-transfer-config", f'{{"kv_role": "{role}"}}'),
                )
                process = replica(self.url, self.prefix, self.model, *flags, replica_id=replica_id)
                self.processes[replica_id] = stack.enter_context(process)
            yield

    async def until_ready(self, *replica_ids: str) -> None:
        """Wait until the gateway knows them as ready."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            await self.client.watchman.tick()
            entries = [self.client.fleet.get(replica_id) for replica_id in replica_ids]
            if all(entry is not None and entry.ready for entry in entries):
                return
            await asyncio.sleep(0.1)
        pytest.fail(f"{replica_ids} aren't ready.")

    async def until_loaded(self, num_tokens: int) -> None:
        """Send prompts until the decode replicas say that they have loaded so many tokens: on a
        busy machine they compute some prompts whose blocks are read too late.
        """
        deadline = time.monotonic() + 60
        for seed in itertools.count(1000):
            await self.read(self.submit(seed))
            await self.client.watchman.tick()
            stats = [entry.heartbeat.stats for entry in self.client.fleet]
            if sum(entry.external_prefix_cache_hits_total for entry in stats) >= num_tokens:
                return
            if time.monotonic() > deadline:
                pytest.fail(f"{num_tokens} tokens aren't loaded.")

    async def holders(self, prefix_key: bytes) -> set[str]:
        """Replicas that have a prompt's first block, once one besides "p" says so."""
        deadline = time.monotonic() + 60
        while True:
            holders = {
                entry.heartbeat.replica_id
                for entry in self.client.fleet
                if prefix_key in entry.heartbeat.cached_prefixes
            }
            if holders - {"p"} or time.monotonic() > deadline:
                return holders
            await asyncio.sleep(0.1)
            await self.client.watchman.tick()

    async def kill(self, replica_id: str) -> None:
        """Kill a replica's process and tell of it, as its supervisor does."""
        entry = self.client.fleet.get(replica_id)
        assert entry is not None
        os.kill(self.processes[replica_id].pid, signal.SIGKILL)
        self.processes[replica_id].wait(60)
        news = ReplicaEvent(replica_id=replica_id, incarnation=entry.heartbeat.incarnation)
        channel = redis_keys.replica_events_channel(self.prefix)
        async with aioredis.from_url(self.url) as redis:
            assert await redis.publish(channel, protocol.encode(news))

    def submit(self, seed: int) -> Submission:
        return self.client.submit([request_of(seed)], MODEL)

    async def read(self, submission: Submission, count: int = NUM_TOKENS) -> list[int]:
        """The first `count` tokens of an answer, at least."""
        tokens: list[int] = []
        while len(tokens) < count:
            chunks = await asyncio.wait_for(submission.next_chunks(), 60)
            tokens += [token for chunk in chunks for token in chunk.token_ids]
        return tokens

    async def read_sent(self, submission: Submission, count: int) -> list[int]:
        """What a stopped replica had sent before, of `count` tokens."""
        tokens: list[int] = []
        with suppress(TimeoutError):
            while len(tokens) < count:
                chunks = await asyncio.wait_for(submission.next_chunks(), 0.5)
                tokens += [token for chunk in chunks for token in chunk.token_ids]
        return tokens

    def expected(self, *seeds: int) -> dict[int, list[int]]:
        """What a process without tiers answers."""
        core = EngineCore(
            EngineConfig(model=str(self.model), num_gpu_blocks_override=64, max_model_len=512)
        )
        for seed in seeds:
            core.add_request(request_of(seed))
        tokens: dict[int, list[int]] = {seed: [] for seed in seeds}
        while core.has_work:
            for delta in core.step():
                tokens[int(delta.request_id[1:])] += delta.token_ids
        core.shutdown()
        return tokens


@pytest.fixture
async def cluster(live_redis: str, key_prefix: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    client = EngineClient(live_redis)
    await client.start()
    model = make_model("llama", tmp_path / "model")
    yield Cluster(tmp_path, model, live_redis, key_prefix, client)
    await client.close()


@pytest.mark.parametrize(
    "backend",
    [pytest.param("", marks=pytest.mark.slow, id="folder"), pytest.param(PEER, id="peer")],
)
async def test_an_answer_is_the_same_whichever_side_is_killed(
    cluster: Cluster, backend: str
) -> None:
    cluster.backend = backend
    expected = cluster.expected(1, 2, 3, 4, 5)
    with cluster.start("p", "d1", "d2"):
        await cluster.until_ready("p", "d1", "d2")
        submission = cluster.submit(1)
        assert await cluster.read(submission) == expected[1]
        assert submission.replica_id.startswith("d")
        # Heartbeats tell which prompts replicas needn't compute.
        key = submission.flights[0].request.prefix_key
        assert await cluster.holders(key) - {"p"} == {submission.replica_id}
        await cluster.until_loaded(LOADED_TOKENS)

        stopped = cluster.processes["p"].pid
        os.kill(stopped, signal.SIGSTOP)
        submission = cluster.submit(2)
        assert submission.replica_id == "p"
        await cluster.kill("p")
        assert await cluster.read(submission) == expected[2]
        assert submission.replica_id.startswith("d")

        for seed in (3, 4, 5):
            submission = cluster.submit(seed)
            tokens = await cluster.read(submission, 5)
            stopped = cluster.processes[submission.replica_id].pid
            os.kill(stopped, signal.SIGSTOP)
            tokens += await cluster.read_sent(submission, NUM_TOKENS - len(tokens))
            if len(tokens) < NUM_TOKENS:
                break
            os.kill(stopped, signal.SIGCONT)  # it was at the end by then
        else:
            pytest.fail("No answer could be stopped in its middle.")
        await cluster.kill(submission.replica_id)
        tokens += await cluster.read(submission, NUM_TOKENS - len(tokens))
        assert tokens == expected[seed]


@pytest.mark.slow
@pytest.mark.parametrize("prefills", [False, True], ids=["two processes", "three processes"])
async def test_a_picture_is_encoded_in_one_process_and_its_chat_answered_in_another(
    gateway: Gateway, tmp_path: Path, prefills: bool
) -> None:
    """With a third its prompt is computed in between."""
    model, processor = llava(tmp_path)
    image, question = picture(1, 60, 40), 20 * "What?"
    prompt = f"<|im_start|>user\n{IMAGE_TOKEN}{question}<|im_end|>\n<|im_start|>assistant\n"
    token_ids = expected(model, processor, prompt, [image], NUM_SEEING_TOKENS)
    flags = (
        *("--served-model-name", "fake", "--dtype", "float32", "--max-num-batched-tokens", "32"),
        *("--kv-offloading-size", "0.01", "--kv-offloading-backend", PEER),
    )
    roles = {"encode": ("kv_both", "ec_producer"), "answer": ("kv_both", "ec_both")}
    if prefills:
        roles["prefill"] = ("kv_producer", "ec_consumer")
    with ExitStack() as stack:
        for name, (kv_role, ec_role) in roles.items():
            role = (
                *("--kv-transfer-config", f'{{"kv_role": "{kv_role}"}}'),
                *("--ec-transfer-config", f'{{"ec_role": "{ec_role}"}}'),
            )
            process = replica(
                gateway.redis_url, gateway.prefix, tmp_path, *flags, *role, replica_id=name
            )
            stack.enter_context(process)
        fleet = get_engine_client().fleet
        deadline = time.monotonic() + 120
        while [entry.ready for entry in fleet] != [True] * len(roles):
            assert time.monotonic() < deadline
            await gateway.refresh()
            await asyncio.sleep(0.1)
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": chat_parts([image, question])}],
            "max_tokens": NUM_SEEING_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        first = (await gateway.client.post("/v1/chat/completions", body)).json()
        # A proxy of its own passes on where the picture's vectors are.
        [(_, remote)] = first["ec_transfer_params"].items()
        assert (remote["num_encoder_tokens"], remote["remote_host"]) == (16, "127.0.0.1")
        body["ec_transfer_params"] = first["ec_transfer_params"]
        second = (await gateway.client.post("/v1/chat/completions", body)).json()
        text = processor.tokenizer.decode(token_ids, skip_special_tokens=True)
        for answer in (first, second):
            assert answer["choices"][0]["message"]["content"] == text
        finished = dict.fromkeys(roles, 0)
        while sum(finished.values()) < len(roles) + 1:
            assert time.monotonic() < deadline
            await gateway.refresh()
            stats = {entry.heartbeat.replica_id: entry.heartbeat.stats for entry in fleet}
            for name, entry in stats.items():
                finished[name] = sum(entry.requests_finished_total.values())
            await asyncio.sleep(0.1)
    # The first who computes the prompt reads the picture's vectors.
    assert stats["prefill" if prefills else "answer"].mm_cache_hits_total == 1
    assert finished == {**dict.fromkeys(roles, 1), "answer": 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("backend", ["", PEER], ids=["folder", "peer"])
@pytest.mark.parametrize("side", ["p", "d"])
async def test_an_answer_is_the_same_whenever_one_side_is_killed(
    cluster: Cluster, side: str, backend: str, part: int
) -> None:
    """100 moments of each, in five parts."""
    cluster.backend = backend
    rng = random.Random(f"{side}{part}")
    numbers = range(21 * part, 21 * (part + 1))
    expected = cluster.expected(*numbers)
    with cluster.start("p", "d"), ExitStack() as stack:
        await cluster.until_ready("p", "d")
        began = time.monotonic()
        assert await cluster.read(cluster.submit(numbers[0])) == expected[numbers[0]]
        duration = time.monotonic() - began
        for number in numbers[1:]:
            submission = cluster.submit(number)
            await asyncio.sleep(rng.uniform(0, duration))
            await cluster.kill(side)
            stack.enter_context(cluster.start(side))
            assert await cluster.read(submission) == expected[number]
            await cluster.until_ready("p", "d")
