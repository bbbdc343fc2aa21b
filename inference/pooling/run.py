"""Runs a request's prompts and answers it: what the pooling endpoints share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from django.http.response import HttpResponse, HttpResponseBase

from engine.contract.errors import InvalidRequest
from engine.contract.pooling_params import check_task
from engine.contract.sampling_params import SamplingParams
from engine.contract.similarity import Vectors, from_bytes
from inference.generation import Served, find_served
from inference.generation.field_names import renamed
from inference.openai.serving import add_headers
from inference.pooling.inputs import Entry
from inference.pooling.job import Pooled, PoolingJob
from inference.pooling.schemas import PoolingBody
from inference.rendering.pool import render_pool
from inference.web.request_ids import new_id
from inference.web.views import GatewayRequest, json_response

Make = Callable[[list[Vectors]], dict[str, Any]]
Pack = Callable[[list[Vectors], dict[str, Any]], HttpResponse]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Call:
    """One request on its way.

    Attributes:
        endpoint: for the ledger, and the beginning of the answer's id.
        param: the client's field that holds the prompts.
    """

    request: GatewayRequest
    body: PoolingBody
    served: Served
    endpoint: str
    param: str

    async def entries(self, made: Awaitable[list[Entry]]) -> list[Entry]:
        """What `made` gives; its errors about prompts name the client's own field."""
        try:
            return await made
        except InvalidRequest as error:
            raise renamed(error, {"prompt": self.param}) from None

    async def answer(
        self, entries: list[Entry], make: Make, pack: Pack | None = None
    ) -> HttpResponseBase:
        """Run the entries and answer with `make(results)`, beside id, model and usage; or with
        `pack(results, these)` as it is.

        A result is float32 [size], or [num_tokens, size] for tasks by token.

        Raises: what the limits, the gateway or the engine refuse or fail with.
        """
        job = PoolingJob(
            request_id=new_id(self.endpoint),
            endpoint=self.endpoint,
            caller=self.request.caller,
            served=self.served,
            prompts=[entry.token_ids for entry in entries],
            sampling=SamplingParams(),
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt or "",
            field_names={"prompt": self.param},
            received=self.request.received,
            pooling=[entry.params for entry in entries],
        )
        try:
            await job.check()
        except InvalidRequest as error:
            raise renamed(error, job.field_names) from None
        ignored = self.body.ignored_fields()
        run = await Pooled.start(job)
        raw = await run.collect()
        rows = [len(e.token_ids) if e.params.by_token else None for e in entries]
        results = list(map(from_bytes, raw, rows))

        def response_of() -> HttpResponse:
            common = {
                "id": job.request_id,
                "created": int(job.started_at),
                "model": self.served.name,
                "usage": run.usage.as_openai(),
            }
            if pack is not None:
                return pack(results, common)
            return json_response(encoded_by_entry(common | make(results)))

        # Floats as decimals are long: of many vectors they'd keep the event loop.
        response = await render_pool().run(sum(map(len, raw)), response_of)
        add_headers(response, run, ignored)
        return response


def encoded_by_entry(body: dict[str, Any]) -> bytes:
    """The body as JSON, the entries of its lists one by one.

    The encoder keeps all of Python for itself while it writes: 48 MiB of vectors at once would be
    seconds in which nobody's stream gets a token.
    """
    fields = (_encode(name) + b":" + _entries(value) for name, value in body.items())
    return b"{" + b",".join(fields) + b"}"


def _entries(value: Any) -> bytes:
    return b"[" + b",".join(map(_encode, value)) + b"]" if type(value) is list else _encode(value)


async def begin(
    request: GatewayRequest, body: PoolingBody, endpoint: str, param: str, task: str
) -> Call:
    """The call, for a model that does `task` ("" for any that pools).

    Raises: `InvalidRequest` naming what the model does instead; `ModelNotFound`; `EngineOverloaded`
    (429) or `Overloaded` (503) when too much waits for the model.
    """
    served = await find_served(request.caller, body.model, task=None)
    if task or served.info.pooling is None:
        check_task(served.name, served.info.tasks, task or endpoint)
    served.check_queue(request.caller, body.priority)
    return Call(request, body, served, endpoint, param)
