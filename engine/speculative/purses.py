"""`Purses`: what a tenant's drafts may cost it, whatever is expected of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.speculative.chances import MOST_TENANTS

#: Of each token so much may be spent on finding out whether drafts hold, and as much on looking for
#: them.
_SHARE = 0.003
#: Tokens a row that may be owed for drafts, that there are for looks at first, and that a tenant
#: keeps from better times; the rest is its sequences'.
_CREDIT, _LOOKS, _MOST = 0.55, 0.1, 0.3
#: Tokens a row that are owed at most, and for what was read: debts of many rows aren't one row's.
#: What is beyond that waits until there are more rows again, or is paid: else each batch that ends
#: row by row would leave the next one new credit.
_DEEPEST, _DEEPEST_READ = 1.0, 8.0
#: While no more than so many tokens a row are owed for what was read another may be read, and of
#: each token so much is forgiven.
_LENT, _FORGIVEN = 0.4, 0.004
#: Tokens a row that may be owed before a head reads none of them along any more.
_FOLLOWED = 0.65
#: Rows beyond so many are lent this part of what a row is, for drafts and for what is read: whether
#: drafts hold is known for all after a few.
_MANY, _MANY_READ, _BEYOND = 16, 8, 0.25


@dataclass(slots=True)
class _Purse:
    """Attributes:
    balance: tokens that drafts brought and that were allowed, less those that they cost.
    looks: tokens that looks may cost beside that.
    rows: of the tenant, in this step.
    step: the step that it was filled for last.
    owed: tokens that it took to read sequences, and that drafts haven't brought yet.
    longest: what a head's longest one of these takes.
    aside, owed_aside: what more rows owed, for drafts and for what was read, than those of this
        step may owe.
    """

    balance: float
    looks: float
    rows: int
    step: int
    owed: float = 0.0
    longest: float = 0.0
    aside: float = 0.0
    owed_aside: float = 0.0

    def borrowers(self, many: int) -> float:
        """As many rows as something is lent for."""
        beyond = max(0, self.rows - many)
        return self.rows - beyond + _BEYOND * beyond

    def fill(self, step: int, count: int) -> None:
        """`Purses.fill`, of one tenant's `count` rows."""
        self._bring_back(count - self.rows)
        since = count * (step - self.step)
        beyond = max(0.0, -self.balance - _DEEPEST * count)
        self.aside += beyond
        self.balance += beyond + _SHARE * since
        self.looks = min(max(self.looks, -_DEEPEST * count) + _SHARE * since, _LOOKS * count)
        self.forgive(_FORGIVEN * since)
        beyond = max(0.0, self.owed - max(_DEEPEST_READ * count, self.longest))
        self.owed_aside += beyond
        self.owed -= beyond
        repaid = min(self.owed, max(0.0, self.balance))
        self.owed -= repaid
        self.balance -= repaid
        self._pay_back(max(0.0, self.balance - _MOST * count))
        self.balance = min(self.balance, _MOST * count)
        self.rows, self.step = count, step

    def forgive(self, tokens: float) -> None:
        """Of what is owed for reading."""
        beyond = max(0.0, tokens - self.owed)
        self.owed = max(0.0, self.owed - tokens)
        self.owed_aside = max(0.0, self.owed_aside - beyond)
        if not self.owed:
            self.longest = 0.0

    def _bring_back(self, more: int) -> None:
        """So many rows more owe again what so many did."""
        if more > 0:
            back = min(self.aside, _DEEPEST * more)
            self.aside -= back
            self.balance -= back
            back = min(self.owed_aside, _DEEPEST_READ * more)
            self.owed_aside -= back
            self.owed += back

    def _pay_back(self, tokens: float) -> None:
        """What these rows have no use for is the others'."""
        read = min(self.owed_aside, tokens)
        self.owed_aside -= read
        self.aside = max(0.0, self.aside - (tokens - read))


