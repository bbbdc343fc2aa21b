"""The data plane with adapters: whose name is whose, and which content answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from adapters import actions as adapter_actions
from adapters import cards, work
from adapters.events import version_waits
from adapters.models import AdapterVersion
from catalog.models import ServedModel
from engine.contract import protocol
from engine.contract.adapters import ADDED_TOKENS_FILE, adapter_digest
from engine.text import load_tokenizer
from inference.asgi import GatewayHandler
from inference.engine_client import get_engine_client
from metering import actions as metering
from tenants import actions
from tenants.actors import SYSTEM
from tenants.db_threads import in_db_thread
from tenants.models import Tenant
from tests.adapter_files import adapter_folder
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import VOCAB, Gateway, until
from tests.inference.tokenizer_folder import with_added_tokens
from tests.platform.adapters import checked

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("adapters_here")]


@pytest.fixture
def live(gateway: Gateway) -> Any:
    """Makes a live version; in a thread."""

    def make(tenant: Tenant | None, name: str = "tone", seed: int = 0, **more: Any) -> Any:
        model = ServedModel.objects.get(name=more.pop("model", "fake"))
        more.setdefault("promote", True)
        return checked(SYSTEM, tenant, model, name=name, seed=seed, **more)

    async def in_thread(*args: Any, **kwargs: Any) -> AdapterVersion:
        return await in_db_thread(make, *args, **kwargs)

    return in_thread


def newcomer(name: str = "Rival", **key: Any) -> tuple[Tenant, AsgiClient]:
    tenant = actions.create_tenant(actor=SYSTEM, name=name)
    return tenant, client_of(tenant, **key)


def client_of(tenant: Tenant, **key: Any) -> AsgiClient:
    made = actions.create_key(actor=SYSTEM, tenant=tenant, name="k", **key)
    return AsgiClient(GatewayHandler(), made.secret)


def chat(model: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": model, "messages": messages, "max_tokens": 3, **fields}


async def ask(client: AsgiClient, model: str, **fields: Any) -> Any:
    return await client.post("/v1/chat/completions", chat(model, **fields))


async def digest_of(client: AsgiClient, model: str, **fields: Any) -> str:
    reply = await ask(client, model, **fields)
    assert reply.status == 200, reply.body
    return reply.headers["x-quire-adapter"]


async def test_an_adapter_is_asked_by_either_name(gateway: Gateway, live: Any) -> None:
    version = await live(gateway.rows.tenant)
    async with gateway.serving(gateway.fake()) as replica:
        for name in ("tone", "fake:tone"):
            reply = await ask(gateway.client, name)
            assert reply.status == 200
            assert reply.json()["model"] == name
            assert reply.headers["x-quire-adapter"] == version.digest
        plain = await ask(gateway.client, "fake")
    assert "x-quire-adapter" not in plain.headers
    adapter = replica.received[0].adapter
    assert adapter is not None
    assert replica.received[2].adapter is None
    assert (adapter.digest, adapter.name) == (version.digest, "tone")
    assert adapter.owner == gateway.rows.tenant.slug
    assert version.digest in adapter.path
    records = await gateway.usage()
    assert [(r.model, r.adapter, r.adapter_digest) for r in records] == [
        ("fake", "tone", version.digest),
        ("fake", "tone", version.digest),
        ("fake", "", ""),
    ]


async def test_two_tenants_equal_names_never_meet(gateway: Gateway, live: Any) -> None:
    rival, theirs = await in_db_thread(newcomer)
    mine = await live(gateway.rows.tenant, seed=1)
    other = await live(rival, seed=2)
    shared = await live(None, seed=3)
    _, third = await in_db_thread(newcomer, "Third")
    async with gateway.serving(gateway.fake()):
        for name in ("tone", "fake:tone"):
            assert await digest_of(gateway.client, name) == mine.digest
            assert await digest_of(theirs, name) == other.digest
            assert await digest_of(third, name) == shared.digest


async def test_a_strangers_adapter_is_not_there(gateway: Gateway, live: Any) -> None:
    await live(gateway.rows.tenant, name="secret-tone")
    _, theirs = await in_db_thread(newcomer)
    async with gateway.serving(gateway.fake()):
        for name in ("secret-tone", "fake:secret-tone", "fake:", ":secret-tone", "x:secret-tone"):
            reply = await ask(theirs, name)
            assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        unknown = await ask(theirs, "no-such-thing")
        assert unknown.error["message"].replace("no-such-thing", "") == (
            (await ask(theirs, "secret-tone")).error["message"].replace("secret-tone", "")
        )
        assert (await theirs.get("/v1/models/secret-tone")).status == 404
        listed = (await theirs.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == ["fake"]


async def test_models_are_listed_with_their_adapters(gateway: Gateway, live: Any) -> None:
    mine = await live(gateway.rows.tenant, name="mine")
    shared = await live(None, name="ours", seed=1)
    await live(gateway.rows.tenant, name="waits", seed=2, promote=False)
    async with gateway.serving(gateway.fake()):
        listed = (await gateway.client.get("/v1/models")).json()["data"]
        one = (await gateway.client.get("/v1/models/fake:mine")).json()
    assert [each["id"] for each in listed] == ["fake", "mine", "ours"]
    assert [each["parent"] for each in listed] == [None, "fake", "fake"]
    assert [each["root"] for each in listed] == ["fake", "fake", "fake"]
    assert [each.get("digest") for each in listed] == [None, mine.digest, shared.digest]
    assert listed[1]["owned_by"] == gateway.rows.tenant.slug
    assert (one["id"], one["digest"]) == ("fake:mine", mine.digest)


async def test_keys_are_narrowed_to_adapters_and_away_from_them(
    gateway: Gateway, live: Any
) -> None:
    tenant = gateway.rows.tenant
    await live(tenant)
    only = await in_db_thread(client_of, tenant, allowed_models=["tone"])
    full = await in_db_thread(client_of, tenant, allowed_models=["fake:tone"])
    base = await in_db_thread(client_of, tenant, allowed_models=["fake"])
    async with gateway.serving(gateway.fake()):
        for client in (only, full):
            assert (await ask(client, "tone")).status == 200
            assert (await ask(client, "fake")).status == 404
            listed = (await client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["tone"]
        assert (await ask(base, "fake")).status == 200
        assert (await ask(base, "tone")).status == 404
        await in_db_thread(
            lambda: actions.update_tenant(actor=SYSTEM, tenant=tenant, allowed_models=["fake"])
        )
        assert (await ask(gateway.client, "tone")).status == 200
        await in_db_thread(
            lambda: actions.update_tenant(actor=SYSTEM, tenant=tenant, allowed_models=["other"])
        )
        assert (await ask(gateway.client, "tone")).status == 404


async def test_one_name_of_two_models_must_be_told_apart(gateway: Gateway, live: Any) -> None:
    def second_model() -> None:
        ServedModel.objects.create(name="big", source="fake", desired_state="loaded", managed=False)

    await in_db_thread(second_model)
    tenant = gateway.rows.tenant
    small, _ = await live(tenant, seed=1), await live(tenant, seed=2, model="big")
    async with gateway.serving(gateway.fake()):
        reply = await ask(gateway.client, "tone")
        assert reply.status == 400
        assert "big:tone, fake:tone" in reply.error["message"]
        assert await digest_of(gateway.client, "fake:tone") == small.digest
        listed = (await gateway.client.get("/v1/models")).json()["data"]
    assert {each["id"] for each in listed} == {"fake", "big", "fake:tone", "big:tone"}


async def test_a_canary_gets_its_share_and_each_user_one_version(
    gateway: Gateway, live: Any
) -> None:
    first = await live(gateway.rows.tenant)
    second = await live(gateway.rows.tenant, seed=2, promote=False)
    await in_db_thread(lambda: adapter_actions.promote(actor=SYSTEM, version=second, percent=30))
    cards.forget()
    async with gateway.serving(gateway.fake()):
        users = {n: await digest_of(gateway.client, "tone", user=f"u{n}") for n in range(60)}
        again = {n: await digest_of(gateway.client, "tone", user=f"u{n}") for n in range(60)}
    assert users == again
    assert set(users.values()) == {first.digest, second.digest}
    assert 6 <= list(users.values()).count(second.digest) <= 30


async def test_a_promotion_turns_new_requests_and_leaves_running_ones(
    gateway: Gateway, live: Any
) -> None:
    first = await live(gateway.rows.tenant)
    second = await live(gateway.rows.tenant, seed=2, promote=False)
    async with gateway.serving(gateway.fake()):
        running = gateway.client.open(
            "POST", "/v1/chat/completions", chat("tone", stream=True, max_tokens=40)
        )
        _, headers = await running.head()
        assert headers["x-quire-adapter"] == first.digest
        await in_db_thread(lambda: adapter_actions.promote(actor=SYSTEM, version=second))
        assert await digest_of(gateway.client, "tone") == second.digest
        assert [chunk async for chunk in running.chunks()][-1].endswith(b"[DONE]\n\n")
        await running.leave()
        await in_db_thread(
            lambda: adapter_actions.take_offline(actor=SYSTEM, adapter=second.adapter)
        )
        assert (await ask(gateway.client, "tone")).status == 404
    digests = {record.adapter_digest for record in await gateway.usage()}
    assert digests == {first.digest, second.digest}


async def test_a_stream_that_moves_to_another_replica_keeps_its_digest(
    gateway: Gateway, live: Any
) -> None:
    first = await live(gateway.rows.tenant)
    second = await live(gateway.rows.tenant, seed=2, promote=False)
    one, two = gateway.fake(die_after=5), gateway.fake()
    async with gateway.serving(one):
        running = gateway.client.open(
            "POST", "/v1/chat/completions", chat("tone", stream=True, max_tokens=60)
        )
        await running.head()
        await in_db_thread(lambda: adapter_actions.promote(actor=SYSTEM, version=second))
        await until(lambda: one.state == "dead")
        async with gateway.serving(two):
            await gateway.redis.delete(protocol.replica_key(one.replica_id, gateway.prefix))
            assert [chunk async for chunk in running.chunks()][-1].endswith(b"[DONE]\n\n")
            await running.leave()
    resumed = [request for request in two.received if request.resume_token_ids]
    assert [request.adapter.digest for request in resumed if request.adapter] == [first.digest]


async def test_prices_and_budgets_of_adapters(gateway: Gateway, live: Any) -> None:
    tenant = gateway.rows.tenant
    await live(tenant)
    await live(None, name="shared", seed=1)

    def price(model: str, amount: str) -> None:
        metering.set_price(
            actor=SYSTEM, model=model, input_per_million=amount, output_per_million=amount
        )

    def prices() -> None:
        price("fake", "8")
        price("tone", "1")  # some other thing that the tenant named its adapter after
        price("fake:tone", "1")
        price("shared", "3")

    await in_db_thread(prices)
    async with gateway.serving(gateway.fake()):
        for name in ("tone", "shared", "fake"):
            assert (await ask(gateway.client, name)).status == 200
    tone, shared, fake = await gateway.usage()
    assert tone.cost_nanos == fake.cost_nanos > shared.cost_nanos > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
        ("/generate", {"prompt": "hello", "max_tokens": 3}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_endpoint_answers_through_an_adapter(
    gateway: Gateway, live: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    version = await live(gateway.rows.tenant)
    async with gateway.serving(gateway.fake()) as replica:
        reply = await gateway.client.post(path, {"model": "tone", "stream": stream, **body})
    assert reply.status == 200, reply.body
    assert reply.headers["x-quire-adapter"] == version.digest
    assert [each.adapter.digest for each in replica.received if each.adapter] == [version.digest]


async def left_midway(gateway: Gateway, body: dict[str, Any]) -> str:
    """Read a few events of a stream and leave it; the id of the last one."""
    exchange = gateway.client.open("POST", "/v1/chat/completions", body)
    seen = b""
    await exchange.head()
    async for chunk in exchange.chunks():
        seen += chunk
        if seen.count(b"\n\n") >= 5:
            break
    await exchange.leave()
    await gateway.usage()
    await get_engine_client().journal.save()
    whole = seen[: seen.rfind(b"\n\n") + 2]
    last: bytes = re.findall(rb"^id: (.*)$", whole, re.MULTILINE)[-1]
    return last.decode()


async def test_fault_59_a_stream_goes_on_at_another_gateway_with_the_weights_that_it_began_with(
    gateway: Gateway, live: Any
) -> None:
    """Its name leads elsewhere by then: neither what is computed nor header and ledger follow."""
    first = await live(gateway.rows.tenant, seed=1)
    async with gateway.serving(gateway.fake(token_delay=0.02)) as replica:
        body = chat("tone", stream=True) | {"max_tokens": 200}
        last = await left_midway(gateway, body)
        second = await live(gateway.rows.tenant, seed=2)
        after = {"last-event-id": last}
        rest = await gateway.client.open(
            "POST", "/v1/chat/completions", body, headers=after
        ).reply()
        assert rest.status == 200, rest.body
        assert b"[DONE]" in rest.body
        assert rest.headers["x-quire-adapter"] == first.digest
        assert await digest_of(gateway.client, "tone") == second.digest
        digests = [request.adapter and request.adapter.digest for request in replica.received]
        assert digests == [first.digest, first.digest, second.digest]
        records = await gateway.usage()
    assert {r.adapter_digest for r in records[:-1]} == {first.digest}


async def test_an_answer_in_one_piece_goes_on_with_no_stream(gateway: Gateway, live: Any) -> None:
    """An old `Last-Event-ID` of the same caller is no reason for the weights of then."""
    await live(gateway.rows.tenant, seed=1)
    async with gateway.serving(gateway.fake(token_delay=0.02)):
        last = await left_midway(gateway, chat("tone", stream=True) | {"max_tokens": 200})
        second = await live(gateway.rows.tenant, seed=2)
        for after in (last, "none of ours"):
            whole = await gateway.client.open(
                "POST", "/v1/chat/completions", chat("tone"), headers={"last-event-id": after}
            ).reply()
            assert whole.status == 200, whole.body
            assert whole.headers["x-quire-adapter"] == second.digest


# -- tokens of its own ---------------------------------------------------------------------------


def free_id(gateway: Gateway) -> int:
    """The first id behind those of the model's tokenizer."""
    return load_tokenizer(gateway.model_folder).vocab_size


