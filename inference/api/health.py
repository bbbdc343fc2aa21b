"""`GET /health`: OK only while every served model has a replica that makes progress.

It also warns of full disks. These stop no requests, so they don't change the status by themselves.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from prometheus_client import CONTENT_TYPE_LATEST
from redis.exceptions import RedisError

from catalog.access import served_model_names
from common.db import in_admission_thread
from common.draining import draining
from common.loops import failure_warnings
from engine.contract.errors import QuireError
from engine.version import __version__
from inference.engine_client.client import EngineClient, get_engine_client
from inference.engine_client.fleet import Replica
from inference.errors import Overloaded
from inference.metrics.exposition import exposition, published
from inference.metrics.flusher import flush, metrics_key
from inference.metrics.queues import read_queues
from inference.schemas import objects
from inference.web.authentication import has_monitoring_access, require_monitoring_access
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.responses import JSON_ONLY, PlainTextRenderer
from inference.web.views import GatewayRequest, GatewayView, json_response


class VersionView(GatewayView):
    schema = EndpointSchema("Service", get=Endpoint("The version", objects.Version))
    public = True

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"version": ...}`."""
        return json_response({"version": __version__})


class MetricsView(GatewayView):
    """Prometheus text about the installation, the same from every gateway; for insiders only."""

    schema = EndpointSchema(
        "Service",
        get=Endpoint(
            "Figures for Prometheus",
            OpenApiTypes.STR,
            media_types={"text/plain": OpenApiTypes.STR},
            responses=dict.fromkeys((401, 403, 429), objects.ErrorAnswer),
        ),
    )
    public = True  # needs no tenant's key; see `require_monitoring_access`
    renderer_classes = (PlainTextRenderer, *JSON_ONLY)

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """503 while Redis, which stores the metrics, is unreachable."""
        await require_monitoring_access(request)
        client = get_engine_client()
        await client.start()
        prefix = client.settings.key_prefix
        try:
            await flush(client.redis, prefix)
            raw: dict[bytes, bytes] = await client.redis.hgetall(  # type: ignore[assignment]
                metrics_key(prefix)
            )
            processes = await published(client.redis, prefix)
            queues = await read_queues(client.redis)
        except RedisError as error:
            raise Overloaded("Metrics are unavailable: no connection to Redis.") from error
        stored = {field.decode(): float(value) for field, value in raw.items()}
        beats = [replica.heartbeat for replica in client.fleet]
        body = await asyncio.to_thread(exposition, stored, beats, processes, queues)
        return HttpResponse(body, content_type=CONTENT_TYPE_LATEST)


#: A disk with less free space counts as full.
MIN_FREE_BYTES = 64 << 20


@dataclass(frozen=True)
class Health:
    """`reasons` is empty if all is well."""

    reasons: list[str]
    models: dict[str, dict[str, Any]]

    @property
    def ok(self) -> bool:
        """Whether every model can be used."""
        return not self.reasons


async def check_health(client: EngineClient) -> Health:
    """Check Redis, the catalogue and the heartbeats as last read, at most half a second ago."""
    reasons: list[str] = []
    if trouble := client.watchman.redis_trouble:
        reasons.append(trouble)
    try:
        names = await served_model_names()
    except QuireError as error:
        reasons.append(error.message)
        names = dict.fromkeys(client.fleet.model_names(), False)
    models = {
        name: _model_health(replicas)
        for name, may_be_absent in names.items()
        if (replicas := client.fleet.of_model(name)) or not may_be_absent
    }
    reasons += [
        f"{name}: {model['reason']}" for name, model in models.items() if not model["ready"]
    ]
    return Health(reasons, models)


def _model_health(replicas: list[Replica]) -> dict[str, Any]:
    healthy = [r for r in replicas if r.ready and _is_progressing(r)]
    answers = any(replica.can_answer for replica in healthy)
    return {
        "ready": answers,
        "replicas": len(replicas),
        "ready_replicas": len(healthy),
        "reason": "" if answers else _unhealthy_reason(replicas),
    }


#: Time without progress after which a replica isn't healthy: several of the longest steps.
MAX_STALL_S = 20.0


def _is_progressing(replica: Replica) -> bool:
    beat = replica.heartbeat
    return beat.at - beat.progress_at <= MAX_STALL_S


