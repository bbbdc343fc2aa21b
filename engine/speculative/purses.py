"""`Purses`: what a tenant's drafts may cost it, whatever is expected of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.speculative.chances import MOST_TENANTS

#: Of each token so much may be spent on finding out whether drafts hold, and as much on looking for
#: them.
_SHARE = 0.003
#: Tokens a row that may be owed for drafts, that there are for looks at first, and that are kept
#: from better times.
_CREDIT, _LOOKS, _MOST = 0.2, 0.1, 4.0
#: Tokens a row that are owed at most: debts of many rows aren't one row's.
_DEEPEST = 1.0


@dataclass(slots=True)
class _Purse:
    """Attributes:
    balance: tokens that drafts brought and that were allowed, less those that they cost.
    looks: tokens that looks may cost beside that.
    rows: of the tenant, in this step.
    step: the step that it was filled for last.
    """

    balance: float
    looks: float
    rows: int
    step: int


class Purses:
    """Tokens that drafts brought each tenant, less those that would have come in the time that
    drafts took.

    What is expected of drafts may be wrong for as long as texts are made to deceive it. A purse
    bounds that: drafts cost a tenant what they brought it lately, twice `_SHARE` of its tokens, and
    a little credit that lets it begin. Nobody pays for another, nor from another's purse: so what
    drafts one has says nothing of another's texts.
    """

    def __init__(self) -> None:
        #: The tenant that had rows last is the last.
        self._purses: OrderedDict[str, _Purse] = OrderedDict()

    def fill(self, step: int, rows: dict[str, int]) -> None:
        """So many rows of each tenant are in this step, and were in those since it was filled."""
        for tenant, count in rows.items():
            purse = self._purses.get(tenant)
            if purse is None:
                self._purses[tenant] = _Purse(0.0, _LOOKS * count, count, step)
                if len(self._purses) > MOST_TENANTS:
                    self._purses.popitem(last=False)
                continue
            more = _SHARE * count * (step - purse.step)
            purse.balance = min(max(purse.balance, -_DEEPEST * count) + more, _MOST * count)
            purse.looks = min(max(purse.looks, -_DEEPEST * count) + more, _LOOKS * count)
            purse.rows, purse.step = count, step
            self._purses.move_to_end(tenant)

    def left(self, tenant: str) -> float:
        """Tokens that its drafts may cost in this step."""
        purse = self._purses[tenant]
        return purse.balance + _CREDIT * purse.rows

    def left_for_looks(self, tenant: str) -> float:
        """Tokens that looking for drafts may cost it in this step."""
        purse = self._purses[tenant]
        return max(0.0, purse.balance) + purse.looks

    def pay_looks(self, tenant: str, tokens: float) -> None:
        """Looks took the time of so many tokens: what drafts brought goes first."""
        purse = self._purses[tenant]
        brought = min(tokens, max(0.0, purse.balance))
        purse.balance -= brought
        purse.looks -= tokens - brought

    def pay_what_is_there(self, tenant: str, tokens: float) -> None:
        """Take so many tokens, but leave no debt."""
        self.pay(tenant, min(tokens, max(0.0, self.left(tenant))))

    def pay(self, tenant: str, tokens: float) -> None:
        """Its drafts took the time of so many tokens."""
        self._purses[tenant].balance -= tokens

    def earn(self, tenant: str, tokens: float) -> None:
        """Its drafts brought so many tokens."""
        purse = self._purses.get(tenant)
        if purse is not None:
            purse.balance += tokens


class Spending:
    """What a step that is being planned would cost each tenant."""

    def __init__(self, purses: Purses) -> None:
        self._purses = purses
        self._counts: dict[str, int] = {}
        self._closed: set[str] = set()

    def takes(self, tenant: str, price: float) -> bool:
        """Whether a tenant can have one draft more, where each costs `price` tokens; where it
        can't it has no more of them, as those behind need those before.
        """
        if tenant in self._closed:
            return False
        count = self._counts.get(tenant, 0) + 1
        if count * price > self._purses.left(tenant):
            self._closed.add(tenant)
            return False
        self._counts[tenant] = count
        return True