def bringing(gateway: Gateway, text: str) -> dict[str, Any]:
    """Of a version with this token and a row more than the model has."""
    files = {ADDED_TOKENS_FILE: json.dumps({text: free_id(gateway)}).encode()}
    return {"beside": files, "vocab_size": VOCAB + 1}


def ending(gateway: Gateway, folder: Path, text: str) -> dict[str, Any]:
    """Of a version whose tokenizer has another EOS."""
    with_added_tokens(gateway.model_folder, folder, [text])
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    settings = json.loads(files["tokenizer_config.json"]) | {"eos_token": text}
    return {"beside": files | {"tokenizer_config.json": json.dumps(settings).encode()}}


async def said(client: AsgiClient, model: str, **fields: Any) -> str:
    reply = await ask(client, model, **fields)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["message"]["content"] or "")


async def test_tenants_equal_weights_with_other_tokens_never_meet(
    gateway: Gateway, live: Any
) -> None:
    rival, theirs = await in_db_thread(newcomer)
    one = await live(gateway.rows.tenant, **bringing(gateway, "<one>"))
    two = await live(rival, **bringing(gateway, "<two>"))
    assert one.digest != two.digest
    hello = [{"role": "user", "content": "<one> <two>"}]
    own, prompt = free_id(gateway), {"prompt": "<one>"}
    replica = gateway.fake(low=own, high=own + 1)
    async with gateway.serving(replica):
        assert await said(gateway.client, "tone", messages=hello) == "<one>" * 3
        assert await said(theirs, "tone", messages=hello) == "<two>" * 3
        assert await said(gateway.client, "fake", messages=hello) == ""
        mine = await gateway.client.post("/tokenize", {"model": "tone", **prompt})
        assert mine.json()["tokens"] == [own]
        for client, model in ((theirs, "tone"), (gateway.client, "fake")):
            other = await client.post("/tokenize", {"model": model, **prompt})
            assert own not in other.json()["tokens"]
        for model, status in (("tone", 200), ("fake", 400)):
            body = {"model": model, "prompt": [VOCAB], "max_tokens": 1}
            assert (await gateway.client.post("/v1/completions", body)).status == status
            asked = await ask(gateway.client, model, logit_bias={str(VOCAB): 1})
            assert asked.status == status
    assert [own in each.prompt_token_ids for each in replica.received[:3]] == [True, True, False]
    assert replica.received[0].adapter != replica.received[1].adapter


