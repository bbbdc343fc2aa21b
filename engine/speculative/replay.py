"""`ReplaySource`: drafts what the model said before of the same encoder's input."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from engine.contract.engine_config import EngineConfig
from engine.contract.plugins import selected_entry_points
from engine.models.interface import ModelFacts
from engine.sampling.logits_processor import GROUP
from engine.scheduler import Request, Sequence, StepPlan
from engine.speculative.drafter import max_drafts_of
from engine.speculative.ngram import MAX_TOKENS

_Key = tuple[tuple[str, str], bytes, tuple[int, ...]]


class ReplaySource:
    """Drafts all of the last greedy answer to the same prompt about the same encoder's input, in
    the same cache namespace and by the same adapter.

    Only other sampling parameters could make it another answer, and verifying 25 tokens takes about
    as long as decoding two. So nothing is estimated: an answer is drafted while it begins with the
    sequence's output. Prompts and answers have at most `MAX_TOKENS` together; the least recently
    given ones are dropped first.
    """

    def __init__(
        self, filter_drafts: Callable[[Sequence, list[int]], list[int]], max_step_drafts: int
    ) -> None:
        """`filter_drafts`: cuts drafts to those that the sequence's constraints allow.
        `max_step_drafts`: of all sequences in a step, which computes the logits of all at once.
        """
        self._filter_drafts, self._max_step_drafts = filter_drafts, max_step_drafts
        #: Without the last token, which is sampled after the drafts.
        self._answers: OrderedDict[_Key, list[int]] = OrderedDict()
        self._size = 0

    def untracked_sequences(self, plan: StepPlan, scheduled: list[Sequence]) -> list[int]:
        """See `DraftSource`."""
        return []

    def propose(
        self, decodes: list[Sequence], max_drafts: int, num_prompt_tokens: int
    ) -> dict[int, list[int]]:
        """See `DraftSource`."""
        proposed = dict[int, list[int]]()
        max_drafts = min(max_drafts, self._max_step_drafts)
        for sequence in decodes:
            if (key := _key(sequence)) is None or (answer := self._answers.get(key)) is None:
                continue
            start = sequence.num_output_tokens
            if answer[:start] != sequence.token_ids[sequence.num_prompt_tokens :]:
                continue
            count = min(max_drafts, max_drafts_of(sequence))
            if count > 0 and (
                drafts := self._filter_drafts(sequence, answer[start : start + count])
            ):
                proposed[sequence.seq_id] = drafts
                max_drafts -= len(drafts)
        return proposed

    def record_outcome(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """See `DraftSource`."""

    def keep(self, request: Request) -> None:
        """Keep the answers of a finished request."""
        for sequence in request.sequences:
            answer = sequence.token_ids[sequence.num_prompt_tokens : -1]
            if answer and (key := _key(sequence)) is not None:
                self._drop(key)
                self._answers[key] = answer
                self._size += len(key[-1]) + len(answer)
        while self._size > MAX_TOKENS:
            self._drop(next(iter(self._answers)))

    def clear(self) -> None:
        """Drop all answers."""
        self._answers.clear()
        self._size = 0

    def _drop(self, key: _Key) -> None:
        if (answer := self._answers.pop(key, None)) is not None:
            self._size -= len(key[-1]) + len(answer)


def _key(sequence: Sequence) -> _Key | None:
    """Return what a greedy answer depends on; None for others, and for those that a caller's
    functions change: these would see drafts.
    """
    message = sequence.request.message
    if not message.sampling.greedy or message.sampling.logits_processors is not None:
        return None
    prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
    return message.cache_scope, sequence.encoder_key, prompt


def make_replay_source(
    config: EngineConfig,
    facts: ModelFacts,
    *,
    overlaps: bool,
    filter_drafts: Callable[[Sequence, list[int]], list[int]],
    max_logits: int,
) -> ReplaySource | None:
    """Return the source of drafts of a model with an encoder; None for other models, with
    `speculative_config`, and where drafts can't be used: see `make_drafter` and
    `processor_classes`. `max_logits`: most that a step computes for drafts.
    """
    reads_encoder = facts.encoder_length or facts.max_encoder_tokens
    has_processors = config.logits_processors or selected_entry_points(GROUP)
    if not reads_encoder or config.speculative_config or overlaps or has_processors:
        return None
    return ReplaySource(filter_drafts, max_logits // facts.vocab_size)
