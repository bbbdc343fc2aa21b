"""`POST /inference/v1/generate`."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest
from inference.generation import Generation, find_served
from inference.openai.completions import completion_job
from inference.openai.schemas.base import Refused
from inference.openai.serving import respond
from inference.rendering.pool import beside
from inference.tokens.answer import TokensAnswer, TokensStreamWriter
from inference.tokens.schemas import TokensRequest, in_our_words
from inference.web.negotiation import JSON_OR_EVENTS
from inference.web.views import GatewayRequest, GatewayView


class TokensView(GatewayView):
    """Goes on from token ids with token ids; nothing is tokenised and no template is applied."""

    generates = True
    comes_into_queue = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One prompt, in one answer or as a stream."""
        wanted = await beside(parse_tokens, self.read_json(request))
        ignored = wanted.ignored_fields()
        completion = await beside(wanted.completion)
        served = await find_served(request.caller, wanted.model)
        served.check_queue(request.caller, wanted.priority)
        try:
            job = await completion_job(request, completion, served)
            if (thinking := wanted.thinking()) is not None:
                job.sampling = msgspec.structs.replace(job.sampling, thinking=thinking)
                await job.check()
        except InvalidRequest as error:
            raise in_our_words(error) from None
        alternatives = job.sampling.logprobs
        generation = await Generation.start(job)
        return await respond(
            generation,
            ignored,
            writer=lambda: TokensStreamWriter(generation, wanted, alternatives),
            answer=lambda: TokensAnswer(generation, wanted, alternatives),
        )


def parse_tokens(body: dict[str, Any]) -> TokensRequest:
    """Raises `InvalidRequest` and pydantic's ValidationError, which both become 400."""
    try:
        return TokensRequest.model_validate(body)
    except Refused as refusal:
        raise refusal.error from None
