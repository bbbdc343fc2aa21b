"""`Drafter`: how many drafts each row of a step gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative import SpeculativeConfig
from engine.models.facts import ModelFacts
from engine.scheduler import Sequence, StepPlan
from engine.speculative.proposers import PROPOSERS, Proposer
from engine.speculative.step_costs import StepCosts

Possible = Callable[[Sequence, list[int]], list[int]]
#: What a draft's chance to hold is taken for before any was tried.
_PRIOR = 0.5
#: The weight of a new draft in a sequence's average.
_NEW = 0.15
#: How fast the chance of a sequence that gets no drafts comes back to the prior.
_DRIFT = 0.01
#: Drafts must promise so many times the tokens per second: what is measured is never exact.
_WORTH = 1.02


@dataclass(slots=True)
class _Chance:
    """How likely a sequence's next draft holds, in [0, 1]."""

    sequence: Sequence
    value: float = _PRIOR

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """So many of its drafts held; those behind the first that didn't say nothing."""
        for _ in range(num_accepted):
            self.value += _NEW * (1.0 - self.value)
        if num_accepted < num_drafts:
            self.value -= _NEW * self.value


class Drafter:
    """Gives drafts to the rows where they promise the most tokens for the step's time.

    A draft j of a row whose drafts hold with chance p brings p^j tokens; a step that is one token
    wider takes longer by what `StepCosts` knows. Drafts are added, the likeliest first, up to where
    tokens per second are highest. In a full batch, where a wider step takes as much longer, none
    are, and none are looked for.
    """

    def __init__(
        self, config: SpeculativeConfig, max_model_len: int, possible: Possible | None = None
    ) -> None:
        """`possible`: cuts a sequence's drafts to those that what it follows allows."""
        self._config = config
        self._possible = possible or (lambda sequence, drafts: drafts)
        self._max_model_len = max_model_len
        self._proposer: Proposer = PROPOSERS[config.method](config)
        self._chances: dict[int, _Chance] = {}
        self.costs = StepCosts()

    def propose(self, decoding: list[Sequence], room: int) -> dict[int, list[int]]:
        """Drafts by sequence id.

        Args:
            decoding: the rows of the step that decode.
            room: most drafts of the step.
        """
        self._forget_those_that_left()
        width = len(decoding)
        most = min(room, max(4 * self._config.num_speculative_tokens, self.costs.widest))
        off = 0 < self._config.disable_by_batch_size <= width
        if off or most < 1 or not self._may_pay(width, most):
            return {}
        proposed = {}
        for sequence in decoding:
            count = self._most(sequence)
            if count > 0:
                self._chances.setdefault(sequence.seq_id, _Chance(sequence))
                drafts = self._proposer.propose(sequence, count)
                if drafts and (drafts := self._possible(sequence, drafts)):
                    proposed[sequence.seq_id] = drafts
        return self._worth(proposed, width, most)

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts were checked."""
        self._chances.setdefault(sequence.seq_id, _Chance(sequence)).note(num_drafts, num_accepted)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step was run."""
        if not plan.num_prompt_tokens and plan.seq_ids:
            self.costs.note(plan.num_tokens, seconds)

    def _most(self, sequence: Sequence) -> int:
        """Drafts that a sequence can use: a step gives one token more than drafts hold."""
        left = sequence.max_output_tokens - sequence.num_output_tokens
        capped = sequence.request.tokens_left
        if capped is not None:
            left = min(left, capped)
        left = min(left, self._max_model_len - sequence.num_tokens)
        return min(self._config.num_speculative_tokens, left - 1) if takes_drafts(sequence) else 0

    def _may_pay(self, width: int, most: int) -> bool:
        """Whether drafts could pay if each of them held."""
        seconds, count = self.costs.seconds, min(most, width * self._config.num_speculative_tokens)
        now = _WORTH * width / seconds(width)
        return any((width + more) / seconds(width + more) > now for more in (1, count))

    def _worth(self, proposed: dict[int, list[int]], width: int, most: int) -> dict[int, list[int]]:
        """The first drafts of each row, as many as pay."""
        promised = sorted(
            (
                (self._chances[seq_id].value ** (place + 1), seq_id)
                for seq_id, drafts in proposed.items()
                for place in range(len(drafts))
            ),
            reverse=True,
        )[:most]
        tokens, best, taken = float(width), _WORTH * width / self.costs.seconds(width), 0
        for count, (chance, _) in enumerate(promised, 1):
            tokens += chance
            rate = tokens / self.costs.seconds(width + count)
            if rate > best:
                best, taken = rate, count
        counts: dict[int, int] = {}
        for _, seq_id in promised[:taken]:
            counts[seq_id] = counts.get(seq_id, 0) + 1
        for seq_id in proposed.keys() - counts.keys():
            unused = self._chances[seq_id]
            unused.value += _DRIFT * (_PRIOR - unused.value)
        return {seq_id: proposed[seq_id][:count] for seq_id, count in counts.items()}

    def _forget_those_that_left(self) -> None:
        for seq_id, chance in list(self._chances.items()):
            if chance.sequence.finished:
                del self._chances[seq_id]
                self._proposer.forget(chance.sequence)


def takes_drafts(sequence: Sequence) -> bool:
    """Whether a sequence's drafts can be checked: nothing but its own draws chooses its tokens."""
    beams = sequence.request.message.sampling.use_beam_search
    return not (beams or sequence.wants_prompt_logprobs)


def make_drafter(
    config: EngineConfig, facts: ModelFacts, *, overlaps: bool, possible: Possible | None = None
) -> Drafter | None:
    """As the settings say; None without `speculative_config`. `possible`: see `Drafter`.

    Raises `ConfigError` where drafts can't be checked.
    """
    if not config.speculative_config:
        return None
    wanted = SpeculativeConfig.from_mapping(config.speculative_config)
    obstacle = ""
    if facts.pooling is not None:
        obstacle = "the model generates no text"
    elif facts.stateful:
        obstacle = f"the state of {facts.architecture} can't be taken back to where a draft failed"
    elif overlaps:
        obstacle = "steps are planned before their tokens are known (async_scheduling, or a GPU)"
    if obstacle:
        raise ConfigError(
            f"speculative_config can't be used: {obstacle}.", param="speculative_config"
        )
    return Drafter(wanted, facts.max_model_len, possible)
