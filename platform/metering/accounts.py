"""What a request is billed with beside what the engine wrote for it: for `reconcile_usage`.

Replicas count what they write of each open request, in the script that writes it. Whoever settles a
request closes that count in the script that settles, and adds it to sums by day, tenant and model:
what the engine wrote, and how much of that isn't billed by rule. So a process that is killed leaves
both or neither, and the ledger must hold the difference of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from typing import cast

import msgspec

from engine.contract import protocol
from metering.records import UsageRecord
from metering.redis_clients import key

#: What is summed, of prompts and of outputs.
SUMS = ("prompt", "unbilled_prompt", "output", "unbilled_output")


def sums_key() -> str:
    """Redis's hash of sums: `name_of` -> tokens."""
    return key("accounts")


def since_key() -> str:
    """When the sums begin: requests that came before aren't in them."""
    return key("accounts:since")


def name_of(day: str, tenant_id: int, model: str, what: str) -> str:
    """A field of `sums_key`."""
    return f"{day} {tenant_id} {what} {model}"


def parts_of(name: str) -> tuple[str, int, str, str]:
    """(day, tenant, what, model) of a field of `sums_key`."""
    day, tenant_id, what, model = name.split(" ", 3)
    return day, int(tenant_id), what, model


@dataclass(frozen=True)
class Account:
    """Which of the engine's requests a record is about.

    Attributes:
        names: the engine's ids. outputs: of each.
        whole: every output came to an end of the engine's own, so all of it is billed. Otherwise
            less may be: a stop string was found, the client left, nobody went on with it.
        billed_prompt, billed_output: what was settled of them before, under another id.
    """

    names: Sequence[str]
    outputs: int = 1
    whole: bool = False
    billed_prompt: int = 0
    billed_output: int = 0

    def encode(self, record: UsageRecord) -> bytes:
        """JSON, as `settle.lua` reads it."""
        started_at = cast(datetime, record.started_at).astimezone(UTC)
        day = f"{started_at:%Y-%m-%d}"
        fields = [protocol.output_field(n, i) for n, i in product(self.names, range(self.outputs))]
        return msgspec.json.encode(
            {
                "prompts": [protocol.prompt_field(name) for name in self.names],
                "outputs": fields,
                "whole": self.whole,
                "prompt": record.prompt_tokens,
                "output": record.completion_tokens,
                "before": [self.billed_prompt, self.billed_output],
                "started": started_at.timestamp(),
                "sums": [name_of(day, record.tenant_id, record.model, what) for what in SUMS],
            }
        )
