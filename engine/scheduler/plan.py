"""What the scheduler tells the executor for one step, and what comes back.

The plan is a diff: a sequence is described whole when it starts or resumes; from then on only its
new blocks and how many tokens to compute. The worker keeps the rest.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.pooling.params import PoolingParams
from engine.protocol import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.structured.masks import TokenMask

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class NewSequence:
    """A sequence that the worker doesn't hold yet (new, or resumed after a preemption)."""

    seq_id: int
    #: [num_tokens] prompt and output so far.
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    #: Block tables, one a KV cache group, all of one length.
    block_ids: list[list[int]]
    sampling: SamplingParams
    seed: int
    #: Length of the prompt logprobs already delivered, or -1 when none are wanted.
    prompt_logprobs_from: int = -1
    adapter: str = ""
    #: float32 [num_prompt_tokens, hidden] in the place of the prompt ids' embeddings.
    prompt_embeds: Tensor | None = None
    #: Set when the prompt is to be pooled, not continued.
    pooling: PoolingParams | None = None


@dataclass(slots=True)
class StepPlan:
    """One step's work. `seq_ids[i]` computes `num_scheduled[i]` tokens (>= 1)."""

    step: int
    seq_ids: list[int] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    #: (seq_id, block ids by KV cache group) appended to the block tables of sequences that the
    #: worker holds. Blocks that fall out of a window aren't told: no kernel reads them any more.
    new_blocks: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    #: Finished, aborted or preempted since the last step: the worker forgets them first.
    removed: list[int] = field(default_factory=list)
    #: (seq_id, token) that sequences which the worker holds got without sampling it. Before `new`.
    appended: list[tuple[int, int]] = field(default_factory=list)
    #: Grammar masks of this step, in the making while the model runs.
    mask: Future[TokenMask] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(self.num_scheduled)


@dataclass(slots=True)
class StepResult:
    """What the step sampled, in the order of `StepPlan.seq_ids`.

    `token_ids[i]` is -1 where sequence i still has prompt to compute.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    #: seq_id -> entries for the prompt positions that this step computed.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    #: seq_id -> result of a prompt that this step completed, little-endian float32.
    pooled: dict[int, bytes] = field(default_factory=dict)
    #: seq_id -> a beam's likeliest next tokens, best first. Its entry of `token_ids` is -1.
    candidates: dict[int, TokenLogprobs] = field(default_factory=dict)
    #: seq_id -> why this sequence alone failed (NaN logits, say).
    errors: dict[int, str] = field(default_factory=dict)
