"""What drafts are expected to bring and to cost: chances, a loss bound, sequences that heads track,
step times by width.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import median

from engine.scheduler import Sequence, StepPlan

#: Maximum number of tenants that are remembered; the least recently used are forgotten.
MAX_TENANTS = 1024
#: Longer matches, and later positions, count as this one.
MAX_KIND = 16
#: Chance of a draft model's or head's draft before any was checked: only checks tell, so a low one
#: would keep a good model from ever being tried.
MODEL_PRIOR = 0.8
#: By how much one checked draft moves the log odds of its tenant's drafts of that kind, and of its
#: sequence; and by which part both return to their priors with each step.
_TENANT_RATE, _SEQUENCE_RATE = 0.25, 0.5
_TENANT_DECAY, _SEQUENCE_DECAY = 0.0006, 0.01
#: The drafts chosen of many seem likelier than they are, by these log odds.
_SELECTION_BIAS = 0.4
MAX_LOG_ODDS = 4.0
#: Drafts less likely than this are dropped.
_MIN_CHANCE = 0.02
#: A tenant's best log odds are cached for this many steps, or until a draft is checked.
_BEST_CACHED_STEPS = 64


def match_log_odds(match_length: int) -> float:
    """Log odds that text goes on as it did behind `match_length` >= 1 equal tokens, before any
    draft was checked: m times in m + 2.
    """
    return log(match_length / 2)


def model_log_odds(_: int) -> float:
    """Log odds of a model's draft at any position, before any was checked."""
    return log(MODEL_PRIOR / (1.0 - MODEL_PRIOR))


@dataclass(slots=True)
class _TenantOdds:
    """Log odds by kind, and the highest of all, each with the step in which it was updated."""

    by_kind: dict[int, tuple[float, int]] = field(default_factory=dict)
    best: tuple[float, int] | None = None


class TenantAcceptance:
    """Acceptance of each tenant's recent drafts, by kind, as ratings in log odds (Elo).

    The kind of a draft from text is the number of matching tokens before it, drafts included; that
    of a model's draft its position. Tenants are kept apart: neither drafts nor their timing tell
    one what others wrote.

    Attributes:
        step: number of steps planned so far, by which ratings decay.
    """

    def __init__(self, max_match: int) -> None:
        """`max_match`: longest match that is looked up; 0: a model draws the drafts."""
        self.is_model = not max_match
        self.step = 0
        self._prior = model_log_odds if self.is_model else match_log_odds
        self._kinds = range(1) if self.is_model else range(1, max_match + 1)
        #: Least recently updated first.
        self._tenants: OrderedDict[str, _TenantOdds] = OrderedDict()

    def log_odds(self, tenant: str, kind: int) -> float:
        """Log odds of a tenant's next draft of this kind."""
        prior, odds = self._prior(kind), self._tenants.get(tenant)
        if odds is None or kind not in odds.by_kind:
            return prior
        value, step = odds.by_kind[kind]
        return prior + (value - prior) * exp(_TENANT_DECAY * (step - self.step))

    def best(self, tenant: str) -> float:
        """Highest log odds of a tenant's drafts of any kind."""
        odds = self._tenants.get(tenant)
        if odds is None:
            return max(map(self._prior, self._kinds))
        if odds.best is None or self.step - odds.best[1] > _BEST_CACHED_STEPS:
            kinds = {*self._kinds, *odds.by_kind}
            odds.best = max(self.log_odds(tenant, kind) for kind in kinds), self.step
        return odds.best[0]

    def update(self, tenant: str, kind: int, error: float) -> None:
        """Move the log odds by a draft's outcome (0 or 1) less its chance."""
        value = _clamp(self.log_odds(tenant, kind) + _TENANT_RATE * error)
        odds = self._tenants.setdefault(tenant, _TenantOdds())
        odds.by_kind[kind], odds.best = (value, self.step), None
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)


