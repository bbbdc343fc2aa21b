"""`SequenceSampling`: what the sampler must know of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contract.sampling_params import SamplingParams
from engine.sampling.token_counts import TokenCounts


@dataclass(slots=True, eq=False)
class SequenceSampling:
    """One sequence's sampling state. The runner makes it once and keeps it for the sequence's life.

    Attributes:
        params: not to be changed afterwards.
        prompt_token_ids: [num_prompt_tokens].
        output_token_ids: the live list; the runner appends to it. Its length is the position that
            the next token is drawn for, so a sequence that is resumed or recomputed goes on with
            the same random numbers.
        seed: [0, 2**64); resolved, and another for each output of a request.
        vocab_size: columns of its logits, where an adapter brings tokens; 0: the model's.
        counts: the sampler's cache for penalties.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    seed: int
    vocab_size: int = 0
    counts: TokenCounts | None = field(default=None, init=False, repr=False)

    def after(self, drafts: Sequence[int]) -> list[SequenceSampling]:
        """What the sequence is once the first draft holds, the first two, and so on."""
        return [
            SequenceSampling(
                self.params,
                self.prompt_token_ids,
                [*self.output_token_ids, *drafts[:count]],
                self.seed,
                self.vocab_size,
            )
            for count in range(1, len(drafts) + 1)
        ]

    def token_counts(self, vocab_size: int) -> TokenCounts:
        """Tokens to penalise, up to date. The prompt's count for the repetition penalty alone."""
        if self.counts is None:
            whole = self.params.repetition_penalty != 1.0
            self.counts = TokenCounts(self.prompt_token_ids if whole else (), vocab_size)
        self.counts.update(self.output_token_ids)
        return self.counts
