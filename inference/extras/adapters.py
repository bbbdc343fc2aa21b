"""For operators: `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them.

They act on adapters that all tenants share. A new one is stored, checked and probed by a worker
before the answer says that it's there. Whoever has the answer may ask any gateway at once: it comes
when each of them must have looked.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from pydantic import BaseModel

from adapters.cards import SEEN_WITHIN_S
from adapters.serving import Loaded, begin_load, state_of, unload
from engine.contract.errors import InvalidRequest, QuireError
from inference.extras.operations import OperatorView
from inference.web.known_fields import in_words_of
from inference.web.views import GatewayRequest
from tenants.db_threads import in_db_thread, in_file_thread
from tenants.errors import Conflict, NotFound, ServiceUnavailable

#: A check loads the model; a worker may have others before it.
CHECKED_WITHIN_S = 600.0
LOOK_S = 0.2


class LoadBody(BaseModel):
    """`load_inplace`: serve what the path holds now in the place of what has the name. `model`: the
    base, where several models are served.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str = ""


class UnloadBody(BaseModel):
    """`model`: the base, where adapters of several have the name."""

    lora_name: str
    model: str = ""


class LoadAdapterView(OperatorView):
    """Adds an adapter from a folder of the server's."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"lora_name", "lora_path"}`, perhaps `load_inplace` and `model`: which base."""
        body = self.read_json(request)
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        if not name or not path:
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
        try:
            begun = await in_file_thread(
                begin_load,
                key_id=request.caller.key_id,
                name=name,
                path=path,
                model=_text(body, "model"),
                in_place=_flag(body, "load_inplace"),
            )
        except (InvalidRequest, Conflict) as error:
            raise _in_our_words(error) from None
        await _checked(begun)
        await asyncio.sleep(SEEN_WITHIN_S)
        return _plain(f"Success: LoRA adapter '{name}' added successfully.")


class UnloadAdapterView(OperatorView):
    """Takes an adapter's names away; the console brings it back."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"lora_name"}`, perhaps `model`: which base."""
        body = self.read_json(request)
        name = _text(body, "lora_name")
        if not name:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
        found = await in_db_thread(
            unload, key_id=request.caller.key_id, name=name, model=_text(body, "model")
        )
        if not found:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        await asyncio.sleep(SEEN_WITHIN_S)
        return _plain(f"Success: LoRA adapter '{name}' removed successfully.")


def _in_our_words(error: InvalidRequest | Conflict) -> QuireError:
    """The same with this endpoint's fields; 404 for a folder that isn't there, as vLLM has it."""
    told: QuireError = in_words_of(error, {"path": "lora_path", "name": "lora_name"})
    if told.code == NotFound.code:
        return NotFound(str(told), param=told.param)
    return told


async def _checked(begun: Loaded) -> None:
    """Wait for the check. Raises `InvalidRequest` with its reason, `ServiceUnavailable`."""
    deadline = time.monotonic() + CHECKED_WITHIN_S
    while time.monotonic() < deadline:
        state, problem = await in_db_thread(state_of, begun)
        if state == "live":
            return
        if state not in ("uploaded", "fetching", "validating", "probing", "ready"):
            raise InvalidRequest(problem or f"The adapter is {state}.", param="lora_path")
        await asyncio.sleep(LOOK_S)
    raise ServiceUnavailable(
        "The adapter was not validated in time. Check that a worker is running."
    )


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a text.", param=name)
    return value or ""


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false.", param=name)
    return bool(value)


def _plain(text: str) -> HttpResponse:
    response = HttpResponse(text, content_type="text/plain; charset=utf-8")
    response["Content-Length"] = str(len(response.content))
    return response
