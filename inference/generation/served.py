"""`Served`: a model as a request meets it: its card, its replicas' facts, its tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from catalog.access import ModelCard, access_model
from engine.contract.errors import EngineSleeping, EngineUnavailable
from engine.contract.pooling_params import GENERATE, check_task
from engine.contract.protocol import ModelInfo
from engine.text import Tokenizer
from inference.engine_client import get_engine_client
from inference.engine_client.fleet import Replica
from inference.rendering.tokenizers import tokenizers
from tenants.authentication import Caller


@dataclass(frozen=True)
class Served:
    """One model, ready to be asked.

    Attributes:
        card: what the client may know. info: what the replicas say. tokenizer: the model's own.
    """

    card: ModelCard
    info: ModelInfo
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.card.id

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes when what computes the answer does."""
        info = self.info
        facts = f"{info.path}\0{info.dtype}\0{info.quantization}\0{info.max_model_len}"
        return "fp_" + hashlib.blake2b(facts.encode(), digest_size=5).hexdigest()


async def find_served(caller: Caller, name: str | None, *, task: str | None = GENERATE) -> Served:
    """The model under this name, for this caller, and for this task if one is named.

    Without a name it's the only one that the caller may use.

    Raises:
        InvalidRequest: the model doesn't do that; or it has no name and there are several.
        ModelNotFound: it isn't there, or isn't theirs (404, both look the same).
        EngineSleeping: its replicas sleep (503). EngineUnavailable: there are none (503).
    """
    card = await access_model(caller, name)
    client = get_engine_client()
    await client.start()
    info = client.fleet.model(card.id)
    if info is None:
        raise EngineUnavailable(client.fleet.why_unavailable(card.id))
    _refuse_if_asleep(client.fleet.of_model(card.id), card.id)
    if task is not None:
        check_task(card.id, info.tasks, task)
    return Served(card, info, await tokenizers.get(info.path, info.chat_template))


def _refuse_if_asleep(replicas: list[Replica], name: str) -> None:
    """Nobody waits for a model that an operator sent to sleep."""
    if replicas and all(replica.heartbeat.state == "sleeping" for replica in replicas):
        raise EngineSleeping(f"The model '{name}' sleeps until an operator wakes it up.")