def _unhealthy_reason(replicas: list[Replica]) -> str:
    """Why none of the replicas can be used."""
    if not replicas:
        return "no replica sends heartbeats."
    replicas = [replica for replica in replicas if not replica.only_encodes]
    if not replicas:
        return "none of the replicas that answer is there, only such as encode media."
    for replica in replicas:
        beat = replica.heartbeat
        if beat.state == "ready":
            standing = beat.at - beat.progress_at
            return f"the engine has made no progress for {standing:.0f} s."
    beat = replicas[0].heartbeat
    detail = f" ({beat.load_progress:.0%})" if beat.state == "loading" else ""
    return f"the replica is {beat.state}{detail}."


class HealthView(GatewayView):
    """200 if every served model can be used, else 503. Insiders see why, and for which model."""

    schema = EndpointSchema(
        "Service",
        get=Endpoint(
            "Whether all models can answer", objects.Health, responses={503: objects.Health}
        ),
    )
    public = True

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The health of the whole installation, as this gateway sees it."""
        client = get_engine_client()
        await client.start()
        health = await check_health(client)
        body: dict[str, Any] = {"status": "ok" if health.ok else "unhealthy"}
        if await has_monitoring_access(request):
            warnings = disk_warnings(data_folders()) + failure_warnings()
            body |= {"reasons": health.reasons, "models": health.models, "warnings": warnings}
        return json_response(body, 200 if health.ok else 503)


def disk_warnings(folders: Iterable[Path]) -> list[str]:
    """A sentence for each folder whose disk is full or can't be read."""
    warnings = []
    for folder in sorted(set(folders)):
        try:
            free = shutil.disk_usage(folder).free
        except FileNotFoundError:
            continue  # nothing was ever written there
        except OSError as error:
            warnings.append(f"The disk of {folder} can't be read: {error.strerror}.")
            continue
        if free < MIN_FREE_BYTES:
            warnings.append(
                f"The disk of {folder} is full ({free >> 20} MB free): nothing is saved there."
            )
    return warnings


def data_folders() -> list[Path]:
    """Folders to which this installation writes."""
    return [settings.QUIRE.data_dir, settings.QUIRE.files_dir, settings.QUIRE.adapters_dir]


class PingView(GatewayView):
    """Whether this process answers; says nothing about engines."""

    schema = EndpointSchema(
        "Service",
        get=Endpoint("Whether this gateway answers", objects.Status),
        post=Endpoint("Whether this gateway answers", objects.Status),
    )
    public = True

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """Always 200."""
        return json_response({"status": "ok"})

    post = get


class ReadyView(GatewayView):
    """Whether a load balancer may send requests here: Redis and the database can be used, and this
    gateway isn't shutting down.

    Unlike `/health` it doesn't depend on models: a gateway without a replica still serves pages,
    files and lists, and taking every gateway out of service would hide the cause.
    """

    schema = EndpointSchema(
        "Service",
        get=Endpoint(
            "Whether this gateway can take requests",
            objects.Ready,
            responses={503: objects.Ready},
        ),
    )
    public = True

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """200, or 503 with the reasons for insiders."""
        client = get_engine_client()
        await client.start()
        redis, database = client.watchman.redis_trouble, await _database.trouble()
        ending = "This gateway is shutting down." if draining.is_set() else ""
        reasons = [reason for reason in (ending, redis, database) if reason]
        body: dict[str, Any] = {"status": "unready" if reasons else "ok"}
        if reasons and await has_monitoring_access(request):
            body["reasons"] = reasons
        return json_response(body, 503 if reasons else 200)


class DatabaseProbe:
    """Checks whether the database responds, with one query at a time for all callers."""

    #: Seconds for which a result is valid, and which a query may take.
    INTERVAL_S = 1.0

    def __init__(self) -> None:
        self._check: asyncio.Task[str] | None = None
        self._asked_at = 0.0

    async def trouble(self) -> str:
        """Why the database can't be used, or ""."""
        expired = time.monotonic() - self._asked_at >= self.INTERVAL_S
        if self._check is None or (self._check.done() and expired):
            self._check = asyncio.create_task(self._ask())
            self._asked_at = time.monotonic()
        try:
            async with asyncio.timeout(self.INTERVAL_S):
                return await asyncio.shield(self._check)
        except TimeoutError:
            return "The database doesn't answer."

    async def _ask(self) -> str:
        try:
            await in_admission_thread(_select)
        except (DatabaseError, InterfaceError) as error:
            return f"The database can't be used: {type(error).__name__}."
        return ""


def _select() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


_database = DatabaseProbe()
