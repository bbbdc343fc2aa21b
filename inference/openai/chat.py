"""`POST /v1/chat/completions`."""

from __future__ import annotations

from django.http.response import HttpResponseBase

from inference.chat import ChatTurn
from inference.openai.chat_answer import ChatAnswer
from inference.openai.chat_store import respond_and_keep
from inference.openai.chat_stream import ChatStreamWriter
from inference.openai.keeping import check_room
from inference.openai.load_report import report_load
from inference.openai.schemas import ChatRequest
from inference.openai.serving import parse_beside, respond
from inference.web.negotiation import JSON_OR_EVENTS
from inference.web.views import GatewayRequest, GatewayView


class ChatCompletionsView(GatewayView):
    """Continues a chat, in one answer or as a stream."""

    generates = True
    comes_into_queue = refused_early = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One chat completion."""
        chat = await parse_beside(ChatRequest, self.read_json(request))
        ignored = chat.ignored_fields()
        if chat.store:
            await check_room(request.caller)
        turn = await ChatTurn.start(chat, caller=request.caller, received=request.received)
        ignored += turn.options.unfollowed
        if chat.store:
            response = await respond_and_keep(turn, chat, ignored, request.caller)
        else:
            response = await respond(
                turn,
                ignored,
                writer=lambda: ChatStreamWriter(turn),
                answer=lambda: ChatAnswer(turn),
            )
        await report_load(request, response, turn.job.served.base)
        return response
