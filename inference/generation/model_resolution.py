"""Resolving the model of a request: its name, adapter, replicas and tokenizer."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import Gauge

from adapters.cards import ModelTarget, access_target
from adapters.resolution import get_or_resolve_target
from catalog.access import ModelNotFound, access_models
from catalog.idle import wake_model_for_request
from engine.contract.errors import EngineSleeping, EngineUnavailable
from engine.contract.lora import AdapterRef
from engine.contract.pooling_params import GENERATE
from engine.contract.validation import check_task
from inference.engine_client.client import get_engine_client
from inference.engine_client.fleet import Replica
from inference.generation.takeover import find_resumed_stream
from inference.rendering.tokenizers import adapter_tokenizers, tokenizers
from inference.request.context import RequestContext
from inference.request.job import ResolvedModel
from tenants.authentication import Caller

WAITING_FOR_REPLICA = Gauge(
    "quire:requests_waiting_for_replica",
    "Requests that wait for the first replica of their model.",
    ["model_name"],
)

#: Maximum seconds that a request waits for an idle-unloaded model; large ones load for minutes.
WAKE_TIMEOUT_S, WAKE_POLL_INTERVAL_S = 300.0, 0.1


def check_queue(
    ctx: RequestContext, model: ResolvedModel, priority: int | None, *, stream: bool | None = False
) -> None:
    """Raise `EngineOverloaded` (429) or `Overloaded` (503) if too many requests wait for the model.

    Called before a prompt is rendered, so that a rejection is cheap.
    """
    timeout_s = ctx.client_timeout.seconds(stream=bool(stream))
    get_engine_client().check_queue(
        model.base, ctx.caller.tenant, priority or 0, timeout_s=timeout_s
    )


async def check_any_queue(caller: Caller) -> None:
    """Raise what `check_queue` raises if every model's queue is full at the caller's highest
    priority, so that the request would be rejected whatever model it names.
    """
    client = get_engine_client()
    names = {card.alias_of or card.id for card in await access_models(caller)}
    for name in client.fleet.model_names():
        info = client.fleet.model(name)
        if info is None or GENERATE in info.tasks:
            names.add(name)
    client.check_any_queue(names, caller.tenant, -1 if caller.max_priority else 0)


async def resolve_model(
    ctx: RequestContext, name: str | None, *, task: str | None = GENERATE, sticky: str = ""
) -> ResolvedModel:
    """Return the model or adapter of this name for the caller.

    Args:
        name: None as for `catalog.access.access_model`.
        task: task that it must support; None for any task.
        sticky: key of the request's user or conversation, which gets the same version throughout
            while a canary has a share of the traffic.

    Raises:
        InvalidRequest: the model doesn't support the task, or the name is missing.
        ModelNotFound: it doesn't exist or isn't the caller's (404, both look the same).
        AdapterInvalid: a resolver returned an adapter that can't be served (400).
        EngineSleeping: its replicas sleep (503). EngineUnavailable: it has none (503).
    """
    caller = ctx.caller
    target = await get_or_resolve_target(caller, name)
    client = get_engine_client()
    await client.start()
    fallback_for = ""
    if not _is_available(target) and target.base.wakes:
        await _wake_idle_model(target.base.id)
    if task is not None and not _is_available(target):
        target, fallback_for = await _pick_fallback(caller, target)
    base = target.base.id
    info = client.fleet.model(base)
    if info is None:
        raise EngineUnavailable(client.fleet.unavailable_reason(base))
    if _is_asleep(client.fleet.of_model(base)):
        await client.watchman.tick()  # it may have been woken since the last heartbeats were read
        if _is_asleep(client.fleet.of_model(base)):
            raise EngineSleeping(f"The model '{base}' sleeps until an operator wakes it up.")
    if task is not None:
        check_task(target.card.id, info.tasks, task)
    tokenizer = await tokenizers.get(caller.tenant, info.path, info.chat_template)
    if target.adapter is None:
        return ResolvedModel(target.card, info, tokenizer, fallback_for=fallback_for)
    chosen = await _pin_to_stream(ctx, target.adapter.choose_version(_sticky_key(caller, sticky)))
    adapter_tokenizer = await adapter_tokenizers.get(caller.tenant, chosen, tokenizer)
    eos = adapter_tokenizer.eos_token_id
    return ResolvedModel(
        target.card,
        info,
        adapter_tokenizer,
        chosen,
        target.adapter.billing_for(chosen),
        adapter_eos_id=None if eos == tokenizer.eos_token_id else eos,
    )


async def _pin_to_stream(ctx: RequestContext, chosen: AdapterRef) -> AdapterRef:
    """Return the version of the adapter that a resumed stream began with, or the current one: the
    prompt must be encoded with the same tokenizer. Raises what `find_resumed_stream` raises.
    """
    stream = await find_resumed_stream(ctx)
    pinned = stream.adapter if stream is not None else None
    if pinned is None or (pinned.name, pinned.owner) != (chosen.name, chosen.owner):
        return chosen
    return pinned


def _is_available(target: ModelTarget) -> bool:
    """Whether a replica of its model can answer."""
    return any(replica.can_answer for replica in get_engine_client().fleet.of_model(target.base.id))


async def _wake_idle_model(name: str) -> None:
    """Load a model that was unloaded when idle, and wait for its first replica to start or fail.

    `WAITING_FOR_REPLICA` tells an autoscaler to start one. Raises `EngineUnavailable` on a timeout.
    """
    client, started_at = get_engine_client(), time.monotonic()
    if not await wake_model_for_request(name):
        return
    with WAITING_FOR_REPLICA.labels(model_name=name).track_inprogress():
        client.flusher.publish_soon()
        while time.monotonic() - started_at < WAKE_TIMEOUT_S:
            replicas = client.fleet.of_model(name)
            if any(
                replica.can_answer or replica.heartbeat.state == "failed" for replica in replicas
            ):
                return
            await asyncio.sleep(WAKE_POLL_INTERVAL_S)
    raise EngineUnavailable(f"The model '{name}' was unloaded and isn't back yet. Try again soon.")


async def _pick_fallback(caller: Caller, target: ModelTarget) -> tuple[ModelTarget, str]:
    """Return the first available fallback that the caller may use, and the requested model's name;
    without one, the target itself and "". Adapters have no fallbacks.
    """
    if target.adapter is None:
        for name in target.base.fallbacks:
            try:
                other = await access_target(caller, name)
            except ModelNotFound:
                continue
            if _is_available(other):
                return other, target.base.id
    return target, ""


def _sticky_key(caller: Caller, sticky: str) -> str:
    """Identify the request's user as precisely as possible; a key may have many users."""
    if sticky:
        return f"{caller.tenant_id}\0{sticky}"
    return f"user {caller.user_id}" if caller.user_id is not None else ""


def _is_asleep(replicas: list[Replica]) -> bool:
    """Whether an operator put all replicas of a model to sleep."""
    return bool(replicas) and all(replica.heartbeat.state == "sleeping" for replica in replicas)
