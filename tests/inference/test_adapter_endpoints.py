"""vLLM's two endpoints for adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from adapters import cards
from adapters import version_jobs as work
from adapters.models import AdapterVersion
from adapters.signals import version_waits
from common.db import run_in_db_thread
from engine.contract.lora import adapter_digest
from tests.adapter_files import adapter_folder
from tests.inference.adapter_requests import ask, client_of, digest_of
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import Gateway

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("adapter_store")]


@pytest.fixture
async def operator(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsgiClient]:
    """A client with an operator's key; a version is checked as soon as it's there."""

    def check(version: AdapterVersion, **_: object) -> None:
        work.process_version(version.pk)

    version_waits.connect(check, weak=False, dispatch_uid="test")
    monkeypatch.setattr("inference.api.vllm_compat.POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("inference.api.vllm_compat.SEEN_WITHIN_S", 0)
    yield await run_in_db_thread(client_of, gateway.rows.tenant, scopes=["operator", "inference"])
    version_waits.disconnect(dispatch_uid="test")


async def test_vllms_endpoints_load_replace_and_unload(
    gateway: Gateway, operator: AsgiClient, adapter_store: Any
) -> None:
    folder = adapter_folder(adapter_store / "tone")
    body = {"lora_name": "tone", "lora_path": str(folder)}
    async with gateway.serving(gateway.fake()):
        loaded = await operator.post("/v1/load_lora_adapter", body)
        assert loaded.body == b"Success: LoRA adapter 'tone' added successfully."
        first = await digest_of(gateway.client, "tone")
        again = await operator.post("/v1/load_lora_adapter", body)
        assert again.status == 400
        assert again.error["message"].endswith("'tone' has already been loaded.")
        adapter_folder(folder, seed=5)
        changed = await operator.post("/v1/load_lora_adapter", body)
        assert f"{first[:12]} goes on being served" in changed.error["message"]
        assert await digest_of(gateway.client, "tone") == first
        replaced = await operator.post("/v1/load_lora_adapter", {**body, "load_inplace": True})
        assert replaced.status == 200
        assert await digest_of(gateway.client, "tone") != first
        gone = await operator.post("/v1/unload_lora_adapter", {"lora_name": "tone"})
        assert gone.body == b"Success: LoRA adapter 'tone' removed successfully."
        assert (await ask(gateway.client, "tone")).status == 404
        twice = await operator.post("/v1/unload_lora_adapter", {"lora_name": "tone"})
        assert (twice.status, twice.error["message"]) == (
            404,
            "The lora adapter 'tone' cannot be found.",
        )
        back = await operator.post("/v1/load_lora_adapter", body)
        assert back.status == 200


async def test_vllms_endpoints_answer_when_every_gateway_has_looked(
    gateway: Gateway, operator: AsgiClient, adapter_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway, or a worker, is no part of this process: it goes by what it saw last."""
    monkeypatch.setattr(cards, "TTL_S", 0.2)
    monkeypatch.setattr(cards._card_cache, "ttl", 0.2)
    monkeypatch.setattr(cards._card_cache, "clear", lambda: None)
    monkeypatch.setattr("inference.api.vllm_compat.SEEN_WITHIN_S", 0.7)
    folder = adapter_folder(adapter_store / "tone")
    body = {"lora_name": "tone", "lora_path": str(folder), "load_inplace": True}
    async with gateway.serving(gateway.fake()):
        exceeding_event = asyncio.Event()
        asked = asyncio.create_task(_asking(gateway.client, exceeding_event))
        for seed in (1, 2, 1):
            adapter_folder(folder, seed=seed)
            assert (await operator.post("/v1/load_lora_adapter", body)).status == 200
            assert await digest_of(gateway.client, "tone") == adapter_digest(folder)
        await operator.post("/v1/unload_lora_adapter", {"lora_name": "tone"})
        assert (await ask(gateway.client, "tone")).status == 404
        exceeding_event.set()  # cancelled in the middle of a request it could go on for ever
        await asked


async def _asking(client: AsgiClient, stopped: asyncio.Event) -> None:
    """Keeps what is known fresh."""
    while not stopped.is_set():
        await ask(client, "tone")


async def test_vllms_endpoints_refuse(
    gateway: Gateway, operator: AsgiClient, adapter_store: Any, tmp_path: Any
) -> None:
    bad = adapter_folder(adapter_store / "bad", says="refuse")
    outside = adapter_folder(tmp_path / "outside")
    for body, words in (
        ({"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x", "lora_path": str(bad)}, "lora_A holds NaN."),
        ({"lora_name": "x", "lora_path": str(outside)}, "in none of the folders"),
        ({"lora_name": "x", "lora_path": str(adapter_store / "no")}, "No adapter found"),
        ({"lora_name": 3, "lora_path": "x"}, "must be a text"),
        ({"lora_name": "y", "lora_path": str(bad), "load_inplace": "yes"}, "true or false"),
    ):
        reply = await operator.post("/v1/load_lora_adapter", body)
        # As vLLM has it: what isn't there is 404.
        assert reply.status == (404 if words == "No adapter found" else 400), body
        assert words in reply.error["message"]
        assert reply.error["param"] in (None, "lora_path", "lora_name", "load_inplace")
    named = await operator.post(
        "/v1/load_lora_adapter", {"lora_name": "fake", "lora_path": str(bad)}
    )
    assert (named.status, named.error["param"]) == (409, "lora_name")
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert (await gateway.client.post(path, {"lora_name": "x"})).status == 403