async def test_what_the_engine_does_not_do_with_them_is_refused_by_name(
    gateway: Gateway, live: Any
) -> None:
    await live(gateway.rows.tenant, **bringing(gateway, "<one>"))
    form = {"type": "json_object"}
    async with gateway.serving(gateway.fake()) as replica:
        for name, value in (("response_format", form), ("guided_choice", ["a"])):
            reply = await ask(gateway.client, "tone", **{name: value})
            assert (reply.status, reply.error["param"]) == (400, name)
            assert "brings tokens of its own" in reply.error["message"]
            assert (await ask(gateway.client, "fake", **{name: value})).status == 200
        anew = {"model": "tone", "input": "hello", "text": {"format": form}}
        reply = await gateway.client.post("/v1/responses", anew)
        assert (reply.status, reply.error["param"]) == (400, "text.format")
    assert all(request.adapter is None for request in replica.received)


async def test_outputs_end_on_the_eos_of_its_tokenizer(
    gateway: Gateway, live: Any, tmp_path: Path
) -> None:
    await live(gateway.rows.tenant, **ending(gateway, tmp_path, "<end>"))
    own = free_id(gateway)
    async with gateway.serving(gateway.fake()) as replica:
        for fields in ({}, {"stop_token_ids": [7]}, {"ignore_eos": True}):
            assert (await ask(gateway.client, "tone", **fields)).status == 200
    ends = [request.sampling.stop_token_ids for request in replica.received]
    assert ends == [[own], [7, own], None]


