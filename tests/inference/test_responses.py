"""`/v1/responses`: answers, memory, streams, background, strangers, bad input."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest
import stamina
from django.db import OperationalError
from django.utils import timezone
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.text.tokenizer import Tokenizer
from inference import work as queue
from inference.api.responses.runner import run_response
from inference.api.responses.views import ResponseHandler
from inference.engine_client.client import get_engine_client
from storage.actions import remove_expired
from storage.models import StoredResponse
from tests.inference.asgi_client import Reply, parse_events
from tests.inference.conftest import Gateway, until
from tests.inference.scripted import says
from tests.inference.strangers import stranger

URL = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def ask(gateway: Gateway, text: Any = "hello", **fields: Any) -> Reply:
    return await gateway.client.post(URL, {"model": "fake", "input": text, **fields})


def checked(body: dict[str, Any]) -> Response:
    """As the SDK reads it, but strictly: what is missing or misnamed fails."""
    return Response.model_validate(body)


async def test_an_answer_in_one_body(gateway: Gateway, tokenizer: Tokenizer) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "a fox"))):
        reply = await ask(gateway, metadata={"k": "v"}, temperature=0.5, max_output_tokens=50)
    response = checked(reply.json())
    assert (response.status, response.output_text) == ("completed", "a fox")
    assert (response.metadata, response.temperature) == ({"k": "v"}, 0.5)
    assert (response.max_output_tokens, response.object) == (50, "response")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    (record,) = await gateway.usage()
    assert record.endpoint == "responses"


async def test_an_answer_that_is_cut_off_is_incomplete(served: Gateway) -> None:
    response = checked((await ask(served, max_output_tokens=3)).json())
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


async def test_a_conversation_goes_on_from_a_stored_response(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))) as replica:
        first = (await ask(gateway, "one", instructions="be brief")).json()
        second = (await ask(gateway, "two", previous_response_id=first["id"])).json()
        await ask(gateway, "three", previous_response_id=second["id"], instructions="be kind")
        texts = [tokenizer.decode(r.prompt_token_ids, False) for r in replica.received]
        full_outputs = await gateway.client.chat(
            messages=[
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "fox"},
                {"role": "user", "content": "two"},
                {"role": "assistant", "content": "fox"},
                {"role": "user", "content": "three"},
            ]
        )
        assert full_outputs.status == 200
        assert replica.received[-1].prompt_token_ids == replica.received[2].prompt_token_ids
    assert "be brief" in texts[0]
    assert "be brief" not in texts[1]  # instructions are of one turn
    assert second["previous_response_id"] == first["id"]


async def test_fault_88_items_of_earlier_responses_may_come_as_references(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))) as replica:
        first = (await ask(gateway, "one")).json()
        user, again = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        reply = await ask(gateway, [user, reference, again])
        assert reply.status == 200, reply.body
        assistant = {"role": "assistant", "content": "fox"}
        assert (await gateway.client.chat(messages=[user, assistant, again])).status == 200
        assert replica.received[1].prompt_token_ids == replica.received[2].prompt_token_ids
        unstored = (await ask(gateway, "one", store=False)).json()["output"][0]["id"]
        for other in (unstored, "msg_" + "0" * 32, "../../etc", ""):
            reply = await ask(gateway, [user, {"type": "item_reference", "id": other}])
            assert (reply.status, reply.error["param"]) == (404, "input[1].id"), other
        usual = await gateway.client.get(f"{URL}/{first['id']}")
        assert usual.json()["output"] == first["output"]


@pytest.mark.parametrize("stream", [False, True])
async def test_fault_88_an_agents_function_is_offered_without_the_servers_tools(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool
) -> None:
    hosted = [
        {"type": name} for name in ("web_search", "web_search_preview_2025_03_11", "apply_patch")
    ]
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        for tools in ([WEATHER], [*hosted, WEATHER]):
            reply = await ask(gateway, "x", tools=tools, tool_choice="auto", stream=stream)
            assert reply.status == 200, reply.body
        first, second = replica.received
        assert first.prompt_token_ids == second.prompt_token_ids


async def test_fault_88_calls_of_another_servers_tools_are_left_out(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    user, again = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    assistant = {"role": "assistant", "content": "fox"}
    search = {"type": "search", "query": "q"}
    calls = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": search},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "a", "tools": []},
    ]
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        for items in ([user, assistant, again], [user, *calls, assistant, again]):
            reply = await ask(gateway, items)
            assert reply.status == 200, reply.body
        first, second = replica.received
        assert first.prompt_token_ids == second.prompt_token_ids


async def test_what_is_not_stored_can_not_be_gone_on_from(served: Gateway) -> None:
    first = (await ask(served, store=False)).json()
    assert first["store"] is False
    for reply in (
        await ask(served, previous_response_id=first["id"]),
        await ask(served, previous_response_id="../../etc"),
    ):
        assert (reply.status, reply.error["param"]) == (404, "previous_response_id")
    assert (await served.client.get(f"{URL}/{first['id']}")).status == 404


async def test_items_of_all_kinds_become_the_chat_they_tell_of(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    items = [
        {"role": "developer", "content": "dev"},
        {"role": "user", "content": [{"type": "input_text", "text": "what "}, {
            "type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]  # fmt: skip
    messages = [
        {"role": "developer", "content": "dev"},
        {"role": "user", "content": "what weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    async with gateway.serving(gateway.scripted(says(tokenizer, "ok"))) as replica:
        assert (await ask(gateway, items)).status == 200
        assert (await gateway.client.chat(messages=messages)).status == 200
        first, second = replica.received
        assert first.prompt_token_ids == second.prompt_token_ids


async def test_calls_are_items_and_their_outputs_go_back(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, f"I look.\n{CALL}"))):
        answered = checked((await ask(gateway, "weather?", tools=[WEATHER])).json())
        assert [item.type for item in answered.output] == ["message", "function_call"]
        call = answered.output[1]
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        again = await ask(gateway, [output], previous_response_id=answered.id, tools=[WEATHER])
        assert again.status == 200


@pytest.mark.parametrize("text", ["plain words", f"Let me see.\n{CALL}", CALL])
async def test_the_streams_events_are_the_sdks_and_tell_the_same(
    gateway: Gateway, tokenizer: Tokenizer, text: str
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, text))):
        reply = await ask(gateway, "hi", stream=True, tools=[WEATHER])
        full_payload = (await ask(gateway, "hi", tools=[WEATHER])).json()
    raw = parse_events(reply.body)
    events = [EVENT.validate_python(event) for event in raw]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [line[7:] for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event.type for event in events]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == "response.completed"
    final = raw[-1]["response"]
    baseline = [{k: v for k, v in i.items() if k not in ("id", "call_id", "content")}
             for i in final["output"]]  # fmt: skip
    assert baseline == [
        {k: v for k, v in i.items() if k not in ("id", "call_id", "content")}
        for i in full_payload["output"]
    ]
    for index, item in enumerate(final["output"]):
        mine = [event for event in raw if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[0]["item"]["status"] == "in_progress"
        assert mine[-1] == {
            "type": "response.output_item.done",
            "sequence_number": mine[-1]["sequence_number"],
            "output_index": index,
            "item": item,
        }
        deltas = "".join(event.get("delta", "") for event in mine)
        arguments = (
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        )
        assert deltas == arguments
    stored = (await gateway.client.get(f"{URL}/{final['id']}")).json()
    assert stored == final


async def test_logprobs_are_included_when_asked_for(served: Gateway) -> None:
    include = ["message.output_text.logprobs"]
    reply = await ask(served, include=include, top_logprobs=2, max_output_tokens=4)
    logprobs = reply.json()["output"][0]["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2] * 4


async def test_fault_27_a_fault_in_the_middle_is_a_failed_response(gateway: Gateway) -> None:
    async with gateway.serving(gateway.failing()):
        reply = await ask(gateway, stream=True, max_output_tokens=500)
    last = EVENT.validate_python(parse_events(reply.body)[-1])
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"


async def test_retrieve_input_items_and_delete(served: Gateway) -> None:
    items = [{"role": "user", "content": f"m{n}"} for n in range(3)]
    payload = (await ask(served, items)).json()
    listed = (await served.client.get(f"{URL}/{payload['id']}/input_items?limit=2")).json()
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert (texts, listed["has_more"]) == (["m2", "m1"], True)
    rest = await served.client.get(
        f"{URL}/{payload['id']}/input_items?order=desc&after={listed['last_id']}"
    )
    assert [item["content"][0]["text"] for item in rest.json()["data"]] == ["m0"]
    gone = await served.client.request("DELETE", f"{URL}/{payload['id']}")
    assert gone.json()["deleted"] is True
    assert (await served.client.get(f"{URL}/{payload['id']}")).status == 404


async def test_fault_23_a_strangers_response_is_404_on_every_verb(served: Gateway) -> None:
    response_id = (await ask(served, "secret")).json()["id"]
    other = await asyncio.to_thread(stranger)
    for method, path in (
        ("GET", f"{URL}/{response_id}"),
        ("DELETE", f"{URL}/{response_id}"),
        ("POST", f"{URL}/{response_id}/cancel"),
        ("GET", f"{URL}/{response_id}/input_items"),
    ):
        reply = await other.request(method, path)
        assert reply.status == 404, path
    body = {"model": "fake", "input": "x", "previous_response_id": response_id}
    assert (await other.post(URL, body)).status == 404
    assert (await served.client.get(f"{URL}/{response_id}")).status == 200


async def test_responses_expire(served: Gateway, settings: Any, tmp_path: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)
    response_id = (await ask(served)).json()["id"]
    await StoredResponse.objects.aupdate(expires_at=timezone.now() - timedelta(seconds=1))
    assert (await served.client.get(f"{URL}/{response_id}")).status == 404
    assert (await ask(served, previous_response_id=response_id)).status == 404
    assert await asyncio.to_thread(remove_expired) == 1


async def test_a_conversation_that_is_too_long_loses_its_oldest_messages(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "sun"}
    items = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one " * 20},
        call,
        output,
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "fox"},
        {"role": "user", "content": "three"},
    ]

    def chat(*turns: Any) -> list[int]:
        return tokenizer.encode(
            "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
            + "<|im_start|>assistant\n"
        )

    answer = [("user", "two"), ("assistant", "fox"), ("user", "three")]
    expected_outputs = chat(("system", "be brief"), *answer)
    replica = gateway.scripted(says(tokenizer, "ok"), max_model_len=len(expected_outputs) + 8)
    async with gateway.serving(replica):
        ask_for = {"max_output_tokens": 4, "truncation": "auto"}
        reply = (await ask(gateway, items, **ask_for)).json()
        assert (reply["truncation"], reply["status"]) == ("auto", "completed")
        # The call went with the first words, its output with the call.
        assert list(replica.received[0].prompt_token_ids) == expected_outputs
        refused = await ask(gateway, items, max_output_tokens=4)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        isolated_response = await ask(
            gateway, [*items[:-1], {"role": "user", "content": "x " * 99}], **ask_for
        )
        assert isolated_response.error["code"] == "context_length_exceeded"


# -- background -------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Messages to workers, noted instead of sent."""
    jobs: list[tuple[str, str]] = []
    monkeypatch.setattr(queue, "send_job", lambda kind, public_id: jobs.append((kind, public_id)))
    return jobs


