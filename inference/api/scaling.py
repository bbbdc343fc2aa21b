"""vLLM's endpoints for data parallelism, whose ranks are replicas: `POST /scale_elastic_ep`,
`POST /is_scaling_elastic_ep`, `GET /get_world_size`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Annotated

from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiParameter
from pydantic import ConfigDict, Field

from catalog.scaling import num_replicas_by_model, scale_model
from common.db import run_in_db_thread
from common.errors import ServiceUnavailable
from inference.api.operator import MODEL_PARAMETER, OperatorView, parse_bool_query, target_replicas
from inference.engine_client.client import EngineClient, get_engine_client
from inference.schemas.base import FailFastModel
from inference.schemas.objects import ApiObject
from inference.serving.respond import parse
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.views import GatewayRequest, json_response

_POLL_INTERVAL_S = 0.2


class ScaleBody(FailFastModel):
    """`drain_timeout`: seconds to wait until they are ready. `model`: if several are served."""

    model_config = ConfigDict(extra="forbid", strict=True)

    new_data_parallel_size: int = Field(ge=1, le=64)
    drain_timeout: int = Field(120, ge=1, le=3600)
    model: str = ""


class Scaled(ApiObject):
    """Body of vLLM's server on success."""

    message: Annotated[str, Field(description="What was done.")]


class IsScaling(ApiObject):
    """Whether any model's number of replicas differs from its target."""

    is_scaling_elastic_ep: bool


class WorldSize(ApiObject):
    """Number of ranks."""

    world_size: int


class ScaleView(OperatorView):
    """Changes a model's number of replicas on each node; requests continue meanwhile."""

    schema = EndpointSchema(
        "Operator", post=Endpoint("Change the number of replicas", Scaled, ScaleBody)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"new_data_parallel_size"}`; 503 if they aren't ready in time; they still start."""
        body = parse(ScaleBody, self.read_json(request))
        size = body.new_data_parallel_size
        name = await run_in_db_thread(
            scale_model, key_id=request.caller.key_id, name=body.model, num_replicas=size
        )
        client, deadline = get_engine_client(), time.monotonic() + body.drain_timeout
        while not await _has_replicas(client, name, size):
            if time.monotonic() > deadline:
                raise ServiceUnavailable(
                    f"{name} doesn't have {size} ready replicas after {body.drain_timeout} s; it "
                    "goes on getting them."
                )
            await asyncio.sleep(_POLL_INTERVAL_S)
        return json_response({"message": f"Scaled to {size} data parallel engines"})


async def _has_replicas(client: EngineClient, model: str, size: int) -> bool:
    """Whether a model has that many replicas on each node, all of them ready."""
    await client.start()
    await client.watchman.tick()
    replicas = client.fleet.of_model(model)
    counts = Counter(r.heartbeat.replica_id.partition("@")[2] for r in replicas)  # by node
    return set(counts.values()) == {size} and all(r.ready for r in replicas)


class IsScalingView(OperatorView):
    schema = EndpointSchema("Operator", post=Endpoint("Whether replicas come or go", IsScaling))

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Whether any loaded model is scaling."""
        client = get_engine_client()
        sizes = await run_in_db_thread(num_replicas_by_model)
        scaled = [await _has_replicas(client, name, size) for name, size in sizes.items()]
        return json_response({"is_scaling_elastic_ep": not all(scaled)})


class WorldSizeView(OperatorView):
    schema = EndpointSchema(
        "Operator",
        get=Endpoint(
            "Number of ranks",
            WorldSize,
            parameters=(
                OpenApiParameter(
                    "include_dp", bool, default=True, description="Count those of all replicas."
                ),
                MODEL_PARAMETER,
            ),
        ),
    )

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """Ranks over all replicas; `?include_dp=false`: of the replica with the most."""
        include_dp = parse_bool_query(request, "include_dp", default="true")
        ranks = [r.heartbeat.model.num_ranks for r in await target_replicas(request)]
        size = sum(ranks) if include_dp else max(ranks, default=0)
        return json_response({"world_size": size})
