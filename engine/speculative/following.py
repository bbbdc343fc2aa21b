"""`Following`: which sequences a head reads along, for as long as that pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf

from engine.scheduler import Sequence, StepPlan
from engine.speculative.purses import Purses

#: The weight of a new step in what a prompt's token takes.
_NEW = 0.3


class Following:
    """A head that is a layer can draw for a sequence only while it has had the model's states of
    all of its tokens. That takes time whether it draws or not: a little of each step, and of a
    prompt more, for the model's last layer is otherwise computed for its last token alone.

    So a prompt is followed if its tenant may owe that, as what a draft model reads is owed, and
    the sequence behind it for as long as drafts bring what it takes, or little is owed. A sequence
    that was given up isn't followed again before it begins anew.
    """

    def __init__(self, part: float) -> None:
        """`part`: of a prompt's time, what its states take in the model, which isn't measured."""
        self._part = part
        #: Sequences that are followed, and whose they are.
        self._tenants: dict[int, str] = {}
        #: Prompts' tokens in the step, by tenant: all of them, and those that are followed.
        self._prompts, self._read = Counter[str](), Counter[str]()
        #: What a prompt's token takes, in seconds; inf: not known, so one prompt is tried.
        self._token_seconds = inf

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tenants

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def leave(self, seq_id: int) -> None:
        """A sequence isn't followed any more."""
        self._tenants.pop(seq_id, None)

    def choose(
        self,
        plan: StepPlan,
        scheduled: list[Sequence],
        wanted: Callable[[Sequence], bool],
        purses: Purses | None,
        price: float,
    ) -> list[int]:
        """The sequences of a step that aren't followed from here on.

        Args:
            plan: without drafts yet.
            scheduled: its sequences.
            wanted: whether a sequence that begins may get drafts at all.
            purses: of the tenants, filled for this step; None: nobody pays.
            price: tokens that a second stands for.
        """
        new = {each.seq_id: len(each.token_ids) - each.num_computed_tokens for each in plan.new}
        for seq_id in plan.removed:
            self.leave(seq_id)
        given_up, owed = list[int](), dict[str, float]()
        for sequence in scheduled:
            seq_id = sequence.seq_id
            if seq_id not in new:
                if (tenant := self._tenants.get(seq_id)) is None:
                    continue
                if purses is None or purses.may_go_on(tenant):
                    continue
                del self._tenants[seq_id]
            else:
                tenant = sequence.request.message.tenant
                takes = new[seq_id] * self._token_seconds * price
                owing = owed.setdefault(tenant, 0.0)
                if wanted(sequence) and (purses is None or purses.may_follow(tenant, takes, owing)):
                    owed[tenant] += takes
                    self._tenants[seq_id] = tenant
                    continue
                self._tenants.pop(seq_id, None)
            given_up.append(seq_id)
        self._count_prompts(plan, scheduled)
        return given_up

    def _count_prompts(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        self._prompts, self._read = Counter(), Counter()
        if not plan.num_prompt_tokens:
            return
        for sequence, count in zip(scheduled, plan.num_scheduled, strict=True):
            if count > 1:
                tenant = sequence.request.message.tenant
                self._prompts[tenant] += count
                self._read[tenant] += count * (sequence.seq_id in self._tenants)

    def charge(
        self, plan: StepPlan, seconds: float, following: float, purses: Purses, price: float
    ) -> None:
        """A step took `seconds`, and `following` of them went into keeping its states."""
        read = self._read.total()
        for tenant, count in self._prompts.items():
            purses.note_prompt(tenant, seconds * price * count / plan.num_tokens)
        if following and read:
            took = following + self._part * seconds * read / plan.num_tokens
            if self._token_seconds == inf:
                self._token_seconds = took / read
            self._token_seconds += _NEW * (took / read - self._token_seconds)
            for tenant, count in self._read.items():
                purses.pay_reading(tenant, took * price * count / read)
        elif following:
            self._charge_rows(plan, following * price, purses)
        self._prompts, self._read = Counter(), Counter()

    def _charge_rows(self, plan: StepPlan, tokens: float, purses: Purses) -> None:
        rows = Counter(self._tenants[each] for each in plan.seq_ids if each in self._tenants)
        for tenant, count in rows.items():
            purses.pay_reading(tenant, tokens * count / rows.total())