async def test_a_stream_that_goes_on_keeps_the_tokenizer_it_began_with(
    gateway: Gateway, live: Any
) -> None:
    await live(gateway.rows.tenant, **bringing(gateway, "<one>"))
    own = free_id(gateway)
    slow = gateway.fake(token_delay=0.02, low=own, high=own + 1)
    async with gateway.serving(slow) as replica:
        hello = [{"role": "user", "content": "<one> <two>"}]
        body = chat("tone", stream=True, messages=hello, logit_bias={"7": 1}) | {"max_tokens": 90}
        last = await left_midway(gateway, body)
        await live(gateway.rows.tenant, **bringing(gateway, "<two>"))
        after = {"last-event-id": last}
        path = "/v1/chat/completions"
        rest = await gateway.client.open("POST", path, body, headers=after).reply()
        assert rest.status == 200, rest.body
        assert b"<one>" in rest.body
        assert b"<two>" not in rest.body
        assert await said(gateway.client, "tone") == "<two>" * 3
        first, second, _ = replica.received
        assert second.prompt_token_ids == first.prompt_token_ids
        assert second.adapter == first.adapter


# -- vLLM's two endpoints -------------------------------------------------------------------------


@pytest.fixture
async def operator(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsgiClient]:
    """A client with an operator's key; a version is checked as soon as it's there."""

    def check(version: AdapterVersion, **_: object) -> None:
        work.work_on(version.pk)

    version_waits.connect(check, weak=False, dispatch_uid="test")
    monkeypatch.setattr("inference.extras.adapters.LOOK_S", 0.01)
    monkeypatch.setattr("inference.extras.adapters.SEEN_WITHIN_S", 0)
    yield await in_db_thread(client_of, gateway.rows.tenant, scopes=["operator", "inference"])
    version_waits.disconnect(dispatch_uid="test")


