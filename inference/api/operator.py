"""For operators: `POST /reset_prefix_cache`, `GET /load`, `GET /server_info` and others."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from pydantic import Field

from common.errors import NotFound
from common.settings import QuireSettings, is_secret
from engine.contract.errors import EngineUnavailable, InvalidRequest
from engine.contract.messages import PAUSE_MODES, SLEEP_LEVELS, SLEEP_TAGS
from engine.version import __version__
from inference.engine_client.client import get_engine_client
from inference.engine_client.fleet import Replica
from inference.generation.model_resolution import resolve_model
from inference.rendering.media_pool import get_media_pool
from inference.schemas.base import StrictModel
from inference.schemas.objects import ApiObject
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.views import GatewayRequest, GatewayView, json_response

#: Seconds to wait for a reply: a replica replies between two steps, which may be long.
ANSWER_WITHIN_S = 10.0
#: Status that vLLM's server returns on success.
OK_BODY = {"pause": "paused", "resume": "resumed", "abort_requests": "aborted"}
#: Values of boolean query parameters that vLLM's server accepts.
TRUE, FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")


class CommandResult(ApiObject):
    """Replies of the replicas to a command; `status` and `success` are vLLM's fields."""

    ok: bool
    replicas: dict[str, Any]
    status: str | None = Field(default=None, description="Outcome in vLLM's words.")
    success: bool | None = None


class IsSleeping(ApiObject):
    """Whether any replica sleeps, and the state of each."""

    is_sleeping: bool
    replicas: dict[str, bool]


class IsPaused(ApiObject):
    """Whether any replica is paused, and the state of each."""

    is_paused: bool
    replicas: dict[str, bool]


class Load(ApiObject):
    """Running or waiting requests."""

    server_load: int
    replicas: dict[str, Any]


class ServerInfo(ApiObject):
    """Versions, models and settings of this installation."""

    version: str
    gateway: dict[str, Any]
    replicas: dict[str, Any]


class OperatorView(GatewayView):
    """Requires the operator's scope, which only superusers can grant."""

    required_scope = "operator"


MODEL_PARAMETER = OpenApiParameter("model", str, description="Limit to this model's replicas.")


def command_endpoint(summary: str, request: Any = None, *parameters: OpenApiParameter) -> Endpoint:
    """A command to the replicas of all models or of one."""
    return Endpoint(
        summary,
        CommandResult,
        request,
        parameters=(*parameters, MODEL_PARAMETER),
        responses={503: CommandResult},
    )


