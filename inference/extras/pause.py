"""For operators: `/pause`, `/resume`, `/is_paused`, `/abort_requests`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from django.http.response import HttpResponseBase
from pydantic import BaseModel, ConfigDict, Field

from engine.contract.errors import InvalidRequest
from engine.contract.protocol import PAUSE_MODES
from inference.engine_client import get_engine_client
from inference.extras.operations import ANSWER_WITHIN_S, OperatorView, replicas_of, tell
from inference.web.views import GatewayRequest, json_response

_encode = msgspec.json.Encoder().encode
#: Requests that are waited for may be long.
ENDED_WITHIN_S = 600.0
MAX_IDS = 10_000


class PauseView(OperatorView):
    """Has replicas take nothing new, or stand still."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?mode=abort` (the default), `wait` or `keep`; `&model=` for one model's replicas."""
        mode = request.GET.get("mode", PAUSE_MODES[0])
        if mode not in PAUSE_MODES:
            raise InvalidRequest(
                f"mode must be one of {', '.join(PAUSE_MODES)}; got {mode[:40]!r}.", param="mode"
            )
        limit_s = ENDED_WITHIN_S if mode == "wait" else ANSWER_WITHIN_S
        replicas = await replicas_of(request)
        return await tell(get_engine_client(), replicas, "pause", limit_s, mode=mode)


class ResumeView(OperatorView):
    """Has paused replicas go on."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?model=` for one model's replicas alone."""
        replicas = await replicas_of(request)
        return await tell(get_engine_client(), replicas, "resume", ANSWER_WITHIN_S)


class IsPausedView(OperatorView):
    """Who is paused."""

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`is_paused`: whether any replica is; and each of them, as last heard."""
        paused = {
            replica.heartbeat.replica_id: replica.heartbeat.paused
            for replica in await replicas_of(request)
        }
        return json_response(_encode({"is_paused": any(paused.values()), "replicas": paused}))


class AbortBody(BaseModel):
    """Ids as answers have them (`chatcmpl-...`); none: all requests of everybody."""

    model_config = ConfigDict(strict=True, extra="forbid")

    request_ids: Annotated[list[str], Field(max_length=MAX_IDS)] | None = None


class AbortRequestsView(OperatorView):
    """Ends requests that run or wait."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Their outputs end with the reason "abort"."""
        body: dict[str, Any] = self.read_json(request) if request.body else {}
        ids = AbortBody.model_validate(body).request_ids or []
        replicas = await replicas_of(request)
        client = get_engine_client()
        return await tell(client, replicas, "abort_requests", ANSWER_WITHIN_S, request_ids=ids)
