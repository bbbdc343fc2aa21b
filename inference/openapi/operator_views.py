"""What the document says of pausing, profiling and looking into replicas."""

from __future__ import annotations

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter

from engine.contract.messages import PAUSE_MODES
from inference.api import operator as operations
from inference.api import operator as pause
from inference.api import operator as rpc
from inference.api import vllm_compat as adapters
from inference.openapi.document import READ, WRITE, operation
from inference.schemas import objects as service_answers

FOUND = (*READ, 404)
MODEL = OpenApiParameter("model", str, description="Limit to this model's replicas.")


def told(request: Any = None, *parameters: OpenApiParameter) -> Any:
    """A command to replicas."""
    return operation(
        "Operator",
        service_answers.CommandResult,
        request=request,
        statuses=WRITE,
        extra={(503, "application/json"): service_answers.CommandResult},
        parameters=(*parameters, MODEL),
    )


def plain(request: Any) -> Any:
    """What answers with a sentence."""
    text = {(200, "text/plain"): OpenApiTypes.STR}
    return operation("Operator", OpenApiTypes.STR, request=request, statuses=WRITE, extra=text)


VIEWS: dict[Any, dict[str, Any]] = {
    adapters.LoadAdapterView: {"post": plain(adapters.LoadBody)},
    adapters.UnloadAdapterView: {"post": plain(adapters.UnloadBody)},
    operations.ResetOtherCacheView: {
        "post": operation("Operator", service_answers.CommandResult, statuses=WRITE),
    },
    pause.PauseView: {
        "post": told(None, OpenApiParameter("mode", str, enum=list(PAUSE_MODES), default="abort")),
    },
    pause.ResumeView: {"post": told()},
    pause.IsPausedView: {
        "get": operation("Operator", service_answers.IsPaused, statuses=FOUND, parameters=(MODEL,)),
    },
    pause.AbortRequestsView: {"post": told(pause.AbortBody)},
    rpc.StartProfileView: {"post": told()},
    rpc.StopProfileView: {"post": told()},
    rpc.CollectiveRpcView: {"post": told(rpc.RpcBody)},
    rpc.TokenizerInfoView: {
        "get": operation("Operator", OpenApiTypes.OBJECT, statuses=FOUND, parameters=(MODEL,)),
    },
}
