"""A check on the running system that tenants don't share cached prompts.

One tenant sends a new random text twice, then another tenant sends it twice. The requests are
ordinary ones: they go through limits, ledger and engine. The first tenant's second request must hit
the cache; the other tenant's first request must not.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from common.errors import PermissionDenied
from engine.contract.errors import InvalidRequest
from engine.contract.messages import FlightRecord, Heartbeat
from engine.contract.pooling_params import GENERATE
from inference.chat.turn import ChatSession
from inference.request.context import RequestContext
from inference.schemas.chat import ChatRequest
from inference.serving.respond import collect, parse
from tenants.access import access_tenant
from tenants.actors import Actor, require_role, to_actor
from tenants.authentication import Caller, caller_for_user
from tenants.models import Role, Tenant, User

ENDPOINT = "isolation"
#: Length of the text: enough for several blocks, short enough for a small model.
WORDS = 120
#: With several replicas the requests may reach different ones, which proves nothing: try again.
ATTEMPTS = 4
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
#: Display name of the second tenant if the user has only one.
UNUSED_NAMESPACE = "an unused namespace"


@dataclass(frozen=True, slots=True)
class Step:
    """A request of the check."""

    who: str
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    prefill_ms: float
    cold_reason: str
    replica: str

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def can_run_isolation_check(user: User | Actor, tenant: Tenant | None) -> bool:
    """Return whether the user is an operator, or an admin or owner of the tenant."""
    actor = to_actor(user)
    if actor.is_operator:
        return True
    role = actor.role_in(tenant) if tenant is not None else None
    return role is not None and role.rank >= Role.ADMIN.rank


def generates(beat: Heartbeat) -> bool:
    """Return whether the replica's model generates text."""
    return GENERATE in beat.model.tasks


def check_prover(user: User | Actor, *slugs: str) -> None:
    """Raise `NotFound` for a tenant that the user has no access to, and `PermissionDenied` unless
    they are an admin of each.
    """
    for slug in slugs:
        tenant = access_tenant(user, slug)
        require_role(user, tenant, Role.ADMIN)
        if not tenant.active:
            raise PermissionDenied(f"The tenant {slug} is disabled.", code="tenant_inactive")


async def run_isolation_check(user: User, *, tenant: str, other: str, model: str) -> dict[str, Any]:
    """Run the check and return its steps and verdict. Call `check_prover` first.

    Args:
        tenant: sends the text first. other: sends it afterwards; "" for an unused cache namespace,
            whose requests are sent and billed as those of `tenant`.

    Raises: the errors of ordinary requests.
    """
    first = await caller_for_user(user, tenant)
    if other and other != tenant:
        second, name = await caller_for_user(user, other), other
    elif other:
        raise InvalidRequest("The other tenant must differ from the first.", param="other")
    else:
        second, name = replace(first, cache_namespace=secrets.token_hex(16)), UNUSED_NAMESPACE
    steps: list[Step] = []
    for _ in range(ATTEMPTS):
        text = _random_text()
        steps = [
            await _ask(caller, who, model, text)
            for caller, who in ((first, tenant), (first, tenant), (second, name), (second, name))
        ]
        if len({step.replica for step in steps[:3]}) == 1:
            break
    return {"model": model, "steps": [step.to_json() for step in steps], **_verdict(steps)}


def _verdict(steps: list[Step]) -> dict[str, Any]:
    """Return the verdict on the four requests."""
    _, again, other_tenant, other_tenant_again = steps
    if len({step.replica for step in steps[:3]}) > 1:
        text = "The requests reached different replicas, which share no cache. Try again."
        return {"verdict": "unclear", "conclusion": text}
    if other_tenant.cached_tokens:
        text = (
            f"{other_tenant.who} found {other_tenant.cached_tokens} tokens that {again.who} had "
            "sent."
        )
        return {"verdict": "broken", "conclusion": text}
    if not again.cached_tokens:
        text = "Nothing was found in the cache: prefix caching is off, or the cache is too full."
        return {"verdict": "unclear", "conclusion": text}
    same = "; its own second request did" if other_tenant_again.cached_tokens else ""
    text = (
        f"{again.who} found {again.cached_tokens} of {again.prompt_tokens} tokens of its text "
        f"cached. {_capitalize(other_tenant.who)} sent the very same text to the same replica and "
        f"found none{same}."
    )
    return {"verdict": "isolated", "conclusion": _capitalize(text)}


def _capitalize(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[0].upper() + text[1:]


def _random_text() -> str:
    """Return random words, which can't be in any cache."""
    return " ".join("".join(secrets.choice(_ALPHABET) for _ in range(4)) for _ in range(WORDS))


async def _ask(caller: Caller, who: str, model: str, text: str) -> Step:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": 1,
        "temperature": 0,
    }
    chat = parse(ChatRequest, body)
    turn = await ChatSession.start(chat, RequestContext(caller=caller), endpoint=ENDPOINT)
    try:
        await collect(turn, lambda _: None)
    finally:
        turn.release()
    generation = turn.generation
    flight = generation.flights[0]
    record = flight.records.get(0, FlightRecord())
    return Step(
        who=who,
        request_id=generation.job.request_id,
        prompt_tokens=generation.usage.prompt_tokens,
        cached_tokens=generation.usage.cached_tokens,
        ttft_ms=round(generation.ttft_ms or 0.0, 2),
        prefill_ms=round(record.prefill_time * 1000, 2),
        cold_reason=record.cold_reason,
        replica=generation.replica_id,
    )
