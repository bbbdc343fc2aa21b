"""`ResolvedModel`: a model as a request meets it: card, adapter, its replicas' facts, its
tokenizer."""

from __future__ import annotations

import asyncio
import time

from adapters.cards import ModelTarget, access_target
from adapters.resolution import get_or_resolve_target
from catalog.access import ModelNotFound, access_models
from catalog.idle import wake_model_for_request
from engine.contract.errors import EngineSleeping, EngineUnavailable
from engine.contract.lora import AdapterRef
from engine.contract.pooling_params import GENERATE, check_task
from inference.engine_client.client import get_engine_client
from inference.engine_client.fleet import Replica
from inference.generation.takeover import find_resumed_stream
from inference.rendering.tokenizers import adapter_tokenizers, tokenizers
from inference.request.context import RequestContext
from inference.request.job import ResolvedModel
from tenants.authentication import Caller

#: How long a request waits for a model that had let go of its replicas: a large one takes minutes.
WAKE_WAIT_S, WAKE_LOOK_S = 300.0, 0.1


async def check_any_queue(caller: Caller) -> None:
    """Raise what `check_queue` does where it does for each model that there is, asked as urgently
    as the caller may: whichever a request names, it would be refused.
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
    """The model or adapter under this name, for the caller, and for this task if one is named.

    Without a name it's the only one that the caller may use. `sticky`: whom or what the request is
    of; the same always meets the same version while a canary gets a share.

    Raises:
        InvalidRequest: the model doesn't do that; or it has no name and there are several.
        ModelNotFound: it isn't there, or isn't theirs (404, both look the same).
        AdapterInvalid: a resolver found it, but it can't be served (400).
        EngineSleeping: its replicas sleep (503). EngineUnavailable: there are none (503).
    """
    caller = ctx.caller
    target = await get_or_resolve_target(caller, name)
    client = get_engine_client()
    await client.start()
    instead = ""
    if not _is_available(target) and target.base.wakes:
        await _wake_idle_model(target.base.id)
    if task is not None and not _is_available(target):
        target, instead = await _pick_fallback(caller, target)
    base = target.base.id
    info = client.fleet.model(base)
    if info is None:
        raise EngineUnavailable(client.fleet.unavailable_reason(base))
    _refuse_if_asleep(client.fleet.of_model(base), base)
    if task is not None:
        check_task(target.card.id, info.tasks, task)
    tokenizer = await tokenizers.get(caller.tenant, info.path, info.chat_template)
    if target.adapter is None:
        return ResolvedModel(target.card, info, tokenizer, fallback_for=instead)
    chosen = await _pin_to_stream(ctx, target.adapter.choose_version(_sticky_key(caller, sticky)))
    own = await adapter_tokenizers.get(caller.tenant, chosen, tokenizer)
    eos = own.eos_token_id
    return ResolvedModel(
        target.card,
        info,
        own,
        chosen,
        target.adapter.billing_for(chosen),
        adapter_eos_id=None if eos == tokenizer.eos_token_id else eos,
    )


async def _pin_to_stream(ctx: RequestContext, chosen: AdapterRef) -> AdapterRef:
    """The content that a stream began with which is to go on, where it's of this name: its prompt
    must be made by the same tokenizer. Raises as `find_resumed_stream`.
    """
    about = await find_resumed_stream(ctx)
    begun = about.adapter if about is not None else None
    if begun is None or (begun.name, begun.owner) != (chosen.name, chosen.owner):
        return chosen
    return begun


def _is_available(target: ModelTarget) -> bool:
    """Whether a replica of its model takes requests."""
    return any(each.ready for each in get_engine_client().fleet.of_model(target.base.id))


async def _wake_idle_model(name: str) -> None:
    """Have a model back that let go of its replicas, and wait for the first of them.

    Raises `EngineUnavailable` when none comes in time; of one that has failed its caller tells.
    """
    fleet, began = get_engine_client().fleet, time.monotonic()
    if not await wake_model_for_request(name):
        return
    while time.monotonic() - began < WAKE_WAIT_S:
        states = [each.heartbeat.state for each in fleet.of_model(name)]
        if any(each.ready for each in fleet.of_model(name)) or "failed" in states:
            return
        await asyncio.sleep(WAKE_LOOK_S)
    raise EngineUnavailable(f"The model '{name}' was unloaded and isn't back yet. Try again soon.")


async def _pick_fallback(caller: Caller, target: ModelTarget) -> tuple[ModelTarget, str]:
    """The first of a model's fallbacks that the caller may use and that answers, and the model's
    name; the target itself and "" where there's none. Adapters have no substitute.
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
    """Of whom a request is, as far as that is known; a key's many users aren't one."""
    if sticky:
        return f"{caller.tenant_id}\0{sticky}"
    return f"user {caller.user_id}" if caller.user_id is not None else ""


def _refuse_if_asleep(replicas: list[Replica], name: str) -> None:
    """Nobody waits for a model that an operator sent to sleep."""
    if replicas and all(replica.heartbeat.state == "sleeping" for replica in replicas):
        raise EngineSleeping(f"The model '{name}' sleeps until an operator wakes it up.")
