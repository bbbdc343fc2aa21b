"""For operators: `/start_profile`, `/stop_profile`, `/collective_rpc`, `/tokenizer_info`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from django.http.response import HttpResponseBase
from pydantic import BaseModel, ConfigDict, Field

from inference.engine_client import get_engine_client
from inference.extras.operations import ANSWER_WITHIN_S, OperatorView, replicas_of, tell
from inference.generation import find_served
from inference.web.views import GatewayRequest, json_response

_encode = msgspec.json.Encoder().encode
#: A trace of many steps is written to the disk.
PROFILE_WITHIN_S = 300.0
#: Paths on the machine that made the files; no client needs them.
PATHS = ("vocab_file", "merges_file", "name_or_path")


class StartProfileView(OperatorView):
    """Begins a profile of what replicas compute."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`?model=` for one model's replicas alone."""
        replicas = await replicas_of(request)
        return await tell(get_engine_client(), replicas, "start_profile", PROFILE_WITHIN_S)


class StopProfileView(OperatorView):
    """Ends it."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Each replica's `detail` is the file with its trace, on its own machine."""
        replicas = await replicas_of(request)
        return await tell(get_engine_client(), replicas, "stop_profile", PROFILE_WITHIN_S)


class RpcBody(BaseModel):
    """Method to run on every replica; takes no arguments."""

    model_config = ConfigDict(strict=True, extra="forbid")

    method: Literal["check_integrity", "reset_prefix_cache", "start_profile", "stop_profile"]
    args: Annotated[list[Any], Field(max_length=0)] | None = None
    kwargs: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    timeout: Annotated[float, Field(gt=0, le=600)] | None = None


class CollectiveRpcView(OperatorView):
    """Has all replicas run a method."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """What each replica said."""
        body = RpcBody.model_validate(self.read_json(request))
        replicas = await replicas_of(request)
        usual = PROFILE_WITHIN_S if body.method.endswith("_profile") else ANSWER_WITHIN_S
        limit_s = body.timeout or usual
        return await tell(get_engine_client(), replicas, body.method, limit_s)


class TokenizerInfoView(OperatorView):
    """What a model's tokenizer files say."""

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """`tokenizer_config.json` with the chat template in use, of `?model=`."""
        served = await find_served(request.caller, request.GET.get("model"), task=None)
        settings = served.tokenizer.settings
        info = {name: value for name, value in settings.config.items() if name not in PATHS}
        info |= settings.named_tokens
        info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        info["chat_template"] = served.tokenizer.chat_template
        return json_response(_encode(info))