class AcceptanceEstimate:
    """Chances of one sequence's drafts: its tenant's log odds and its own offset."""

    def __init__(self, acceptance: TenantAcceptance, tenant: str) -> None:
        self._acceptance, self._tenant = acceptance, tenant
        self._last_offset, self._last_step = 0.0, acceptance.step

    @property
    def _offset(self) -> float:
        decay = exp(_SEQUENCE_DECAY * (self._last_step - self._acceptance.step))
        return self._last_offset * decay

    def best_log_odds(self) -> float:
        """Highest log odds of its next draft, before any is looked for."""
        return self._acceptance.best(self._tenant) + self._offset

    def chances(self, match_length: int, count: int, bias: float = 0.0) -> list[float]:
        """Chances that the first, the first two ... of at most `count` drafts are accepted."""
        accepted, chances, offset = 1.0, list[float](), self._offset - bias
        for kind in self._kinds(match_length, count):
            accepted *= _chance(self._acceptance.log_odds(self._tenant, kind) + offset)
            if accepted < _MIN_CHANCE and chances:
                break
            chances.append(accepted)
        return chances

    def cautious_chances(self, match_length: int, count: int) -> list[float]:
        """`chances` less the bias of choosing the likeliest."""
        return self.chances(match_length, count, _SELECTION_BIAS)

    def update(self, match_length: int, num_drafts: int, num_accepted: int) -> None:
        """Record checked drafts; those behind the first rejected one say nothing."""
        num_compared = min(num_drafts, num_accepted + 1)
        for position, kind in enumerate(self._kinds(match_length, num_compared)):
            chance = _chance(self._acceptance.log_odds(self._tenant, kind) + self._offset)
            error = (position < num_accepted) - chance
            self._last_offset = _clamp(self._offset + _SEQUENCE_RATE * error)
            self._last_step = self._acceptance.step
            self._acceptance.update(self._tenant, kind, error)

    def _kinds(self, match_length: int, count: int) -> Iterable[int]:
        first = 0 if self._acceptance.is_model else max(1, match_length)
        return (min(first + position, MAX_KIND) for position in range(count))


def _chance(log_odds: float) -> float:
    return 1.0 / (1.0 + exp(-log_odds))


