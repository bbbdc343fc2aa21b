"""Load reports by ORCA, for a balancer in front: the header `endpoint-load-metrics`, as vLLM's.

https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from django.http.response import HttpResponseBase

from inference.engine_client import get_engine_client
from inference.engine_client.fleet import Replica
from inference.engine_client.queue_bound import Load
from inference.web.insiders import is_insider
from inference.web.views import GatewayRequest

ASKED_BY = "HTTP_ENDPOINT_LOAD_METRICS_FORMAT"


async def report_load(request: GatewayRequest, response: HttpResponseBase, model: str) -> None:
    """Add the header to a whole answer whose client asked for it and may read `/metrics`: load is
    all tenants'. A format that isn't known gets none.
    """
    form = request.META.get(ASKED_BY, "").upper()
    if form not in ("TEXT", "JSON") or response.streaming or not await is_insider(request):
        return
    report = load_report(form, get_engine_client().fleet.of_model(model))
    response["endpoint-load-metrics"] = report


def load_report(form: str, replicas: Iterable[Replica]) -> str:
    """The header's value, in the format "TEXT" or "JSON", of a model's replicas."""
    ready = [replica for replica in replicas if replica.ready]
    usage = sum(replica.heartbeat.stats.kv_cache_usage_perc for replica in ready)
    figures = {
        "kv_cache_usage_perc": usage / len(ready) if ready else 0.0,
        "num_requests_waiting": float(Load.of(ready).waiting),
    }
    if form == "JSON":
        return f"JSON {msgspec.json.encode({'named_metrics': figures}).decode()}"
    return f"TEXT {', '.join(f'named_metrics.{name}={value}' for name, value in figures.items())}"
