"""`POST /v1/chat/completions`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from django.conf import settings
from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiParameter

from common.db import run_in_db_thread
from engine.contract.errors import InvalidRequest, QuireError
from inference.api.chat_output import ChatCompletionBuilder, ChatStreamWriter
from inference.chat.turn import ChatSession, TurnDelta
from inference.errors import UnsupportedField, as_quire_error
from inference.loop.offload import in_report_thread
from inference.schemas import objects
from inference.schemas.base import Metadata, StrictModel, rename_error_field
from inference.schemas.chat import ChatBatchRequest, ChatRequest
from inference.serving.respond import (
    add_headers,
    add_orca_header,
    check_response_quota,
    collect,
    parse,
    parse_offloaded,
    respond,
    store_before_last_event,
)
from inference.serving.stream import EventWriter
from inference.web.endpoint_schema import IDEMPOTENCY_KEY, PAGE_PARAMETERS, Endpoint, EndpointSchema
from inference.web.responses import (
    JSON_OR_EVENTS,
    EventStreamResponse,
    list_response,
    paginate_items,
    parse_page_query,
)
from inference.web.views import LIST_COST, GatewayRequest, GatewayView, json_response
from storage.access import StoredCompletion, access_completion, access_completions, page
from storage.actions import delete_completion, store_completion, update_completion
from tenants.authentication import Caller

_encode = msgspec.json.Encoder().encode

#: Fields that a batch refuses, and the values that are accepted because they change nothing.
_NOT_IN_BATCHES: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "store": (False,),
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "echo": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
}


class ChatBatchView(GatewayView):
    schema = EndpointSchema(
        "Chat",
        post=Endpoint(
            "Answer several conversations at once", objects.ChatCompletion, ChatBatchRequest
        ),
    )
    generates = True
    queues_for_model = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One `chat.completion`, whose choices are in the order of the conversations."""
        chats = _conversations(self.read_json(request))
        ignored = chats[0].ignored_fields()
        turn = await ChatSession.start_many(chats, request.ctx)
        ignored += turn.options.unsupported_fields
        answer = ChatCompletionBuilder(turn)
        try:
            await collect(turn, answer.append)
        except BaseException:
            turn.release()
            raise
        response = json_response(answer.body())
        add_headers(response, turn, ignored)
        return response


def _conversations(body: dict[str, Any]) -> list[ChatRequest]:
    """Convert the body to one request per conversation.

    Raises:
        InvalidRequest, pydantic.ValidationError: with the name of the field.
    """
    for name, neutral in _NOT_IN_BATCHES.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise UnsupportedField(f"'{name}' is not supported in a batch.", param=name)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(
            "messages must be a list of at least one conversation.", param="messages"
        )
    limit = settings.QUIRE.max_prompts
    if len(messages) > limit:
        raise InvalidRequest(
            f"messages holds {len(messages)} conversations; at most {limit} may be sent at once.",
            param="messages",
        )
    for number, conversation in enumerate(messages):
        if not isinstance(conversation, list):
            raise InvalidRequest(
                f"messages[{number}] must be a conversation: a list of messages.",
                param=f"messages[{number}]",
            )
    return [_conversation(body, number, messages[number]) for number in range(len(messages))]


def _conversation(body: dict[str, Any], number: int, messages: list[Any]) -> ChatRequest:
    try:
        return parse(ChatRequest, {**body, "messages": messages})
    except ValueError as error:  # from pydantic
        quire_error = as_quire_error(error)
        if isinstance(quire_error, InvalidRequest):
            raise rename_error_field(quire_error, {"messages": f"messages[{number}]"}) from None
        raise


class StoringChatWriter(EventWriter[TurnDelta]):
    """Writes the chunks, and also collects the complete answer."""

    def __init__(self, turn: ChatSession) -> None:
        self._writer, self._answer = ChatStreamWriter(turn), ChatCompletionBuilder(turn)
        self.final: dict[str, Any] | None = None

    def start(self) -> bytes:
        return self._writer.start()

    def write(self, deltas: Iterable[TurnDelta]) -> bytes:
        deltas = list(deltas)
        for delta in deltas:  # first, because the wrapped writer modifies deltas
            self._answer.append(delta)
        return self._writer.write(deltas)

    def finish(self) -> bytes:
        self.final = self._answer.body()
        return self._writer.finish()

    def error(self, error: QuireError) -> bytes:
        return self._writer.error(error)


async def respond_and_store(
    turn: ChatSession, chat: ChatRequest, ignored: list[str], caller: Caller
) -> HttpResponseBase:
    """`respond` for a completion that is stored. Raises what `respond` raises."""
    response: HttpResponseBase

    async def store(body: dict[str, Any]) -> None:
        await _store(caller, chat, body)

    try:
        if turn.job.stream:
            writer = StoringChatWriter(turn)
            first = await turn.next(settings.QUIRE.stream_start_wait_s)
            events = store_before_last_event(turn, writer, first, writer, store)
            response = EventStreamResponse(events, turn.release)
        else:
            answer = ChatCompletionBuilder(turn)
            await collect(turn, answer.append)
            body = answer.body()
            await store(body)
            response = json_response(body)
    except BaseException:
        turn.release()
        raise
    add_headers(response, turn, ignored)
    return response


async def _store(caller: Caller, chat: ChatRequest, body: dict[str, Any]) -> None:
    def store() -> None:
        store_completion(
            caller=caller,
            public_id=body["id"],
            model=body["model"],
            messages=messages_for_listing(body["id"], chat.raw_messages),
            metadata=dict(chat.metadata or {}),
            body=body,
        )

    await run_in_db_thread(store)


