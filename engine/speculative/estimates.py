"""`StepTimes`: how long steps take by their width, as they were measured."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import median

from engine.scheduler import Sequence, StepPlan

# -- How likely drafts hold: of a tenant's texts, and of one sequence.
#
# A rating as of chess players (Elo): what a draft is like and what its sequence is like add up to
# the logarithm of its odds, and both move towards what was seen.


#: Tenants whose chances are known; those that said nothing for longest are forgotten.
MOST_TENANTS = 1024
#: Longer runs of equal tokens, and places further behind, are taken as this one.
MOST_ALIKE = 16
#: What is expected of a draft model or head, which was made for it: nothing is learned of these but
#: by checking some, so a good one must be expected, or it would never be tried.
MODEL_PRIOR = 0.8
#: How far one checked draft moves the logarithm of odds of all drafts like it, and of its sequence.
_TENANT_MOVES, _SEQUENCE_MOVES = 0.25, 0.5
#: The part by which both come back with each step.
_TENANT_FORGETS, _SEQUENCE_FORGETS = 0.0006, 0.01
#: So much likelier than they are do those drafts seem that seem likeliest of many.
_CAUTION = 0.4
#: Nothing is surer than these odds.
MAX_LOG_ODDS = 4.0
#: Drafts that hold less often are none.
_LEAST = 0.02
#: For so many steps the best of a tenant's odds is as it was, unless a draft was checked.
_BEST_HOLDS = 64


def matched_odds(matched: int) -> float:
    """Logarithm of the odds that text goes on as it did where its newest tokens stood before:
    `matched` of them, at least 1. Two of `matched` + 2 don't, before any were compared.
    """
    return log(matched / 2)


def drawn_odds(_: int) -> float:
    """The same of what a draft model or head drew, at any place."""
    return log(MODEL_PRIOR / (1.0 - MODEL_PRIOR))


@dataclass(slots=True)
class _Tenant:
    """Attributes:
    log_odds: likeness -> the logarithm of odds, and in which step it was so.
    best: the highest of all, and in which step it was so; None: not known.
    """

    log_odds: dict[int, tuple[float, int]] = field(default_factory=dict)
    best: tuple[float, int] | None = None


class TenantAcceptance:
    """How often a tenant's drafts held lately, by what they are like.

    Of text: by how many of the newest tokens were found before it, each draft that holds being one
    more. Of a draft model's: by its place. Short answers that nothing repeats would each pay anew
    for finding that out. Tenants are kept apart: how many drafts one gets, and so how its steps are
    cut, says nothing of another's texts.

    Attributes:
        step: so many steps were planned; what was found out grows old with them.
    """

    def __init__(self, longest_match: int) -> None:
        """`longest_match`: of those that are looked for; 0: a model draws them."""
        self.drawn = not longest_match
        self.step = 0
        self._prior = drawn_odds if self.drawn else matched_odds
        self._kinds = range(1) if self.drawn else range(1, longest_match + 1)
        #: The tenant that noted something last is the last.
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def log_odds(self, tenant: str, alike: int) -> float:
        """Logarithm of the odds of a tenant's next draft of this likeness."""
        prior, known = self._prior(alike), self._tenants.get(tenant)
        if known is None or alike not in known.log_odds:
            return prior
        value, at = known.log_odds[alike]
        return prior + (value - prior) * exp(_TENANT_FORGETS * (at - self.step))

    def best(self, tenant: str) -> float:
        """The highest of its odds, of drafts that there may be."""
        known = self._tenants.get(tenant)
        if known is None:
            return max(map(self._prior, self._kinds))
        if known.best is None or self.step - known.best[1] > _BEST_HOLDS:
            kinds = {*self._kinds, *known.log_odds}
            known.best = max(self.log_odds(tenant, alike) for alike in kinds), self.step
        return known.best[0]

    def move(self, tenant: str, alike: int, surprise: float) -> None:
        """A draft held, or didn't, by so much more than was expected, in [-1, 1]."""
        moved = _bounded(self.log_odds(tenant, alike) + _TENANT_MOVES * surprise)
        known = self._tenants.setdefault(tenant, _Tenant())
        known.log_odds[alike], known.best = (moved, self.step), None
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)


