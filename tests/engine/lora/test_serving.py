"""Adapters on a replica process: loaded by digest, replaced and unloaded under traffic."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.lora import AdapterRef, AdapterStatus
from engine.contract.messages import EngineRequest
from tests.engine.replica import Gateway, replica

from .adapters import DEMO_MODEL

ADAPTERS = {name: Path("demo/adapters") / name for name in ("pirate", "butler")}
#: "Hello!", as the demo's chat template has it.
PROMPT = [1, 290, 202, 603, 4, 2, 202, 1, 287, 202]
COUNT = 12


def ref(name: str, folder: Path | None = None, owner: str = "") -> AdapterRef:
    """An adapter of the demo, known by its content, wherever it lies."""
    digest = LoRARequest(name, 1, str(ADAPTERS[name])).ref().digest
    path = folder or ADAPTERS[name]
    return AdapterRef(digest=digest, name="same", path=str(path.absolute()), owner=owner)


@pytest.fixture(scope="module")
def gateway(redis_url: str) -> Iterator[Gateway]:
    prefix = f"lora{time.time_ns()}"
    with replica(redis_url, prefix, Path(DEMO_MODEL), "--max-loras", "2"):
        gateway = Gateway(redis_url, prefix)
        gateway.await_state("ready")
        yield gateway


@pytest.fixture(scope="module")
def expected() -> dict[str | None, list[int]]:
    """What the model says alone and with each adapter, by an engine in this process."""
    llm = LLM(DEMO_MODEL)
    requests = [None, *(LoRARequest(name, 1, str(path)) for name, path in ADAPTERS.items())]
    results = llm.generate(
        [{"prompt_token_ids": PROMPT}] * 3,
        SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True),
        use_tqdm=False,
        lora_request=requests,
    )
    token_ids = [result.outputs[0].token_ids for result in results]
    assert len({tuple(token_id) for token_id in token_ids}) == 3
    return dict(zip((None, *ADAPTERS), token_ids, strict=True))


def ask(gateway: Gateway, request_id: str, adapter: AdapterRef | None, tenant: str = "t") -> None:
    """One request, greedy."""
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    gateway.send(
        EngineRequest(
            request_id=request_id, gateway_id="g1", prompt_token_ids=PROMPT, sampling=params,
            adapter=adapter, tenant=tenant, cache_namespace=tenant,
        )
    )  # fmt: skip


def state_of(gateway: Gateway, digest: str) -> AdapterStatus | None:
    """What the heartbeat says of an adapter."""
    beat = gateway.heartbeat()
    statuses = [adapter for adapter in beat.adapters if adapter.digest == digest] if beat else []
    return statuses[0] if statuses else None


def test_equal_names_of_two_tenants_stand_for_their_own_weights(
    gateway: Gateway, expected: dict[str | None, list[int]]
) -> None:
    for turn in range(2):  # the second time from the cache
        ask(gateway, f"one{turn}", ref("pirate"), "one")
        ask(gateway, f"two{turn}", ref("butler"), "two")
        ask(gateway, f"base{turn}", None, "one")
        gateway.finish(f"one{turn}", f"two{turn}", f"base{turn}")
        assert gateway.tokens(f"one{turn}") == expected["pirate"]
        assert gateway.tokens(f"two{turn}") == expected["butler"]
        assert gateway.tokens(f"base{turn}") == expected[None]
    # Heartbeats are apart from answers: the last one may be of when the adapter was still read.
    digest, statuses = ref("pirate").digest, list[AdapterStatus]()

    def is_on_device() -> bool:
        state = state_of(gateway, digest)
        statuses[:] = [state] if state is not None and state.tier == "device" else []
        return bool(statuses)

    gateway.wait(is_on_device)
    assert (statuses[0].rank, statuses[0].name) == (8, "same")
    assert statuses[0].num_bytes > 0
    assert statuses[0].load_seconds > 0


def test_operators_load_pin_and_unload(gateway: Gateway) -> None:
    loaded = gateway.control("load_adapter", adapter=ref("pirate"), pin=True)
    assert loaded.ok, loaded.detail
    state = state_of(gateway, ref("pirate").digest)
    assert state is not None
    assert state.pinned
    bad = AdapterRef(digest="0" * 64, name="bad", path=str(ADAPTERS["pirate"].absolute()))
    refused = gateway.control("load_adapter", adapter=bad)
    assert not refused.ok
    assert "isn't there any more" in refused.detail
    assert gateway.control("unload_adapter", adapter=ref("pirate")).ok
    state = state_of(gateway, ref("pirate").digest)
    assert state is not None
    assert state.tier != "device"
    assert not gateway.control("unload_adapter", adapter=ref("pirate")).ok
    assert not gateway.control("load_adapter").ok


def test_fault_59_every_answer_is_of_its_digest_while_weights_are_replaced_and_unloaded(
    gateway: Gateway, expected: dict[str | None, list[int]], tmp_path: Path
) -> None:
    folder, asked = tmp_path / "named", dict[str, str | None]()
    for turn, name in enumerate(["pirate", "butler", "pirate", "butler"]):
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(ADAPTERS[name], folder)
        for number in range(4):
            request_id = f"swap{turn}-{number}"
            asked[request_id] = name if number % 3 else None
            ask(gateway, request_id, ref(name, folder) if number % 3 else None)
        gateway.wait(lambda turn=turn: bool(gateway.deltas.get(f"swap{turn}-1")))
        gateway.control("unload_adapter", adapter=ref(name))
    gateway.finish(*asked)
    for request_id, name in asked.items():
        assert gateway.tokens(request_id) == expected[name], request_id
    assert gateway.control("check_integrity").ok


def test_a_folder_with_other_content_by_now_is_refused(gateway: Gateway, tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS["butler"], tmp_path / "named")
    stale = AdapterRef(digest="f" * 64, name="named", path=str(tmp_path / "named"))
    ask(gateway, "stale", stale)
    ask(gateway, "strange", AdapterRef(digest="../x", name="../x", path=str(tmp_path)))
    gateway.finish("stale", "strange")
    for request_id in ("stale", "strange"):
        error = gateway.deltas[request_id][-1].error
        assert error is not None
        assert error.status == 400


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(gateway: Gateway) -> None:
    ask(gateway, "gone", ref("pirate"))
    gateway.abort("gone")
    gateway.finish("gone")
    gateway.wait(lambda: gateway.pending() == 0)
    assert gateway.control("check_integrity").ok