def messages_for_listing(
    completion_id: str, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages in the form in which they are listed: each with an id, non-text parts separate."""
    listed = []
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else None
        listed.append(
            {
                **message,
                "id": f"{completion_id}-{index}",
                "content": None if parts is not None else content,
                "content_parts": parts,
            }
        )
    return listed


class ChatCompletionsView(GatewayView):
    """Continues a chat, in one answer or as a stream."""

    generates = True
    queues_for_model = supports_load_shedding = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One chat completion."""
        chat = await parse_offloaded(request.ctx, ChatRequest, self.read_json(request))
        ignored = chat.ignored_fields()
        if chat.store:
            await check_response_quota(request.caller)
        turn = await ChatSession.start(chat, request.ctx)
        ignored += turn.options.unsupported_fields
        if chat.store:
            response = await respond_and_store(turn, chat, ignored, request.caller)
        else:
            response = await respond(
                turn,
                ignored,
                writer=lambda: ChatStreamWriter(turn),
                answer=lambda: ChatCompletionBuilder(turn),
            )
        await add_orca_header(request, response, turn.job.model.base)
        return response


_PAIR = re.compile(r"metadata\[(.{1,64})\]")
MAX_METADATA_PAIRS = 16
_METADATA_FILTER = {"type": "object", "additionalProperties": {"type": "string"}}


def completion_object(row: StoredCompletion) -> dict[str, Any]:
    """OpenAI's `chat.completion` with its current metadata."""
    return {**row.body, "metadata": row.metadata}


class CompletionUpdate(StrictModel):
    """Changeable fields of a stored completion."""

    metadata: Metadata | None


class StoredCompletionsView(ChatCompletionsView):
    schema = EndpointSchema(
        "Chat",
        get=Endpoint(
            "List stored answers",
            objects.ChatCompletionPage,
            parameters=(
                *PAGE_PARAMETERS,
                OpenApiParameter("model", str, description="Those of this model."),
                OpenApiParameter("metadata", _METADATA_FILTER, style="deepObject", explode=True),
            ),
            operation_id="v1_chat_completions_list",
        ),
        post=Endpoint(
            "Answer a conversation",
            objects.ChatCompletion,
            ChatRequest,
            streams=True,
            parameters=(IDEMPOTENCY_KEY,),
        ),
    )
    call_cost = LIST_COST

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The tenant's stored completions by page; `model` and `metadata[key]` filter them."""
        page_query = parse_page_query(request, default=20, max_limit=100, orders=("asc", "desc"))
        metadata_filter = _parse_metadata_query(request)

        def listed() -> bytes:
            rows = access_completions(request.caller, request.GET.get("model"), metadata_filter)
            completions, more = page(
                rows.defer("messages"),
                limit=page_query.limit,
                after=page_query.after,
                newest_first=page_query.newest_first,
                matches=_metadata_filter(metadata_filter),
            )
            return _encode(list_response(completions, more, completion_object))

        return json_response(await in_report_thread(request.caller, listed))


def _metadata_filter(metadata: dict[str, str]) -> Callable[[StoredCompletion], bool] | None:
    if not metadata:
        return None
    return lambda row: metadata.items() <= row.metadata.items()


def _parse_metadata_query(request: GatewayRequest) -> dict[str, str]:
    """`?metadata[key]=value` as pairs. Raises `InvalidRequest`."""
    pairs = {
        match[1]: str(value)
        for name, value in request.GET.items()
        if (match := _PAIR.fullmatch(name))
    }
    if len(pairs) > MAX_METADATA_PAIRS:
        raise InvalidRequest(
            f"metadata may hold at most {MAX_METADATA_PAIRS} pairs.", param="metadata"
        )
    return pairs


class StoredCompletionView(GatewayView):
    schema = EndpointSchema(
        "Chat",
        get=Endpoint("Read a stored answer", objects.ChatCompletion),
        post=Endpoint(
            "Change a stored answer's metadata",
            objects.ChatCompletion,
            CompletionUpdate,
            operation_id="v1_chat_completions_update",
        ),
        delete=Endpoint("Delete a stored answer", objects.Deleted),
    )

    async def get(self, request: GatewayRequest, completion_id: str) -> HttpResponseBase:
        """The completion as it was returned."""
        row = await run_in_db_thread(access_completion, request.caller, completion_id)
        return json_response(completion_object(row))

    async def post(self, request: GatewayRequest, completion_id: str) -> HttpResponseBase:
        """Change its metadata."""
        change = CompletionUpdate.model_validate(self.read_json(request))
        row = await run_in_db_thread(
            update_completion,
            caller=request.caller,
            public_id=completion_id,
            metadata=dict(change.metadata or {}),
        )
        return json_response(completion_object(row))

    async def delete(self, request: GatewayRequest, completion_id: str) -> HttpResponseBase:
        """Delete it."""
        await run_in_db_thread(delete_completion, caller=request.caller, public_id=completion_id)
        deleted = {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
        return json_response(deleted)


class CompletionMessagesView(GatewayView):
    schema = EndpointSchema(
        "Chat",
        get=Endpoint(
            "List the messages of a stored answer", objects.ItemPage, parameters=PAGE_PARAMETERS
        ),
    )

    async def get(self, request: GatewayRequest, completion_id: str) -> HttpResponseBase:
        """Its messages, the first one first."""
        page_query = parse_page_query(request, default=20, max_limit=100, orders=("asc", "desc"))
        row = await run_in_db_thread(access_completion, request.caller, completion_id)
        return json_response(paginate_items(row.messages, page_query))