class AcceptanceEstimate:
    """Of one sequence's drafts: those of its tenant, and by how much it is better or worse."""

    def __init__(self, usual: TenantAcceptance, tenant: str) -> None:
        self._usual, self._tenant = usual, tenant
        self._was_better, self._at = 0.0, usual.step

    def best_odds(self) -> float:
        """Logarithm of the odds of its next draft at best, before anybody looks for one."""
        return self._usual.best(self._tenant) + self._better

    def of(self, matched: int, count: int, caution: float = 0.0) -> list[float]:
        """The chances that the first, the first two, ... of `count` drafts hold; as many as may
        well hold.
        """
        held, chances = 1.0, list[float]()
        better, usual, tenant = self._better - caution, self._usual, self._tenant
        for alike in self._alike(matched, count):
            held *= _chance(usual.log_odds(tenant, alike) + better)
            if held < _LEAST and chances:
                break
            chances.append(held)
        return chances

    def at_worst(self, matched: int, count: int) -> list[float]:
        """The same, and less: drafts aren't to be checked for seeming likelier than they are."""
        return self.of(matched, count, _CAUTION)

    def note(self, matched: int, num_drafts: int, num_accepted: int) -> None:
        """So many of its drafts held; those behind the first that didn't say nothing."""
        compared = min(num_drafts, num_accepted + 1)
        for place, alike in enumerate(self._alike(matched, compared)):
            surprise = (place < num_accepted) - self._next(alike)
            self._was_better = _bounded(self._better + _SEQUENCE_MOVES * surprise)
            self._at = self._usual.step
            self._usual.move(self._tenant, alike, surprise)

    @property
    def _better(self) -> float:
        """By so much it is likelier than its tenant's others; less so the longer ago."""
        return self._was_better * exp(_SEQUENCE_FORGETS * (self._at - self._usual.step))

    def _alike(self, matched: int, count: int) -> Iterable[int]:
        """What each draft is like."""
        first = 0 if self._usual.drawn else max(1, matched)
        return (min(first + place, MOST_ALIKE) for place in range(count))

    def _next(self, alike: int) -> float:
        return _chance(self._usual.log_odds(self._tenant, alike) + self._better)


def _chance(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds))


