"""An adapter as the ledger and the prices know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterUse:
    """The adapter that a request goes through.

    Attributes:
        name: what it's called, within its base model.
        digest: sha256 of the content that answers.
        prices: names under which it may have a price of its own, the first one that has wins.
    """

    name: str
    digest: str
    prices: tuple[str, ...] = ()
