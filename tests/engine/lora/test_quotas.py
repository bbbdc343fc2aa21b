"""A flood of one tenant's adapters beside another tenant's, on a replica process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.contract.lora import AdapterRef, LoRARequest
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from tests.engine.replica import Gateway, replica

from .adapters import DEMO_MODEL, first_a, pirate, write_adapter

NUM_SLOTS, ADAPTERS, FLOOD = 4, 10, 40
PROMPT = [1, 290, 202, 603, 4, 2, 202, 1, 287, 202]


@pytest.fixture(scope="module")
def gateway(redis_url: str) -> Iterator[Gateway]:
    prefix = f"quota{time.time_ns()}"
    flags = ("--max-loras", str(NUM_SLOTS), "--num-gpu-blocks-override", "1024")
    with replica(redis_url, prefix, Path(DEMO_MODEL), *flags):
        gateway = Gateway(redis_url, prefix)
        gateway.await_state("ready")
        yield gateway


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    """The quiet tenant's adapter, and the loud one's."""
    config, tensors = pirate()
    folder, refs = tmp_path_factory.mktemp("adapters"), []
    for number in range(1 + ADAPTERS):
        name = first_a(tensors)
        tensors[name] = torch.full_like(tensors[name], 0.01 * number)
        path = write_adapter(folder / str(number), config, tensors)
        digest = LoRARequest("x", 1, str(path)).ref().digest
        owner = "loud" if number else "quiet"
        refs.append(AdapterRef(digest=digest, name="own", path=str(path), owner=owner))
    return refs


def ask(gateway: Gateway, name: str, ref: AdapterRef, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    gateway.send(
        EngineRequest(
            request_id=name, gateway_id="g1", prompt_token_ids=PROMPT, sampling=params,
            adapter=ref, tenant=ref.owner, cache_namespace=ref.owner,
        )
    )  # fmt: skip


def test_a_flood_of_adapters_does_not_keep_another_tenants_waiting(
    gateway: Gateway, refs: list[AdapterRef]
) -> None:
    quiet, *loud = refs
    ask(gateway, "alone", quiet, 8)
    gateway.finish("alone")
    flood = [f"flood{number}" for number in range(FLOOD)]
    for number, name in enumerate(flood):
        ask(gateway, name, loud[number % ADAPTERS], 60 + 3 * number)
    gateway.wait(lambda: bool(gateway.tokens(flood[0])))
    waits = []
    for turn in range(3):
        name = f"quiet{turn}"
        initial_total = sum(map(gateway.is_finished, flood))
        ask(gateway, name, quiet, 8)
        gateway.wait(lambda name=name: bool(gateway.tokens(name)))
        waits.append(sum(map(gateway.is_finished, flood)) - initial_total)
        gateway.finish(name)
        assert gateway.tokens(name) == gateway.tokens("alone")
    assert sum(map(gateway.is_finished, flood)) < FLOOD // 2, "it was no flood any more"
    # The flood has a place after another; the quiet tenant waits for none of them.
    assert max(waits) <= 2, waits
    gateway.finish(*flood, timeout=120)
    assert gateway.control("check_integrity").ok
    # The newest heartbeat may be from before the flood's end.
    gateway.wait(lambda: gateway.await_state("ready").stats.num_requests_running == 0)
    stats = gateway.await_state("ready").stats
    assert stats.adapter_slots == NUM_SLOTS
    assert stats.adapter_evictions_total >= ADAPTERS - NUM_SLOTS
