"""Rejects requests that would wait too long, before they are parsed.

In an overload most requests are rejected, and the time for that is taken from running requests.
After the first rejection, further requests are therefore rejected by their key and a few fields of
their bodies, as their view would do: without validation, Django's request handling or database
queries. A request that isn't certain to be rejected goes to its view.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any, Final

import msgspec
from rest_framework.exceptions import APIException

from catalog.access import get_cached_model
from common.log_context import bind_request
from engine.contract.errors import EngineOverloaded, QuireError
from engine.contract.pooling_params import GENERATE
from inference.engine_client.client import get_engine_client
from inference.errors import Overloaded
from inference.loop.fair_dispatch import rejection_dispatch
from inference.request.context import (
    ClientTimeout,
    RequestContext,
    RequestRecord,
    endpoint_of,
    log_rejected_request,
)
from inference.web.json_body import LARGE_BYTES
from inference.web.views import ARRIVED, ERROR, KEY, TENANT, check_accept
from tenants import api_keys as scopes
from tenants.authentication import Caller, get_cached_caller

Scope = MutableMapping[str, Any]

#: Headers of requests that only a view handles: stored responses, resumed streams, encoded bodies,
#: and CORS.
_EXCLUDED_HEADERS: Final = frozenset(
    {"idempotency-key", "last-event-id", "content-encoding", "origin"}
)
#: Service tiers with the default priority.
DEFAULT_PRIORITY: Final = (None, "auto", "default", "standard_only")


class RequestHead(msgspec.Struct):
    """The fields of a body that decide; others are skipped."""

    model: str | None = None
    stream: bool | None = None
    priority: int | None = None
    service_tier: str | None = None


_decode = msgspec.json.Decoder(RequestHead).decode


async def shed_load(
    scope: Scope, path: str, body: bytes, view: type[Any], request_id: str
) -> EngineOverloaded | Overloaded | None:
    """The error that rejects a POST to this view, logged; None if the view must handle it.

    Worthwhile only while requests are being rejected (`EngineClient.rejected_recently`).

    Args:
        path: below the mount point of the application.
        view: a `GatewayView`. request_id: for the log.
    """
    if not view.supports_load_shedding or len(body) > LARGE_BYTES:
        return None
    arrived = time.perf_counter()
    headers = {name.decode("latin1"): value.decode("latin1") for name, value in scope["headers"]}
    if not _EXCLUDED_HEADERS.isdisjoint(headers):
        return None
    caller = get_cached_caller(headers.get("authorization"), headers.get("x-api-key"))
    if caller is None:
        return None
    await rejection_dispatch.current().wait(caller.tenant)
    try:
        timeout = _check(scope, path, view, headers, caller)
        head = _decode(body)
    except (QuireError, APIException, msgspec.DecodeError):
        return None  # the view renders this error
    if head.priority or head.service_tier not in DEFAULT_PRIORITY:
        return None
    card = get_cached_model(caller, head.model)
    if card is None or not is_model_served(card.id):
        return None
    try:
        timeout_s = timeout.seconds(stream=bool(head.stream))
        get_engine_client().check_queue(card.id, caller.tenant, 0, timeout_s=timeout_s)
    except (EngineOverloaded, Overloaded) as error:
        record = RequestRecord(endpoint_of(path), (head.model or "")[:200], head.stream is True)
        ctx = RequestContext(
            caller=caller, request_id=request_id, received_at=arrived, record=record
        )
        log_rejected_request(ctx, error)
        scope[ARRIVED], scope[ERROR] = arrived, error.code
        scope[TENANT], scope[KEY] = caller.tenant, str(caller.key_id or "")
        bind_request(tenant=caller.tenant, model=record.model)
        return error
    return None


def _check(
    scope: Scope, path: str, view: type[Any], headers: dict[str, str], caller: Caller
) -> ClientTimeout:
    """The client's timeout. Raises where the view would reject the request for another reason."""
    check_accept(headers.get("accept"), view.renderer_classes)
    if headers.get("content-type") != "application/json":
        raise APIException
    caller.check_address((scope.get("client") or [""])[0])
    caller.require(scopes.INFERENCE)
    caller.check_endpoint(path)
    return ClientTimeout.from_headers(
        headers.get("x-request-timeout"), headers.get("x-stainless-read-timeout")
    )


def is_model_served(model: str) -> bool:
    """Whether a ready replica answers for the model; otherwise a fallback may answer."""
    fleet = get_engine_client().fleet
    info = fleet.model(model)
    ready = any(replica.can_answer for replica in fleet.of_model(model))
    return info is not None and GENERATE in info.tasks and ready
