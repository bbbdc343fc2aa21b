"""`GET /version` and `GET /metrics`."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from importlib import metadata

import msgspec
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from prometheus_client import CONTENT_TYPE_LATEST
from redis.exceptions import RedisError

from inference.engine_client import get_engine_client
from inference.errors import Overloaded
from inference.metrics.exposition import exposition
from inference.metrics.flusher import flush, metrics_key
from inference.metrics.processes import published
from inference.web.insiders import require_insider
from inference.web.negotiation import JSON_ONLY, PlainTextRenderer
from inference.web.views import GatewayRequest, GatewayView, json_response


@lru_cache(maxsize=1)
def version() -> str:
    """Quire's version, from the installed package or, in a clone, from its project file."""
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return _version_in_clone()


def _version_in_clone() -> str:
    import tomllib
    from pathlib import Path

    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    return str(tomllib.loads(path.read_text(encoding="utf-8"))["project"]["version"])


class VersionView(GatewayView):
    """The version of Quire."""

    public = True

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"version": ...}`."""
        return json_response(msgspec.json.encode({"version": version()}))


class MetricsView(GatewayView):
    """Prometheus text about the installation, the same from every gateway; for insiders alone."""

    public = True  # no tenant's key is asked for; see `require_insider`
    renderer_classes = (PlainTextRenderer, *JSON_ONLY)

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """503 while Redis, which has the figures, can't be reached."""
        await require_insider(request)
        client = get_engine_client()
        await client.start()
        prefix = client.settings.key_prefix
        try:
            await flush(client.redis, prefix)
            raw: dict[bytes, bytes] = await client.redis.hgetall(  # type: ignore[assignment]
                metrics_key(prefix)
            )
            processes = await published(client.redis, prefix)
        except RedisError as error:
            raise Overloaded("Metrics are unavailable: no connection to Redis.") from error
        stored = {field.decode(): float(value) for field, value in raw.items()}
        beats = [replica.heartbeat for replica in client.fleet]
        body = await asyncio.to_thread(exposition, stored, beats, processes)
        return HttpResponse(body, content_type=CONTENT_TYPE_LATEST)
