"""For operators: `POST /sleep`, `POST /wake_up`, `GET /is_sleeping`, as vLLM has them."""

from __future__ import annotations

import msgspec
from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest
from engine.contract.protocol import SLEEP_LEVELS, SLEEP_TAGS
from inference.engine_client import get_engine_client
from inference.extras.operations import OperatorView, replicas_of, tell
from inference.web.views import GatewayRequest, json_response

_encode = msgspec.json.Encoder().encode
#: Weights may have to be read anew.
ANSWER_WITHIN_S = 300.0


class SleepView(OperatorView):
    """Has replicas give their memory back."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?level=1` (weights go to host memory) or 2; `&model=` for one model's replicas alone."""
        level = request.GET.get("level", "1")
        if level not in map(str, SLEEP_LEVELS):
            raise InvalidRequest(f"level must be 1 or 2, got {level[:40]!r}.", param="level")
        replicas = await replicas_of(request)
        client = get_engine_client()
        return await tell(client, replicas, "sleep", ANSWER_WITHIN_S, level=int(level))


class WakeUpView(OperatorView):
    """Has replicas take their memory again."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?tags=weights&tags=kv_cache`, all by default; `&model=` as in `SleepView`."""
        tags = request.GET.getlist("tags")
        for tag in tags:
            if tag not in SLEEP_TAGS:
                raise InvalidRequest(
                    f"tags must be of {', '.join(SLEEP_TAGS)}; got {tag[:40]!r}.", param="tags"
                )
        replicas = await replicas_of(request)
        return await tell(get_engine_client(), replicas, "wake_up", ANSWER_WITHIN_S, tags=tags)


class IsSleepingView(OperatorView):
    """Who sleeps."""

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`is_sleeping`: whether any replica does; and each of them."""
        sleeping = {
            replica.heartbeat.replica_id: replica.heartbeat.state == "sleeping"
            for replica in await replicas_of(request)
        }
        body = {"is_sleeping": any(sleeping.values()), "replicas": sleeping}
        return json_response(_encode(body))