async def test_vllms_endpoints_load_replace_and_unload(
    gateway: Gateway, operator: AsgiClient, adapters_here: Any
) -> None:
    folder = adapter_folder(adapters_here / "tone")
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
    gateway: Gateway, operator: AsgiClient, adapters_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway, or a worker, is no part of this process: it goes by what it saw last."""
    monkeypatch.setattr(cards, "TTL_S", 0.2)
    monkeypatch.setattr(cards._known, "ttl", 0.2)
    monkeypatch.setattr(cards._known, "clear", lambda: None)
    monkeypatch.setattr("inference.extras.adapters.SEEN_WITHIN_S", 0.7)
    folder = adapter_folder(adapters_here / "tone")
    body = {"lora_name": "tone", "lora_path": str(folder), "load_inplace": True}
    async with gateway.serving(gateway.fake()):
        asked = asyncio.create_task(_asking(gateway.client))
        for seed in (1, 2, 1):
            adapter_folder(folder, seed=seed)
            assert (await operator.post("/v1/load_lora_adapter", body)).status == 200
            assert await digest_of(gateway.client, "tone") == adapter_digest(folder)
        await operator.post("/v1/unload_lora_adapter", {"lora_name": "tone"})
        assert (await ask(gateway.client, "tone")).status == 404
        asked.cancel()


async def _asking(client: AsgiClient) -> None:
    """Keeps what is known fresh."""
    while True:
        await ask(client, "tone")


async def test_vllms_endpoints_refuse(
    gateway: Gateway, operator: AsgiClient, adapters_here: Any, tmp_path: Any
) -> None:
    bad = adapter_folder(adapters_here / "bad", says="refuse")
    outside = adapter_folder(tmp_path / "outside")
    for body, words in (
        ({"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x", "lora_path": str(bad)}, "lora_A holds NaN."),
        ({"lora_name": "x", "lora_path": str(outside)}, "in none of the folders"),
        ({"lora_name": "x", "lora_path": str(adapters_here / "no")}, "No adapter found"),
        ({"lora_name": 3, "lora_path": "x"}, "must be a text"),
        ({"lora_name": "y", "lora_path": str(bad), "load_inplace": "yes"}, "true or false"),
    ):
        reply = await operator.post("/v1/load_lora_adapter", body)
        # As vLLM has it: what isn't there is 404.
        assert reply.status == (404 if words == "No adapter found" else 400), body
        assert words in reply.error["message"]
        assert reply.error["param"] in (None, "lora_path", "lora_name", "load_inplace")
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert (await gateway.client.post(path, {"lora_name": "x"})).status == 403
