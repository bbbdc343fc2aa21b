"""`Served`: a model as a request meets it: card, adapter, its replicas' facts, its tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, replace
from functools import cached_property

from adapters.cards import Target, access_target
from adapters.resolving import access_or_resolve
from catalog.access import ModelCard, ModelNotFound, access_models
from catalog.idling import wake
from engine.contract.adapters import AdapterRef
from engine.contract.errors import EngineSleeping, EngineUnavailable
from engine.contract.pooling_params import GENERATE, check_task
from engine.contract.protocol import ModelInfo
from engine.text import Tokenizer
from inference.engine_client import get_engine_client
from inference.engine_client.fleet import Replica
from inference.rendering.adapter_tokenizers import own_tokenizers
from inference.rendering.tokenizers import tokenizers
from inference.resuming.read_until import stream_before
from metering.adapters import AdapterUse
from tenants.authentication import Caller

#: How long a request waits for a model that had let go of its replicas: a large one takes minutes.
WAKE_WAIT_S, WAKE_LOOK_S = 300.0, 0.1


@dataclass(frozen=True)
class Served:
    """One model, ready to be asked.

    Attributes:
        card: what the client may know. info: what the replicas say.
        tokenizer: the model's, or the one that the adapter brings.
        adapter: what the request goes through, chosen once: whatever becomes of its name, the
            request ends on the content that it began with. use: the same for the ledger.
        in_place_of: the model that was asked for, while it's down; "" when it answers itself.
        own_eos: what ends an output beside the model's EOS, where the adapter's tokenizer has
            another.
    """

    card: ModelCard
    info: ModelInfo
    tokenizer: Tokenizer
    adapter: AdapterRef | None = None
    use: AdapterUse | None = None
    in_place_of: str = ""
    own_eos: int | None = None

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.card.id

    @property
    def base(self) -> str:
        """The model's name, of which an adapter is a variant."""
        return self.card.parent or self.card.id

    @property
    def vocab_size(self) -> int:
        """Tokens that a request may hold."""
        return (self.adapter.vocab_size if self.adapter else 0) or self.info.vocab_size

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes when what computes the answer does."""
        info = self.info
        facts = f"{info.path}\0{info.dtype}\0{info.quantization}\0{info.max_model_len}"
        if self.adapter is not None:
            facts += f"\0{self.adapter.digest}"
        return "fp_" + hashlib.blake2b(facts.encode(), digest_size=5).hexdigest()

    def through(self, adapter: AdapterRef | None) -> Served:
        """The same by other content: what a stream began with, wherever its name leads now.

        Raises `ValueError` where one is an adapter and the other none, or for another tokenizer
        than that by which the prompt was made.
        """
        if not self.is_alike(adapter):
            raise ValueError(f"{self.name} isn't what it was")
        if adapter is None or self.use is None:
            return self
        return replace(self, adapter=adapter, use=replace(self.use, digest=adapter.digest))

    def is_alike(self, adapter: AdapterRef | None) -> bool:
        """Whether what was made of a prompt here holds for the other content too."""
        if adapter is None or self.adapter is None:
            return adapter is None and self.adapter is None
        mine = self.adapter
        return (mine.tokenizer, mine.vocab_size) == (adapter.tokenizer, adapter.vocab_size)

    def check_queue(
        self, caller: Caller, priority: int | None, *, stream: bool | None = False
    ) -> None:
        """Raise `EngineOverloaded` (429) or `Overloaded` (503) when too much waits for the model.

        Asked before a prompt is rendered: a refusal costs next to nothing.
        """
        get_engine_client().check_queue(
            self.base, caller.tenant, priority or 0, stream=bool(stream)
        )


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


async def find_served(
    caller: Caller, name: str | None, *, task: str | None = GENERATE, sticky: str = ""
) -> Served:
    """The model or adapter under this name, for this caller, and for this task if one is named.

    Without a name it's the only one that the caller may use. `sticky`: whom or what the request is
    of; the same always meets the same version while a canary gets a share.

    Raises:
        InvalidRequest: the model doesn't do that; or it has no name and there are several.
        ModelNotFound: it isn't there, or isn't theirs (404, both look the same).
        AdapterInvalid: a resolver found it, but it can't be served (400).
        EngineSleeping: its replicas sleep (503). EngineUnavailable: there are none (503).
    """
    target = await access_or_resolve(caller, name)
    client = get_engine_client()
    await client.start()
    instead = ""
    if not _is_up(target) and target.base.wakes:
        await _wake(target.base.id)
    if task is not None and not _is_up(target):
        target, instead = await _instead_of(caller, target)
    base = target.base.id
    info = client.fleet.model(base)
    if info is None:
        raise EngineUnavailable(client.fleet.why_unavailable(base))
    _refuse_if_asleep(client.fleet.of_model(base), base)
    if task is not None:
        check_task(target.card.id, info.tasks, task)
    tokenizer = await tokenizers.get(info.path, info.chat_template)
    if target.adapter is None:
        return Served(target.card, info, tokenizer, in_place_of=instead)
    chosen = await _begun_with(caller, target.adapter.choose(_whose(caller, sticky)))
    own = await own_tokenizers.of(chosen, tokenizer)
    eos = own.eos_token_id
    return Served(
        target.card,
        info,
        own,
        chosen,
        target.adapter.use_of(chosen),
        own_eos=None if eos == tokenizer.eos_token_id else eos,
    )


async def _begun_with(caller: Caller, chosen: AdapterRef) -> AdapterRef:
    """The content that a stream began with which is to go on, where it's of this name: its prompt
    must be made by the same tokenizer. Raises as `stream_before`.
    """
    about = await stream_before(caller)
    begun = about.adapter if about is not None else None
    if begun is None or (begun.name, begun.owner) != (chosen.name, chosen.owner):
        return chosen
    return begun


def _is_up(target: Target) -> bool:
    """Whether a replica of its model takes requests."""
    return any(each.ready for each in get_engine_client().fleet.of_model(target.base.id))


async def _wake(name: str) -> None:
    """Have a model back that let go of its replicas, and wait for the first of them.

    Raises `EngineUnavailable` when none comes in time; of one that has failed its caller tells.
    """
    fleet, began = get_engine_client().fleet, time.monotonic()
    if not await wake(name):
        return
    while time.monotonic() - began < WAKE_WAIT_S:
        states = [each.heartbeat.state for each in fleet.of_model(name)]
        if any(each.ready for each in fleet.of_model(name)) or "failed" in states:
            return
        await asyncio.sleep(WAKE_LOOK_S)
    raise EngineUnavailable(f"The model '{name}' was unloaded and isn't back yet. Try again soon.")


async def _instead_of(caller: Caller, target: Target) -> tuple[Target, str]:
    """The first of a model's fallbacks that the caller may use and that answers, and the model's
    name; the target itself and "" where there's none. Adapters have no substitute.
    """
    if target.adapter is None:
        for name in target.base.fallbacks:
            try:
                other = await access_target(caller, name)
            except ModelNotFound:
                continue
            if _is_up(other):
                return other, target.base.id
    return target, ""


def _whose(caller: Caller, sticky: str) -> str:
    """Of whom a request is, as far as that is known; a key's many users aren't one."""
    if sticky:
        return f"{caller.tenant_id}\0{sticky}"
    return f"user {caller.user_id}" if caller.user_id is not None else ""


def _refuse_if_asleep(replicas: list[Replica], name: str) -> None:
    """Nobody waits for a model that an operator sent to sleep."""
    if replicas and all(replica.heartbeat.state == "sleeping" for replica in replicas):
        raise EngineSleeping(f"The model '{name}' sleeps until an operator wakes it up.")