def _clamp(log_odds: float) -> float:
    return min(max(log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)


# Limits of a tenant's loss, in tokens per row: while it is below, drafts may cost something, looks
# for drafts in text may, and another sequence may be read.
_MAX_LOSS, _MAX_LOSS_TO_LOOK_UP, _MAX_LOSS_TO_READ = 0.55, 0.4, 0.4
#: Savings that count, and those that outlast the sequence whose drafts brought them.
_MAX_SAVINGS, _MAX_LASTING_SAVINGS = 2.0, 0.3
#: The loss is reduced by this part of each token, so that drafts are tried again.
_RECOVERY = 0.006


@dataclass(slots=True)
class _Loss:
    """A tenant's loss.

    Attributes:
        rows: the tenant's, in this step.
        tokens: per row, at `step`; below 0: savings.
        max_tokens: drafts may cost something up to here: `_MAX_LOSS`, and the longest reading since
            the loss was 0, for drafts are what brings that back.
    """

    rows: int
    step: int
    tokens: float = 0.0
    max_tokens: float = _MAX_LOSS


class LossBound:
    """Bounds what drafts cost each tenant, for chances may be wrong for as long as texts deceive.

    A tenant's loss is the time that its drafts took less the time that they saved, in tokens per
    row: many rows may lose more than one, few rows don't start with the loss of many, nor many with
    new credit. No tenant pays for another, and one's drafts don't depend on another's texts.
    """

    def __init__(self) -> None:
        #: Least recently used first.
        self._losses: OrderedDict[str, _Loss] = OrderedDict()

    def begin_step(self, step: int, rows: dict[str, int]) -> None:
        """Set the number of each tenant's rows in this step."""
        for tenant, count in rows.items():
            loss = self._losses.setdefault(tenant, _Loss(count, step))
            loss.tokens = max(loss.tokens - _RECOVERY * (step - loss.step), -_MAX_SAVINGS)
            if loss.tokens <= 0.0:
                loss.max_tokens = _MAX_LOSS
            loss.rows, loss.step = count, step
            self._losses.move_to_end(tenant)
            if len(self._losses) > MAX_TENANTS:
                self._losses.popitem(last=False)

    def end_sequence(self, tenant: str) -> None:
        """Take back a finished sequence's part of the savings: the next text may be another."""
        if (loss := self._losses.get(tenant)) is not None:
            loss.tokens += max(0.0, -loss.tokens - _MAX_LASTING_SAVINGS) / loss.rows

    def budget(self, tenant: str) -> float:
        """Tokens that its drafts may cost in this step."""
        loss = self._losses[tenant]
        return (loss.max_tokens - loss.tokens) * loss.rows

    def can_look_up(self, tenant: str, tokens: float) -> bool:
        """Whether looking for drafts may take the time of `tokens`."""
        loss = self._losses[tenant]
        return loss.tokens + tokens / loss.rows <= _MAX_LOSS_TO_LOOK_UP

    def can_read(self, tenant: str, pending: float = 0.0) -> bool:
        """Whether one more sequence may be read, beside others that take `pending` tokens."""
        loss = self._losses[tenant]
        return loss.tokens + pending / loss.rows <= _MAX_LOSS_TO_READ

    def can_draft(self, tenant: str) -> bool:
        """Whether its drafts may cost anything."""
        return self.budget(tenant) > 0.0

    def charge(self, tenant: str, tokens: float) -> None:
        """Add what its drafts took; below 0: what they saved."""
        if (loss := self._losses.get(tenant)) is not None:
            loss.tokens += tokens / loss.rows

    def charge_reading(self, tenant: str, tokens: float) -> None:
        """Add what reading its sequences took, which leaves its drafts their budget."""
        self.charge(tenant, tokens)
        loss = self._losses[tenant]
        loss.max_tokens = max(loss.max_tokens, _MAX_LOSS + tokens / loss.rows)


#: The weight of a new step in the average time of a prompt's token.
_PROMPT_RATE = 0.3


class HeadTracking:
    """Sequences that a layer head tracks, for as long as that pays.

    Such a head can draw for a sequence only if it had the model's states of all of its tokens. That
    takes time whether it draws or not: a little of each step, and more of a prompt, for the model's
    last layer otherwise computes a prompt's last token alone. So a prompt is tracked while its
    tenant may read (`LossBound`), and the sequence afterwards while its drafts may cost something.
    A sequence that was given up isn't tracked again before it is preempted and starts anew.
    """

    def __init__(self, cost_fraction: float) -> None:
        """`cost_fraction`: the states' part of a prompt's time in the model (not measured)."""
        self._cost_fraction = cost_fraction
        #: Tenants of tracked sequences.
        self._tenants: dict[int, str] = {}
        #: Tracked tokens of prompts in the step, by tenant.
        self._prompt_tokens = Counter[str]()
        #: Seconds of a prompt's token; inf: unknown, so one prompt a step is tried.
        self._token_seconds = inf

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tenants

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def remove(self, seq_id: int) -> None:
        """Stop tracking a sequence."""
        self._tenants.pop(seq_id, None)

    def untracked_sequences(
        self,
        plan: StepPlan,
        scheduled: list[Sequence],
        can_draft: Callable[[Sequence], bool],
        losses: LossBound | None,
        token_rate: float,
    ) -> list[int]:
        """The sequences of a step that aren't tracked from here on.

        Args:
            plan: without drafts yet.
            scheduled: its sequences.
            can_draft: whether a new sequence may get drafts at all.
            losses: of the tenants, in this step; None: all are tracked.
            token_rate: tokens per second.
        """
        new = {row.seq_id: len(row.token_ids) - row.num_computed_tokens for row in plan.new}
        for seq_id in plan.removed:
            self.remove(seq_id)
        untracked, pending = list[int](), Counter[str]()
        for sequence in scheduled:
            seq_id, tenant = sequence.seq_id, sequence.request.message.tenant
            if seq_id in new:
                if can_draft(sequence) and (
                    losses is None or losses.can_read(tenant, pending[tenant])
                ):
                    pending[tenant] += new[seq_id] * self._token_seconds * token_rate  # type: ignore[assignment]
                    self._tenants[seq_id] = tenant
                    continue
            elif seq_id not in self._tenants or losses is None or losses.can_draft(tenant):
                continue
            self.remove(seq_id)
            untracked.append(seq_id)
        self._prompt_tokens = Counter()
        if plan.num_prompt_tokens:
            for sequence, count in zip(scheduled, plan.num_scheduled, strict=True):
                if count > 1 and sequence.seq_id in self._tenants:
                    self._prompt_tokens[sequence.request.message.tenant] += count
        return untracked

    def charge(
        self,
        plan: StepPlan,
        seconds: float,
        tracking_seconds: float,
        losses: LossBound,
        token_rate: float,
    ) -> None:
        """Charge a step of `seconds`, and those that went into keeping its states."""
        tokens = self._prompt_tokens.total()
        if tracking_seconds and tokens:
            total = tracking_seconds + self._cost_fraction * seconds * tokens / plan.num_tokens
            if self._token_seconds == inf:
                self._token_seconds = total / tokens
            self._token_seconds += _PROMPT_RATE * (total / tokens - self._token_seconds)
            for tenant, count in self._prompt_tokens.items():
                losses.charge_reading(tenant, total * token_rate * count / tokens)
        elif tracking_seconds:
            rows = Counter(self._tenants[row] for row in plan.seq_ids if row in self._tenants)
            for tenant, count in rows.items():
                losses.charge(tenant, tracking_seconds * token_rate * count / rows.total())
        self._prompt_tokens = Counter()


#: The minimum weight of a new step in its width's average, and its weight in the machine's speed.
_WIDTH_RATE, _SPEED_RATE = 0.1, 0.15
#: A width is known after this many steps of it: one slow step mustn't end all drafts.
_MIN_STEPS = 3
#: A step counts as at most this many times slower or faster than expected.
_MAX_OUTLIER = 2.0
#: Steps may be this many tokens wider than the widest known one, or an eighth.
_MAX_WIDER = 4
#: A width not seen for so many steps is tried again, for the machine may be another by then; after
#: each trial it waits twice as long, up to the second bound.
_TRIAL_INTERVAL, _MAX_TRIAL_INTERVAL = 128, 4096
#: An old width that now takes less than this part of its time was measured on a busy machine.
_BUSY = 0.75
#: Mean relative deviation of steps before any were measured, the weight of a new one in it, and by
#: how many deviations one step is in doubt; n steps are by the root of n less.
_NOISE, _NOISE_RATE, _DOUBT = 0.15, 0.04, 2.0


@dataclass(slots=True)
class _Width:
    """Steps of one width.

    Attributes:
        seconds: of a step, at the machine's initial speed.
        last: number of the last such step.
        first: seconds of the steps before the width was known.
        num_compared: steps that came directly behind those of another width, the first included.
        last_trial: number of the step before the last trial.
        interval: steps until the next trial.
    """

    seconds: float
    last: int
    count: int
    first: list[float]
    num_compared: int = 1
    last_trial: int = 0
    interval: int = _TRIAL_INTERVAL


@dataclass(slots=True)
class SpeedFactor:
    """How many times as long as at first everything takes now.

    Attributes:
        num_steps: steps run so far, a draft model's excluded.
        last_width: the `StepTimes` and width of the step that updated it last.
    """

    value: float = 1.0
    num_steps: int = 0
    last_width: tuple[int, int] = (0, 0)


class StepTimes:
    """Seconds of steps in which all rows decode, by width (tokens that they compute).

    A machine's speed changes with its other work, and wide steps are rare: so a step is compared
    with the steps just before it, and one `SpeedFactor`, which follows the newest steps, applies to
    all widths, and to a draft model's steps, too.

    Widths are separate up to 31, then in steps of a sixteenth of a power of two. Between two known
    widths time grows linearly; beyond the widest known one as from the known one of half that
    width, or not at all where there is none, so that wider steps are tried and become known.
    """

    def __init__(self, speed: SpeedFactor | None = None, *, is_draft: bool = False) -> None:
        """`speed`: shared with other steps on the machine; `is_draft`: of a draft model, whose
        steps are part of another's and seem free before any width is known.
        """
        self._is_draft, self._unknown = is_draft, 0.0 if is_draft else 1.0
        self._measured_widths: list[int] = []
        self._widths: dict[int, _Width] = {}
        self._noise = _NOISE
        self.speed = speed or SpeedFactor()

    def record(self, width: int, seconds: float) -> None:
        """Record a step of `width` tokens."""
        width, seconds = _rounded(width), max(seconds, 1e-9)
        self.speed.num_steps += not self._is_draft
        if not self._replace_if_busy(width, seconds):
            entry = self._widths.setdefault(width, _Width(0.0, 0, 0, []))
            entry.last = self.speed.num_steps
            entry.count += 1
            if entry.count > _MIN_STEPS:
                self._update(entry, width, seconds / entry.seconds)
            else:
                entry.first.append(seconds / self.speed.value)
                if entry.count == _MIN_STEPS:
                    self._add(entry, width)
        self.speed.last_width = id(self), width

    def trial_age(self, width: int) -> int:
        """Steps since the next wider known width was measured or tried, if it is to be tried again;
        else 0.
        """
        index = bisect_right(self._measured_widths, _rounded(width)) if width else 0
        if index == len(self._measured_widths):
            return 0
        entry = self._widths[self._measured_widths[index]]
        age = self.speed.num_steps - max(entry.last, entry.last_trial)
        return age if age >= entry.interval else 0

    def record_trial(self, width: int, count: int) -> None:
        """The next step is `count` tokens wider than `width`, as a trial."""
        first = bisect_right(self._measured_widths, _rounded(width)) if width else 0
        last = bisect_left(self._measured_widths, _rounded(width + count))
        for measured in self._measured_widths[first : last + 1]:
            entry = self._widths[measured]
            entry.last_trial = self.speed.num_steps
            entry.interval = min(2 * entry.interval, _MAX_TRIAL_INTERVAL)

    def _replace_if_busy(self, width: int, seconds: float) -> bool:
        """Whether the old measurement of such steps came from a busy machine; then this step
        replaces it, and old ones that are wider or seem slower are forgotten.
        """
        index = bisect_left(self._measured_widths, width)
        if index == len(self._measured_widths) or not self._is_old(self._measured_widths[index]):
            return False
        if seconds >= _BUSY * self.seconds(width):
            return False
        seconds /= self.speed.value
        for measured in list(self._measured_widths):
            slower = measured >= width or self._widths[measured].seconds > seconds
            if slower and self._is_old(measured):
                del self._widths[measured]
        self._widths[width] = _Width(seconds, self.speed.num_steps, 1, [seconds])
        self._measured_widths = [
            measured
            for measured in self._measured_widths
            if measured in self._widths and measured != width
        ]
        insort(self._measured_widths, width)
        return True

    def _is_old(self, width: int) -> bool:
        return self.speed.num_steps - self._widths[width].last >= _TRIAL_INTERVAL

    def _add(self, entry: _Width, width: int) -> None:
        entry.seconds = median(entry.first)
        if width not in self._measured_widths:
            index = bisect_left(self._measured_widths, width)
            if index < len(self._measured_widths):
                entry.interval = self._widths[self._measured_widths[index]].interval
            self._measured_widths.insert(index, width)

    def _update(self, entry: _Width, width: int, factor: float) -> None:
        """`factor`: the step's seconds over the width's."""
        speed = self.speed.value
        factor = min(max(factor, speed / _MAX_OUTLIER), speed * _MAX_OUTLIER)
        self._noise += _NOISE_RATE * (abs(factor / speed - 1.0) - self._noise)
        if self.speed.last_width != (id(self), width):  # steps of another width set the speed
            entry.num_compared += 1
            rate = max(_WIDTH_RATE, 1.0 / (1 + entry.num_compared))
            change = 1.0 + rate * (factor / speed - 1.0)
            entry.seconds *= change
            factor /= change  # the rest is the machine's
        self.speed.value += _SPEED_RATE * (factor - self.speed.value)

    def clear(self) -> None:
        """Forget all measurements."""
        self._measured_widths, self._widths, self._noise, self.speed.value = [], {}, _NOISE, 1.0

    @property
    def widest(self) -> int:
        """Widest known width; 0: none."""
        return self._measured_widths[-1] if self._measured_widths else 0

    @property
    def max_width(self) -> int:
        """Maximum width of a step."""
        return self.widest + max(_MAX_WIDER, self.widest // 8)

    def seconds(self, width: int) -> float:
        """Expected seconds of a step of `width` tokens."""
        measured = self._measured_widths
        if not measured:
            return self._unknown
        index = bisect_left(measured, width)
        if index == len(measured):
            seconds = self._widths[measured[-1]].seconds
            if measured[0] <= measured[-1] // 2:  # else too near to tell
                seconds += self._slope() * (width - measured[-1])
            return self.speed.value * seconds
        above = measured[index]
        seconds = self._widths[above].seconds
        if above != width and index:
            below = measured[index - 1]
            low = self._widths[below].seconds
            seconds = low + (seconds - low) * (width - below) / (above - below)
        return self.speed.value * seconds

    def seconds_with_drafts(self, width: int, count: int, prompt_tokens: int = 0) -> float:
        """Expected seconds of a step of `width` rows with `count` drafts. Beside prompts a draft
        takes what a token takes in wide steps, for the weights are read for the prompts anyway.
        """
        if not prompt_tokens:
            return self.seconds(width + count)
        return self.seconds(width) + self.speed.value * count * self._slope()

    def uncertainty(self, width: int) -> float:
        """By which part `seconds` may be off: of many widths one always seems too fast."""
        if not self._measured_widths:
            return 0.0
        if width > self.widest:
            return _DOUBT * _NOISE / sqrt(_MIN_STEPS)
        entry = self._widths.get(_rounded(width))
        count = _MIN_STEPS if entry is None else max(_MIN_STEPS, entry.count)
        return _DOUBT * self._noise / sqrt(count)

    def _slope(self) -> float:
        """Seconds of one token more in the widest known steps."""
        if not self._measured_widths:
            return self._unknown
        widest = self._measured_widths[-1]
        seconds = self._widths[widest].seconds
        index = bisect_right(self._measured_widths, widest // 2)
        if index == 0:
            return seconds / widest
        half = self._measured_widths[index - 1]
        return max(0.0, seconds - self._widths[half].seconds) / (widest - half)


def _rounded(width: int) -> int:
    """The width that a width counts as."""
    return width >> (shift := max(0, width.bit_length() - 5)) << shift
