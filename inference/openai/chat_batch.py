"""`POST /v1/chat/completions/batch`: several conversations in one request, one choice each."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest
from inference.chat import ChatTurn
from inference.errors import UnsupportedField, as_quire_error
from inference.openai.chat_answer import ChatAnswer
from inference.openai.schemas import ChatRequest
from inference.openai.serving import add_headers, collect, parse
from inference.settings import gateway_settings
from inference.web.known_fields import in_words_of
from inference.web.views import GatewayRequest, GatewayView, json_response

#: What would need more than one choice, or a stream, for a conversation; with what changes nothing.
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
_encode = msgspec.json.Encoder().encode


class ChatBatchView(GatewayView):
    """Answers a list of conversations with the same settings."""

    generates = True
    comes_into_queue = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One `chat.completion`, whose choices are in the order of the conversations."""
        chats = _conversations(self.read_json(request))
        ignored = chats[0].ignored_fields()
        turn = await ChatTurn.start_batch(chats, caller=request.caller, received=request.received)
        ignored += turn.options.unfollowed
        answer = ChatAnswer(turn)
        try:
            await collect(turn, answer.take)
        except BaseException:
            turn.release()
            raise
        response = json_response(_encode(answer.body()))
        add_headers(response, turn, ignored)
        return response


def _conversations(body: dict[str, Any]) -> list[ChatRequest]:
    """A request a conversation.

    Raises:
        InvalidRequest, pydantic.ValidationError: with the name of the field.
    """
    for name, harmless in _NOT_IN_BATCHES.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise UnsupportedField(f"'{name}' is not supported in a batch.", param=name)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(
            "messages must be a list of at least one conversation.", param="messages"
        )
    limit = gateway_settings().max_prompts
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
    except ValueError as error:  # pydantic's
        told = as_quire_error(error)
        if isinstance(told, InvalidRequest):
            raise in_words_of(told, {"messages": f"messages[{number}]"}) from None
        raise