class ResetPrefixCacheView(OperatorView):
    """Clears the prefix cache of replicas; none of them while a request uses it."""

    schema = EndpointSchema(
        "Operator",
        post=command_endpoint(
            "Empty the prefix caches",
            None,
            OpenApiParameter(
                "reset_running_requests",
                bool,
                default=False,
                description="Requests that run compute theirs anew.",
            ),
        ),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Return each replica's reply; 503 unless all have succeeded.

        `?reset_running_requests=true`: running requests recompute their prefixes; `&model=` for
        only one model's replicas.
        """
        running = parse_bool_query(request, "reset_running_requests")
        return await broadcast_command(request, "reset_prefix_cache", running=running)


class ResetEncoderCacheView(OperatorView):
    """Clears the caches of replicas' encoders for images and videos."""

    schema = EndpointSchema(
        "Operator", post=command_endpoint("Empty the caches of encoder outputs", None)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Return each replica's reply; 503 while a request needs cached outputs."""
        return await broadcast_command(request, "reset_encoder_cache")


class ResetMediaCacheView(ResetEncoderCacheView):
    """Also clears this gateway's cache of decoded images, videos and documents."""

    schema = EndpointSchema(
        "Operator", post=command_endpoint("Empty the caches of prepared and encoded media", None)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Return what `ResetEncoderCacheView` does."""
        get_media_pool().forget_prepared()
        return await super().post(request)


def parse_bool_query(request: GatewayRequest, name: str, default: str = "false") -> bool:
    """Value of a boolean query parameter. Raises `InvalidRequest`."""
    text = request.GET.get(name, default).lower()
    if text not in (*TRUE, *FALSE):
        raise InvalidRequest(f"{name} must be true or false; got {text[:40]!r}.", param=name)
    return text in TRUE


async def target_replicas(request: GatewayRequest) -> list[Replica]:
    """The live replicas of the model in the query (`?model=`), or of all models, as they are now:
    a caller that has just sent a command sees its effect.

    Raises: `NotFound` when none serves it.
    """
    client = get_engine_client()
    await client.start()
    await client.watchman.tick()
    model = request.GET.get("model")
    if model is None:
        return list(client.fleet)
    replicas = client.fleet.of_model(model)
    if not replicas:
        raise NotFound(f"No replica serves {model[:200]!r}.", param="model")
    return replicas


async def broadcast_command(
    request: GatewayRequest, command: str, timeout_s: float | None = None, **details: Any
) -> HttpResponseBase:
    """Send a command to the replicas that the query names; return their replies, with 503 unless
    all have succeeded.

    `details` are `ControlRequest`'s.
    """
    replicas = await target_replicas(request)
    names = [replica.heartbeat.replica_id for replica in replicas]
    limit_s = timeout_s or ANSWER_WITHIN_S
    answers = await asyncio.gather(
        *(_send_command(name, command, limit_s, details) for name in names)
    )
    done = all(answer["ok"] for answer in answers)
    body: dict[str, Any] = {"ok": done, "replicas": dict(zip(names, answers, strict=True))}
    if command in OK_BODY and done:
        body["status"] = OK_BODY[command]
    if command == "reset_prefix_cache":
        body["success"] = done
    return json_response(body, 200 if done else 503)


async def _send_command(
    replica_id: str, command: str, timeout_s: float, details: dict[str, Any]
) -> dict[str, Any]:
    client = get_engine_client()
    try:
        reply = await client.controls.send_and_wait(
            client, replica_id, command, timeout_s, **details
        )
    except EngineUnavailable as error:
        return {"ok": False, "detail": error.message}
    return {"ok": reply.ok, "detail": reply.detail}


class LoadView(OperatorView):
    schema = EndpointSchema("Operator", get=Endpoint("How many requests run and wait", Load))

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`server_load`: running or waiting requests over all replicas, by their last heartbeats
        and what this gateway has sent since.
        """
        replicas = {
            replica.heartbeat.replica_id: _load(replica)
            for replica in await target_replicas(request)
        }
        total = sum(load["running"] + load["waiting"] for load in replicas.values())
        return json_response({"server_load": total, "replicas": replicas})


def _load(replica: Replica) -> dict[str, Any]:
    beat = replica.heartbeat
    return {
        "model": beat.model.name,
        "state": beat.state,
        "running": beat.stats.num_requests_running,
        "waiting": max(0, beat.stats.num_requests_waiting + replica.submitted),
        "kv_cache_usage": beat.stats.kv_cache_usage_perc,
    }


def _public_settings(settings: QuireSettings) -> dict[str, Any]:
    """All settings but secrets and addresses, which may contain secrets."""
    fields = QuireSettings.model_fields
    hidden = {name for name, field in fields.items() if is_secret(field) or not field.repr}
    return settings.model_dump(mode="json", exclude=hidden)


class ServerInfoView(OperatorView):
    schema = EndpointSchema("Operator", get=Endpoint("Settings and replicas", ServerInfo))

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """Version, this gateway's settings, each replica with its model."""
        client = get_engine_client()
        await client.start()
        body = {
            "version": __version__,
            "gateway": {"id": client.gateway_id, "settings": _public_settings(client.settings)},
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
        return json_response(body)


#: Seconds to wait for running requests, which may be long.
DRAIN_TIMEOUT_S = 600.0
MAX_IDS = 10_000


class PauseView(OperatorView):
    schema = EndpointSchema(
        "Operator",
        post=command_endpoint(
            "Pause replicas",
            None,
            OpenApiParameter("mode", str, enum=list(PAUSE_MODES), default="abort"),
        ),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?mode=abort` (the default), `wait` or `keep`; `&model=` for one model's replicas."""
        mode = request.GET.get("mode", PAUSE_MODES[0])
        if mode not in PAUSE_MODES:
            raise InvalidRequest(
                f"mode must be one of {', '.join(PAUSE_MODES)}; got {mode[:40]!r}.", param="mode"
            )
        limit_s = DRAIN_TIMEOUT_S if mode == "wait" else None
        return await broadcast_command(request, "pause", limit_s, mode=mode)


class ResumeView(OperatorView):
    schema = EndpointSchema("Operator", post=command_endpoint("Resume replicas"))

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?model=` for only one model's replicas."""
        return await broadcast_command(request, "resume")


class IsPausedView(OperatorView):
    schema = EndpointSchema(
        "Operator",
        get=Endpoint("Whether any replica is paused", IsPaused, parameters=(MODEL_PARAMETER,)),
    )

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`is_paused`: whether any replica is; and each replica's state."""
        paused = {
            replica.heartbeat.replica_id: replica.heartbeat.paused
            for replica in await target_replicas(request)
        }
        return json_response({"is_paused": any(paused.values()), "replicas": paused})


class AbortBody(StrictModel):
    """Ids as in responses (`chatcmpl-...`); none: all requests of all tenants."""

    request_ids: Annotated[list[str], Field(max_length=MAX_IDS)] | None = None


class AbortRequestsView(OperatorView):
    schema = EndpointSchema("Operator", post=command_endpoint("Abort requests", AbortBody))

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Their outputs end with the reason "abort"."""
        body: dict[str, Any] = self.read_json(request) if request.body else {}
        ids = AbortBody.model_validate(body).request_ids or []
        return await broadcast_command(request, "abort_requests", request_ids=ids)


#: Seconds to wait for a profile: a trace of many steps is written to disk.
PROFILE_WITHIN_S = 300.0
#: Paths on the machine that created the files, which no client needs.
PATHS = ("vocab_file", "merges_file", "name_or_path")


class StartProfileView(OperatorView):
    schema = EndpointSchema("Operator", post=command_endpoint("Start a profile"))

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?model=` for only one model's replicas."""
        return await broadcast_command(request, "start_profile", PROFILE_WITHIN_S)


class StopProfileView(OperatorView):
    schema = EndpointSchema(
        "Operator", post=command_endpoint("Stop the profile and write the trace")
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Each replica's `detail` is the file with its trace, on its own machine."""
        return await broadcast_command(request, "stop_profile", PROFILE_WITHIN_S)


class RpcBody(StrictModel):
    """Method to run on every replica; takes no arguments."""

    method: Literal["check_integrity", "reset_prefix_cache", "start_profile", "stop_profile"]
    args: Annotated[list[Any], Field(max_length=0)] | None = None
    kwargs: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    timeout: Annotated[float, Field(gt=0, le=600)] | None = None


class CollectiveRpcView(OperatorView):
    schema = EndpointSchema(
        "Operator", post=command_endpoint("Run a method on all replicas", RpcBody)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Return each replica's reply."""
        body = RpcBody.model_validate(self.read_json(request))
        usual = PROFILE_WITHIN_S if body.method.endswith("_profile") else None
        return await broadcast_command(request, body.method, body.timeout or usual)


class TokenizerInfoView(OperatorView):
    schema = EndpointSchema(
        "Operator",
        get=Endpoint(
            "Read a tokenizer's configuration", OpenApiTypes.OBJECT, parameters=(MODEL_PARAMETER,)
        ),
    )

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`tokenizer_config.json` with the chat template in use, of `?model=`."""
        served = await resolve_model(request.ctx, request.GET.get("model"), task=None)
        settings = served.tokenizer.settings
        info = {name: value for name, value in settings.config.items() if name not in PATHS}
        info |= settings.named_tokens
        info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        info["chat_template"] = served.tokenizer.chat_template
        return json_response(info)


#: Seconds to wait for replicas to wake up, which may load weights from disk.
SLEEP_TIMEOUT_S = 300.0


class SleepView(OperatorView):
    schema = EndpointSchema(
        "Operator",
        post=command_endpoint(
            "Put replicas to sleep to free their memory",
            None,
            OpenApiParameter("level", int, enum=list(SLEEP_LEVELS), default=1),
        ),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?level=1` (weights move to host memory) or 2; `&model=` for one model's replicas."""
        level = request.GET.get("level", "1")
        if level not in map(str, SLEEP_LEVELS):
            raise InvalidRequest(f"level must be 1 or 2, got {level[:40]!r}.", param="level")
        return await broadcast_command(request, "sleep", SLEEP_TIMEOUT_S, level=int(level))


class WakeUpView(OperatorView):
    schema = EndpointSchema(
        "Operator",
        post=command_endpoint(
            "Wake replicas up",
            None,
            OpenApiParameter("tags", str, enum=list(SLEEP_TAGS), many=True),
        ),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?tags=weights&tags=kv_cache`, all by default; `&model=` as in `SleepView`."""
        tags = request.GET.getlist("tags")
        for tag in tags:
            if tag not in SLEEP_TAGS:
                raise InvalidRequest(
                    f"tags must be of {', '.join(SLEEP_TAGS)}; got {tag[:40]!r}.", param="tags"
                )
        return await broadcast_command(request, "wake_up", SLEEP_TIMEOUT_S, tags=tags)


class IsSleepingView(OperatorView):
    schema = EndpointSchema(
        "Operator",
        get=Endpoint("Whether any replica sleeps", IsSleeping, parameters=(MODEL_PARAMETER,)),
    )

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`is_sleeping`: whether any replica sleeps; and each replica's state."""
        sleeping = {
            replica.heartbeat.replica_id: replica.heartbeat.state == "sleeping"
            for replica in await target_replicas(request)
        }
        body = {"is_sleeping": any(sleeping.values()), "replicas": sleeping}
        return json_response(body)