class Purses:
    """Tokens that drafts brought each tenant, less those that would have come in the time that
    drafts took.

    What is expected of drafts may be wrong for as long as texts are made to deceive it. A purse
    bounds that: drafts cost a sequence what they brought it lately itself, and beyond that its
    tenant a little that its sequences brought, twice `_SHARE` of its tokens, and a little credit
    that lets it begin. So what one text brought isn't lost with another. What a draft model reads
    of a sequence is for all drafts to come and so keeps none of these back; but nothing more is
    read before drafts have brought it. Nobody pays for another tenant, nor from its purse: so what
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
            purse.fill(step, count)
            self._purses.move_to_end(tenant)

    def fill_beside(self, step: int, rows: dict[str, int]) -> None:
        """`fill` where some of the rows may be in other steps: a tenant has as many as before, or
        more.
        """
        known = self._purses
        self.fill(
            step,
            {each: max(n, known[each].rows if each in known else 0) for each, n in rows.items()},
        )

    def left(self, tenant: str) -> float:
        """Tokens that its drafts may cost in this step."""
        purse = self._purses[tenant]
        return purse.balance + _CREDIT * purse.borrowers(_MANY)

    def left_for_looks(self, tenant: str) -> float:
        """Tokens that looking for drafts may cost it in this step."""
        return self.brought(tenant) + self._purses[tenant].looks

    def brought(self, tenant: str) -> float:
        """Tokens that its drafts brought beyond what they cost."""
        return max(0.0, self._purses[tenant].balance)

    def pay_looks(self, tenant: str, tokens: float) -> None:
        """Looks took the time of so many tokens: what there is for looks goes first, then what
        drafts brought.
        """
        purse = self._purses[tenant]
        beyond = max(0.0, tokens - max(0.0, purse.looks))
        brought = min(beyond, self.brought(tenant))
        purse.balance -= brought
        purse.looks -= tokens - brought

    def left_to_read(self, tenant: str) -> float:
        """Tokens that it may cost to read its sequences in this step, and one sequence more; below
        0: none is to be read.
        """
        purse = self._purses[tenant]
        return self.brought(tenant) + _LENT * purse.borrowers(_MANY_READ) - purse.owed

    def may_follow(self, tenant: str, tokens: float, owing: float) -> bool:
        """Whether a head may read one more of its sequences along, which takes so many tokens;
        `owing` are owed for others of this step.
        """
        if self.left_to_read(tenant) < owing:
            return False
        purse = self._purses[tenant]
        purse.longest = max(purse.longest, tokens)
        return True

    def may_go_on(self, tenant: str) -> bool:
        """Whether a head may go on reading its sequences along."""
        purse = self._purses[tenant]
        return purse.owed <= self.brought(tenant) + _FOLLOWED * purse.borrowers(_MANY_READ)

    def note_prompt(self, tenant: str, tokens: float) -> None:
        """Prompts of its took the time of so many tokens: as with tokens, a part is forgiven of
        what it owes for reading.
        """
        if (purse := self._purses.get(tenant)) is not None:
            purse.forgive(_FORGIVEN * tokens)

    def pay_reading(self, tenant: str, tokens: float) -> None:
        """Its sequences were read: from what drafts brought, the rest is owed."""
        purse, there = self._purses[tenant], min(tokens, self.brought(tenant))
        purse.balance -= there
        purse.owed += tokens - there

    def pay(self, tenant: str, tokens: float) -> None:
        """Its drafts took the time of so many tokens."""
        self._purses[tenant].balance -= tokens

    def earn(self, tenant: str, tokens: float) -> float:
        """A sequence's drafts brought so many tokens. Those that its tenant has no use for: they
        are the sequence's own.
        """
        purse = self._purses.get(tenant)
        if purse is None:
            return 0.0
        most = _MOST * purse.rows + purse.owed + purse.aside + purse.owed_aside
        kept = min(tokens, max(0.0, most - purse.balance))
        purse.balance += kept
        return tokens - kept