async def test_a_background_response_is_made_by_a_worker(
    gateway: Gateway, tokenizer: Tokenizer, sent: list[tuple[str, str]]
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))):
        queued = (await ask(gateway, background=True)).json()
        assert (queued["status"], queued["output"]) == ("queued", [])
        assert sent == [("response", queued["id"])]
        refused = await ask(gateway, previous_response_id=queued["id"])
        assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
        await run_response(queued["id"], "worker")
        await run_response(queued["id"], "another")  # which has nothing left to do
        done = checked((await gateway.client.get(f"{URL}/{queued['id']}")).json())
        assert (done.status, done.output_text, done.background) == ("completed", "fox", True)
        assert done.created_at == queued["created_at"]
        assert (await ask(gateway, previous_response_id=queued["id"])).status == 200
    assert len(await gateway.usage()) == 2


async def test_a_background_stream_is_whole_though_a_worker_finds_it_before_it_is_sent_one(
    gateway: Gateway,
    tokenizer: Tokenizer,
    sent: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers look for what waits: they may have it as soon as its row is there."""
    keep = ResponseHandler._keep

    async def read_before_storing(
        exchange: ResponseHandler, body: dict[str, Any], **how: bool
    ) -> None:
        await keep(exchange, body, **how)
        await run_response(exchange.public_id, "worker")

    monkeypatch.setattr(ResponseHandler, "_keep", read_before_storing)
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))):
        reply = await ask(gateway, background=True, stream=True)
    assert reply.status == 200, reply.json()
    events = parse_events(reply.body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert (kinds[:3], kinds[-1]) == (["created", "queued", "in_progress"], "completed")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_background_stream_that_cannot_be_kept_leaves_no_events(
    gateway: Gateway, sent: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**fields: Any) -> None:
        raise OperationalError("database or disk is full")

    monkeypatch.setattr("inference.api.responses.views.store_response", full)
    assert (await ask(gateway, background=True, stream=True)).status == 503
    redis = get_engine_client().redis
    assert await redis.keys(f"{get_engine_client().settings.key_prefix}:response:*") == []


async def test_a_background_response_can_be_cancelled(
    gateway: Gateway, sent: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.api.responses.runner.CANCEL_POLL_INTERVAL_S", 0.05)
    async with gateway.serving(gateway.fake(token_delay=0.01)) as replica:
        response_id = (await ask(gateway, background=True, max_output_tokens=1500)).json()["id"]
        running = asyncio.create_task(run_response(response_id, "worker"))
        await until(lambda: replica.running)
        cancelled = (await gateway.client.post(f"{URL}/{response_id}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        await asyncio.wait_for(running, 60)
        await until(lambda: replica.aborted)
        assert (await gateway.client.get(f"{URL}/{response_id}")).json()["status"] == "cancelled"
        assert (await gateway.client.post(f"{URL}/{response_id}/cancel")).status == 200
        other = (await ask(gateway, max_output_tokens=1)).json()["id"]
        assert (await gateway.client.post(f"{URL}/{other}/cancel")).status == 400


async def test_a_background_fault_is_told(gateway: Gateway, sent: list[tuple[str, str]]) -> None:
    response_id = (await ask(gateway, background=True)).json()["id"]
    with stamina.set_testing(True):
        await run_response(response_id, "worker")  # no replica serves the model
    failed = (await gateway.client.get(f"{URL}/{response_id}")).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


async def test_a_background_response_waits_for_a_replica(
    gateway: Gateway, tokenizer: Tokenizer, sent: list[tuple[str, str]]
) -> None:
    response_id = (await ask(gateway, background=True)).json()["id"]
    running = asyncio.create_task(run_response(response_id, "worker"))
    await asyncio.sleep(0.1)
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))):
        await asyncio.wait_for(running, 60)
    assert (await gateway.client.get(f"{URL}/{response_id}")).json()["status"] == "completed"


async def test_a_background_response_of_no_model_is_refused_at_once(
    served: Gateway, sent: list[tuple[str, str]]
) -> None:
    reply = await served.client.post(URL, {"model": "none", "input": "x", "background": True})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert sent == []


async def test_a_tenant_may_have_only_so_many_waiting(
    served: Gateway, sent: list[tuple[str, str]], settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"open_responses": 2})
    codes = [(await ask(served, background=True)).status for _ in range(3)]
    assert codes == [200, 200, 429]
    refused = await ask(served, background=True)
    assert refused.error["code"] == "too_much_waiting"
    assert int(refused.headers["retry-after"]) >= 1


async def test_what_would_change_nothing_may_be_included(served: Gateway) -> None:
    reply = await ask(served, include=["reasoning.encrypted_content", "file_search_call.results"])
    assert reply.status == 200


async def test_the_service_tier_is_the_chats(served: Gateway) -> None:
    assert (await ask(served, service_tier="flex")).json()["service_tier"] == "flex"
    assert (await ask(served)).json()["service_tier"] == "default"


# -- bad input --------------------------------------------------------------------------------

MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [MESSAGE, {"type": "computer_call"}]}, "input[1].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**63}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [WEATHER | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        (
            {"input": [{"type": "reasoning", "content": [{"type": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
            "text.format.name",
        ),
        ({"include": ["everything"]}, "include"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"truncation": "middle"}, "truncation"),
        ({"chat_template": "x"}, "chat_template"),  # fault 14
        (
            {"chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template",
        ),
        ({"extra_body": {"chat_template": "x"}}, "extra_body"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"priority": -1}, "priority"),
    ],
)
async def test_fault_05_what_is_wrong_is_named_in_the_clients_words(
    served: Gateway, fields: dict[str, Any], param: str
) -> None:
    reply = await served.client.post(URL, {"model": "fake", "input": "x"} | fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body


async def test_fault_16_odd_characters_are_kept_and_given_back(served: Gateway) -> None:
    text = "nul \0, override \u202e, family \U0001f468\u200d\U0001f469"
    payload = (await ask(served, text, metadata={"k": "\0"}, max_output_tokens=5)).json()
    stored = (await served.client.get(f"{URL}/{payload['id']}")).json()
    assert stored["metadata"] == {"k": "\0"}
    items = (await served.client.get(f"{URL}/{payload['id']}/input_items")).json()["data"]
    assert items[0]["content"][0]["text"] == text
    assert (await ask(served, "x", previous_response_id=payload["id"])).status == 200


async def test_fault_18_a_tenant_in_a_header_changes_nothing(served: Gateway) -> None:
    response_id = (await ask(served, "x", max_output_tokens=1)).json()["id"]
    other = await asyncio.to_thread(stranger)
    headers = {"x-tenant": "gateway-tests", "openai-organization": "gateway-tests"}
    assert (await other.get(f"{URL}/{response_id}", headers=headers)).status == 404


async def test_unknown_fields_are_named_or_refused(served: Gateway, settings: Any) -> None:
    reply = await ask(served, frobnicate=1)
    assert reply.headers["x-quire-ignored-fields"] == "frobnicate"
    settings.QUIRE = settings.QUIRE.replace(strict=True)
    refused = await ask(served, frobnicate=1)
    assert (refused.status, refused.error["param"]) == (400, "frobnicate")
