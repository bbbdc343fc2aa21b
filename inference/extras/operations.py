"""For operators: `POST /reset_prefix_cache`, `GET /load`, `GET /server_info`."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
from django.http.response import HttpResponseBase

from engine.contract.errors import EngineUnavailable, InvalidRequest
from inference.engine_client import EngineClient, get_engine_client
from inference.engine_client.fleet import Replica
from inference.ops import version
from inference.settings import GatewaySettings
from inference.web.views import GatewayRequest, GatewayView, json_response
from tenants.errors import NotFound

_encode = msgspec.json.Encoder().encode
#: A replica in the middle of a long step answers after it.
ANSWER_WITHIN_S = 10.0
#: What vLLM's server answers when it's done.
DONE = {"pause": "paused", "resume": "resumed", "abort_requests": "aborted"}
#: As vLLM's server reads switches in a query.
TRUE, FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")


class OperatorView(GatewayView):
    """Needs the operator's scope, which superusers alone can give."""

    required_scope = "operator"


class ResetPrefixCacheView(OperatorView):
    """Forgets every prefix that replicas keep; none of them while a request uses any."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """What each replica said; 503 unless all have done it.

        `?reset_running_requests=true`: requests that run compute theirs anew; `&model=` for one
        model's replicas alone.
        """
        running = wanted(request, "reset_running_requests")
        replicas = await replicas_of(request)
        client = get_engine_client()
        return await tell(client, replicas, "reset_prefix_cache", ANSWER_WITHIN_S, running=running)


class ResetOtherCacheView(OperatorView):
    """Forgets what encoders made of images and sounds: models take text alone, so nothing."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Done at once: there is no such cache."""
        return json_response(_encode({"ok": True, "replicas": {}}))


def wanted(request: GatewayRequest, name: str) -> bool:
    """What a switch in the query says; off where it isn't there. Raises `InvalidRequest`."""
    text = request.GET.get(name, "false").lower()
    if text not in (*TRUE, *FALSE):
        raise InvalidRequest(f"{name} must be true or false; got {text[:40]!r}.", param=name)
    return text in TRUE


async def replicas_of(request: GatewayRequest) -> list[Replica]:
    """The live replicas of the model that is asked for (`?model=`), or of all, as they are now:
    who has just told one something sees that it's done.

    Raises: `NotFound` when none serves it.
    """
    client = get_engine_client()
    await client.start()
    await client.watchman.tick()
    model = request.GET.get("model")
    if model is None:
        return list(client.fleet)
    found = client.fleet.of_model(model)
    if not found:
        raise NotFound(f"No replica serves {model[:200]!r}.", param="model")
    return found


async def tell(
    client: EngineClient, replicas: list[Replica], command: str, timeout_s: float, **details: Any
) -> HttpResponseBase:
    """Give all of them a command; what each said, with 503 unless all have done it.

    `details` are `Control`'s.
    """
    names = [replica.heartbeat.replica_id for replica in replicas]
    answers = await asyncio.gather(
        *(_tell(client, name, command, timeout_s, details) for name in names)
    )
    done = all(answer["ok"] for answer in answers)
    body: dict[str, Any] = {"ok": done, "replicas": dict(zip(names, answers, strict=True))}
    if command in DONE and done:
        body["status"] = DONE[command]
    if command == "reset_prefix_cache":
        body["success"] = done
    return json_response(_encode(body), 200 if done else 503)


async def _tell(
    client: EngineClient, replica_id: str, command: str, timeout_s: float, details: dict[str, Any]
) -> dict[str, Any]:
    try:
        reply = await client.controls.send(client, replica_id, command, timeout_s, **details)
    except EngineUnavailable as error:
        return {"ok": False, "detail": error.message}
    return {"ok": reply.ok, "detail": reply.detail}


class LoadView(OperatorView):
    """How busy the replicas are."""

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`server_load`: requests that run or wait, over all replicas as last heard, with what this
        gateway gave them since.
        """
        replicas = {
            replica.heartbeat.replica_id: _load(replica) for replica in await replicas_of(request)
        }
        total = sum(load["running"] + load["waiting"] for load in replicas.values())
        return json_response(_encode({"server_load": total, "replicas": replicas}))


def _load(replica: Replica) -> dict[str, Any]:
    beat = replica.heartbeat
    return {
        "model": beat.model.name,
        "state": beat.state,
        "running": beat.stats.num_requests_running,
        "waiting": beat.stats.num_requests_waiting + replica.submitted,
        "kv_cache_usage": beat.stats.kv_cache_usage_perc,
    }


def _shown(settings: GatewaySettings) -> dict[str, Any]:
    """All but the secret ones, which their `repr` leaves out too."""
    specs = dataclasses.fields(settings)
    return {spec.name: getattr(settings, spec.name) for spec in specs if spec.repr}


class ServerInfoView(OperatorView):
    """What runs here."""

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """Version, this gateway's settings, each replica with its model."""
        client = get_engine_client()
        await client.start()
        body = {
            "version": version(),
            "gateway": {"id": client.gateway_id, "settings": _shown(client.settings)},
            "replicas": {
                replica.heartbeat.replica_id: {
                    "host": replica.heartbeat.host,
                    "pid": replica.heartbeat.pid,
                    "state": replica.heartbeat.state,
                    "model": msgspec.to_builtins(replica.heartbeat.model),
                }
                for replica in client.fleet
            },
        }
        return json_response(_encode(body))