def _bounded(odds: float) -> float:
    return min(max(odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)


# Limits of a tenant's loss, in tokens per row.
#: Up to here drafts may cost something, looks for drafts in text may, and another sequence may be
#: read.
_MAX_LOSS, _MAX_LOSS_TO_LOOK, _MAX_LOSS_TO_READ = 0.55, 0.4, 0.4
#: Savings that count, and those that outlast the sequence whose drafts brought them.
_MAX_SAVINGS, _MAX_LASTING_SAVINGS = 2.0, 0.3
#: The loss is reduced by this much with each token, so that drafts are tried again.
_RECOVERY = 0.006


@dataclass(slots=True)
class _Loss:
    """A tenant's loss.

    Attributes:
        tokens: per row, at `step`; below 0: savings.
        max_tokens: up to here drafts may cost something: `_MAX_LOSS`, and the longest reading since
            there was no loss, for drafts are what brings that back.
        rows: the tenant's, in this step.
    """

    rows: int
    step: int
    tokens: float = 0.0
    max_tokens: float = _MAX_LOSS


class LossBound:
    """Bounds what drafts may cost each tenant, for what is expected of them may be wrong.

    A tenant's loss is the time that its drafts took less the time that they saved, in tokens per
    row: many rows lose more than one, but few rows don't begin with the loss of many. No tenant
    pays for another, nor do one's drafts depend on another's texts.
    """

    def __init__(self) -> None:
        #: The tenant that had rows last is the last.
        self._losses: OrderedDict[str, _Loss] = OrderedDict()

    def begin_step(self, step: int, rows: dict[str, int]) -> None:
        """Note the rows of each tenant in this step."""
        for tenant, count in rows.items():
            loss = self._losses.setdefault(tenant, _Loss(count, step))
            loss.tokens = max(loss.tokens - _RECOVERY * (step - loss.step), -_MAX_SAVINGS)
            if loss.tokens <= 0.0:
                loss.max_tokens = _MAX_LOSS
            loss.rows, loss.step = count, step
            self._losses.move_to_end(tenant)
            if len(self._losses) > MOST_TENANTS:
                self._losses.popitem(last=False)

    def end_sequence(self, tenant: str) -> None:
        """Take back a finished sequence's part of the savings: the next text may be another."""
        if (loss := self._losses.get(tenant)) is not None:
            loss.tokens += max(0.0, -loss.tokens - _MAX_LASTING_SAVINGS) / loss.rows

    def budget(self, tenant: str) -> float:
        """Tokens that its drafts may cost in this step."""
        loss = self._losses[tenant]
        return (loss.max_tokens - loss.tokens) * loss.rows

    def can_look(self, tenant: str, tokens: float) -> bool:
        """Whether looking for drafts may take the time of `tokens`."""
        loss = self._losses[tenant]
        return loss.tokens + tokens / loss.rows <= _MAX_LOSS_TO_LOOK

    def can_read(self, tenant: str, pending: float = 0.0) -> bool:
        """Whether one more sequence may be read, beside others that take `pending` tokens."""
        loss = self._losses[tenant]
        return loss.tokens + pending / loss.rows <= _MAX_LOSS_TO_READ

    def can_draft(self, tenant: str) -> bool:
        """Whether its drafts may cost anything."""
        loss = self._losses[tenant]
        return loss.tokens < loss.max_tokens

    def charge(self, tenant: str, tokens: float) -> None:
        """Add what its drafts took to its loss; below 0: what they saved."""
        if (loss := self._losses.get(tenant)) is not None:
            loss.tokens += tokens / loss.rows

    def charge_reading(self, tenant: str, tokens: float) -> None:
        """Add what reading its sequences took; its drafts may still bring that back."""
        self.charge(tenant, tokens)
        loss = self._losses[tenant]
        loss.max_tokens = max(loss.max_tokens, _MAX_LOSS + tokens / loss.rows)


# -- `HeadTracking`: which sequences a head reads along, for as long as that pays.


#: The weight of a new step in what a prompt's token takes.
_NEW = 0.3


class HeadTracking:
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
        #: Tokens of prompts in the step that are followed, by tenant.
        self._read = Counter[str]()
        #: What a prompt's token takes, in seconds; inf: not known, so one prompt is tried.
        self._token_seconds = inf

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tenants

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def leave(self, seq_id: int) -> None:
        """A sequence isn't followed any more."""
        self._tenants.pop(seq_id, None)

    def untracked_sequences(
        self,
        plan: StepPlan,
        scheduled: list[Sequence],
        wanted: Callable[[Sequence], bool],
        losses: LossBound | None,
        price: float,
    ) -> list[int]:
        """The sequences of a step that aren't followed from here on.

        Args:
            plan: without drafts yet.
            scheduled: its sequences.
            wanted: whether a sequence that begins may get drafts at all.
            losses: of the tenants, in this step; None: nothing is charged.
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
                if losses is None or losses.can_draft(tenant):
                    continue
                del self._tenants[seq_id]
            else:
                tenant = sequence.request.message.tenant
                takes = new[seq_id] * self._token_seconds * price
                owing = owed.setdefault(tenant, 0.0)
                if wanted(sequence) and (losses is None or losses.can_read(tenant, owing)):
                    owed[tenant] += takes
                    self._tenants[seq_id] = tenant
                    continue
                self._tenants.pop(seq_id, None)
            given_up.append(seq_id)
        self._count_prompts(plan, scheduled)
        return given_up

    def _count_prompts(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        self._read = Counter()
        if not plan.num_prompt_tokens:
            return
        for sequence, count in zip(scheduled, plan.num_scheduled, strict=True):
            if count > 1:
                tenant = sequence.request.message.tenant
                self._read[tenant] += count * (sequence.seq_id in self._tenants)

    def charge(
        self, plan: StepPlan, seconds: float, following: float, losses: LossBound, price: float
    ) -> None:
        """A step took `seconds`, and `following` of them went into keeping its states."""
        read = self._read.total()
        if following and read:
            took = following + self._part * seconds * read / plan.num_tokens
            if self._token_seconds == inf:
                self._token_seconds = took / read
            self._token_seconds += _NEW * (took / read - self._token_seconds)
            for tenant, count in self._read.items():
                losses.charge_reading(tenant, took * price * count / read)
        elif following:
            self._charge_rows(plan, following * price, losses)
        self._read = Counter()

    def _charge_rows(self, plan: StepPlan, tokens: float, losses: LossBound) -> None:
        rows = Counter(self._tenants[each] for each in plan.seq_ids if each in self._tenants)
        for tenant, count in rows.items():
            losses.charge(tenant, tokens * count / rows.total())


#: The least weight of a new step in its width's average.
_estimates_NEW = 0.1
#: The weight of a new step in the machine's pace.
_PACE = 0.15
#: A width is known once so many steps of it were measured: one slow step mustn't end all drafts.
_KNOWN = 3
#: A step counts as at most so many times slower or faster than was expected.
_OUTLIER = 2.0
#: Steps are at most so much wider than the widest known one, or than it by an eighth: what trying
#: costs is little, even where each token more takes its time.
_WIDER = 4
#: After so many steps of other widths it's old, and to be tried again: the machine may be another
#: by then. After each trial that goes twice as long, and at most so long.
_OLD, _OLDEST = 128, 4096
#: What is old and now takes less than this part of what it took was measured on a busy machine.
_BUSY = 0.75
#: By how much steps are off on average, as a part of what they take, before any were measured; the
#: weight of a new one in that. An average of one step is in doubt by so many times as much, of n
#: steps by a root of n less.
_NOISE, _NEW_NOISE, _DOUBT = 0.15, 0.04, 2.0


@dataclass(slots=True)
class _Width:
    """Steps of one width.

    Attributes:
        seconds: of one, at the pace that the machine had when it was first measured.
        last: the number of the last one.
        first: what those took that came before it was known.
        compared: so often it was seen just behind another width; it was first measured so, too.
        tried: the number of the step before the last trial.
        lasts: after so many steps it's to be tried again.
    """

    seconds: float
    last: int
    count: int
    first: list[float]
    compared: int = 1
    tried: int = 0
    lasts: int = _OLD


@dataclass(slots=True)
class SpeedFactor:
    """So many times as long as at first does everything take now.

    Attributes:
        told_by: whose steps told it last, and of which width.
        steps: so many were run so far, a draft model's left out.
    """

    value: float = 1.0
    steps: int = 0
    told_by: tuple[int, int] = (0, 0)


class StepTimes:
    """Seconds of steps in which all rows decode, by how many tokens they compute.

    A machine is faster and slower with what else it does, and wide steps are rare: what they took
    is compared with the steps just before them. So each width is known by how much more it takes
    than others, and one pace, which follows the newest steps, stands for all. A draft model's steps
    have the same pace: while nobody drafts, those of its target tell it.

    Widths are kept apart up to 16, then by sixteenths of a power of two. Between two that are known
    it is as a line goes. Beyond the widest it goes on as from the known one of half that width; as
    if the rest were free, where there is none: so wider steps are tried, and from then on known.

    What is old is to be tried again (`num_trials_due`). If that takes far less, the machine was
    busy when it
    was measured, and the old ones that are wider or seem slower are forgotten.
    """

    def __init__(self, pace: SpeedFactor | None = None, *, draws: bool = False) -> None:
        """`pace`: of other steps on the machine; `draws`: of a draft model, whose steps are part of
        another's and seem free before any width is known.
        """
        self._draws, self._unknown = draws, 0.0 if draws else 1.0
        self._known: list[int] = []
        self._widths: dict[int, _Width] = {}
        self._noise = _NOISE
        self.pace = pace or SpeedFactor()

    def note(self, width: int, seconds: float) -> None:
        """A step of `width` tokens took so long."""
        place, seconds = _rounded(width), max(seconds, 1e-9)
        self.pace.steps += not self._draws
        if not self._was_busy(place, seconds):
            each = self._widths.setdefault(place, _Width(0.0, 0, 0, []))
            each.last = self.pace.steps
            each.count += 1
            if each.count <= _KNOWN:
                self._begin(each, place, seconds / self.pace.value)
            else:
                self._follow(each, place, seconds / each.seconds)
        self.pace.told_by = id(self), place

    def num_trials_due(self, width: int) -> int:
        """How many steps ago one was measured, or tried, that tells what a step wider than `width`
        takes; 0: not so many that it's to be tried again, or none was.
        """
        at = bisect_right(self._known, _rounded(width)) if width else 0
        if at == len(self._known):
            return 0
        each = self._widths[self._known[at]]
        age = self.pace.steps - max(each.last, each.tried)
        return age if age >= each.lasts else 0

    def note_trial(self, width: int, count: int) -> None:
        """The next step is so many tokens wider than `width` to see what it takes."""
        first = bisect_right(self._known, _rounded(width)) if width else 0
        last = bisect_left(self._known, _rounded(width + count))
        for place in self._known[first : last + 1]:
            each = self._widths[place]
            each.tried, each.lasts = self.pace.steps, min(2 * each.lasts, _OLDEST)

    def _was_busy(self, place: int, seconds: float) -> bool:
        """Whether what tells of such steps is old, and was measured on a busy machine; then this
        step tells it.
        """
        at, known = bisect_left(self._known, place), self._widths
        if at == len(self._known) or not self._is_old(self._known[at]):
            return False
        if seconds >= _BUSY * self.seconds(place):
            return False
        usual = seconds / self.pace.value
        for each in list(self._known):
            if self._is_old(each) and (each >= place or known[each].seconds > usual):
                del known[each]
        known[place] = _Width(usual, self.pace.steps, 1, [usual])
        self._known = [each for each in self._known if each in known and each != place]
        insort(self._known, place)
        return True

    def _is_old(self, width: int) -> bool:
        return self.pace.steps - self._widths[width].last >= _OLD

    def _begin(self, each: _Width, place: int, seconds: float) -> None:
        each.first.append(seconds)
        if each.count == _KNOWN:
            each.seconds = median(each.first)
            if place not in self._known:
                at = bisect_left(self._known, place)
                if at < len(self._known):  # as it was, until it's tried again
                    each.lasts = self._widths[self._known[at]].lasts
                self._known.insert(at, place)

    def _follow(self, each: _Width, place: int, slower: float) -> None:
        """`slower`: so many times as long as it took at first."""
        pace = self.pace.value
        slower = min(max(slower, pace / _OUTLIER), pace * _OUTLIER)
        self._noise += _NEW_NOISE * (abs(slower / pace - 1.0) - self._noise)
        if self.pace.told_by != (id(self), place):  # steps of another width have told the pace
            each.compared += 1
            more = 1.0 + max(_estimates_NEW, 1.0 / (1 + each.compared)) * (slower / pace - 1.0)
            each.seconds *= more
            slower /= more  # the rest is the machine's
        self.pace.value += _PACE * (slower - self.pace.value)

    def forget(self) -> None:
        """What was measured so far is no measure."""
        self._known, self._widths, self._noise, self.pace.value = [], {}, _NOISE, 1.0

    @property
    def widest(self) -> int:
        """Of the widths that are known; 0: none."""
        return self._known[-1] if self._known else 0

    @property
    def most(self) -> int:
        """The widest step that is worth a trial."""
        return self.widest + max(_WIDER, self.widest // 8)

    def seconds(self, width: int) -> float:
        """What a step of `width` tokens takes."""
        if not self._known:
            return self._unknown
        return self.pace.value * self._usual(width)

    def seconds_with_drafts(self, width: int, count: int, beside: int = 0) -> float:
        """What a step of so many rows takes once it has so many drafts. Beside prompts' tokens each
        takes what a token more takes the widest steps: what all are read for anyway is the
        prompts' already.
        """
        if not beside:
            return self.seconds(width + count)
        return self.seconds(width) + self.pace.value * count * self._slope()

    def with_each(self, width: int, most: int, beside: int = 0) -> tuple[list[float], list[float]]:
        """`seconds_with_drafts` of 1, 2, ... `most`, and the most that each may take (`doubt`)."""
        if not self._known:
            each = [self.seconds_with_drafts(width, count, beside) for count in range(1, most + 1)]
            return each, each
        if beside:
            now, more = self.seconds(width), self.pace.value * self._slope()
            each = [now + more * count for count in range(1, most + 1)]
        else:
            pace = self.pace.value
            each = [pace * usual for usual in self._usuals(width + 1, width + most)]
        doubts = self._doubts(width + 1, width + most)
        return each, [seconds * more for seconds, more in zip(each, doubts, strict=True)]

    def _doubts(self, first: int, last: int) -> list[float]:
        """One and `doubt` of all widths from `first` to `last`."""
        found = [1.0 + _DOUBT * self._noise / sqrt(_KNOWN)] * (last + 1 - first)
        for place, each in self._widths.items():
            low, high = max(place, first), min(place + _apart(place) - 1, last)
            if low <= high and each.count > _KNOWN:
                doubt = 1.0 + _DOUBT * self._noise / sqrt(each.count)
                found[low - first : high + 1 - first] = [doubt] * (high + 1 - low)
        beyond = max(0, self.widest + 1 - first)
        found[beyond:] = [1.0 + _DOUBT * _NOISE / sqrt(_KNOWN)] * (len(found) - beyond)
        return found

    def uncertainty(self, width: int) -> float:
        """By so large a part `seconds` may be off: of many widths one always seems faster than it
        is, and nobody is to choose it for that.
        """
        if not self._known:
            return 0.0
        if width > self.widest:
            return _DOUBT * _NOISE / sqrt(_KNOWN)
        each = self._widths.get(_rounded(width))
        count = _KNOWN if each is None else max(_KNOWN, each.count)
        return _DOUBT * self._noise / sqrt(count)

    def _usual(self, width: int) -> float:
        at = bisect_left(self._known, width)
        if at == len(self._known):
            return self._beyond(width)
        above = self._known[at]
        high = self._widths[above].seconds
        if above == width or at == 0:
            return high
        below = self._known[at - 1]
        low = self._widths[below].seconds
        return low + (high - low) * (width - below) / (above - below)

    def _usuals(self, first: int, last: int) -> list[float]:
        """`_usual` of all widths from `first` to `last`."""
        found, width = list[float](), first
        for at in range(bisect_left(self._known, first), len(self._known)):
            if width > last:
                return found
            above = self._known[at]
            high, end = self._widths[above].seconds, min(above, last)
            below = self._known[at - 1] if at else 0
            low = self._widths[below].seconds if at else high
            slope = (high - low) / (above - below)
            found += [low + slope * (each - below) for each in range(width, end + 1)]
            width = end + 1
        return found + [self._beyond(each) for each in range(width, last + 1)]

    def _beyond(self, width: int) -> float:
        widest = self._known[-1]
        high = self._widths[widest].seconds
        if self._known[0] > widest // 2:
            return high  # too near to tell
        return high + self._slope() * (width - widest)

    def _slope(self) -> float:
        """Of one token more in the widest steps that are known."""
        if not self._known:
            return self._unknown
        widest = self._known[-1]
        high, at = self._widths[widest].seconds, bisect_right(self._known, widest // 2)
        if at == 0:
            return high / widest
        half = self._known[at - 1]
        return max(0.0, high - self._widths[half].seconds) / (widest - half)


def _rounded(width: int) -> int:
    """The width that stands for its like."""
    return width // _apart(width) * _apart(width)


def _apart(width: int) -> int:
    """So many widths from there on are alike."""
    return 1 << max(0, width.bit_length() - 5)
