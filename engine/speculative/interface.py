"""`DraftProposer`: the interface of draft models and heads, which draft between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.contract.engine_config import EngineConfig
from engine.contract.speculative_config import SpeculativeConfig
from engine.kv_cache import KVCacheConfig
from engine.scheduler import Sequence
from engine.scheduler.plan import StepPlan, StepResult
from engine.speculative.head_tracking import HeadTracking
from engine.speculative.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Facts about a draft model.

    Attributes:
        max_model_len: maximum length of sequences that get drafts.
        vocab_size: number of its logits; tokens that the target lacks are never drafts.
        num_blocks: of its own KV cache; 0: not allocated yet.
        layout: layout of that cache.
        token_budget: maximum number of tokens in one of its steps.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    layout: KVCacheConfig
    token_budget: int


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """Facts about heads.

    Attributes:
        max_drafts: maximum number of drafts per sequence.
        max_model_len: maximum length of sequences that get drafts; 0: unlimited.
        reads_tokens: each draft depends on all tokens, so the head must track sequences, and can't
            track prompts with embeddings in place of tokens.
        cost_fraction: cost of the hidden states that only heads need, as a fraction of a prompt's
            time.
    """

    max_drafts: int
    max_model_len: int = 0
    reads_tokens: bool = False
    cost_fraction: float = 0.0


class HeadPlan(msgspec.Struct):
    """Requests at most `counts[i]`, >= 1, drafts of the sequence `seq_ids[i]`."""

    seq_ids: list[int]
    counts: list[int]


class HeadResult(msgspec.Struct):
    """Drafts from heads.

    Attributes:
        drafts: of each sequence, in the order of `HeadPlan.seq_ids`; empty if its hidden states
            are missing.
        lost: sequences whose hidden states can't be obtained any more.
        reading: seconds spent on tokens that the heads hadn't read yet.
    """

    drafts: list[list[int]]
    lost: list[int] = msgspec.field(default_factory=list)
    reading: float = 0.0


class DraftHost(Protocol):
    """Runs a draft model, heads on the model's hidden states, or neither.

    Attributes:
        model: facts about the draft model of `speculative_config`; None without one.
        heads: facts about its heads; None without any.
    """

    @property
    def model(self) -> DraftFacts | None: ...

    @property
    def heads(self) -> HeadFacts | None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step of the draft model, which has a separate batch; as `Executor.execute`."""

    def propose(self, plan: HeadPlan) -> HeadResult:
        """Draw drafts from the heads for decoding sequences, between two steps."""


#: Settings of the model that apply to its draft model too.
_SHARED = (
    "device", "dtype", "block_size", "max_num_seqs", "num_threads", "cpu_threads_bind",
    "cpu_kernels", "round_activations", "trust_remote_code", "batch_invariant", "download_dir",
    "skip_tokenizer_init",
)  # fmt: skip


def draft_config(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """Return the settings of the draft model of a model with `config`."""
    shared = {name: getattr(config, name) for name in _SHARED}
    return EngineConfig(
        model=speculative.model, quantization=speculative.quantization, enable_lora=False, **shared
    )


class DraftProposer(Protocol):
    """Computes drafts with a draft model, or with heads on the model's hidden states.

    Attributes:
        costs: seconds of one draft for a number of rows, by that number.
        seconds: seconds of the last round; the drafter resets it.
        reading: the part of those seconds spent on tokens that hadn't been read yet.
        is_healthy: whether it may draft.
        following: sequences that it must track in every step; None: it can read a sequence later.
    """

    costs: StepTimes
    following: HeadTracking | None
    seconds: float
    reading: float

    @property
    def is_healthy(self) -> bool: ...

    def propose(self, requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Return drafts by sequence id, at most the requested number for each."""

    def supports(self, sequence: Sequence) -> bool:
        """Whether a sequence may have drafts."""

    def max_drafts(self, sequence: Sequence) -> int:
        """Return the maximum number of drafts of a sequence."""

    def num_unread_tokens(self, sequence: Sequence) -> float:
        """Return the approximate seconds of reading a sequence's unread tokens."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has left the batch."""

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget all sequences; `worker_too`: the worker's batch is gone too."""

    def check_integrity(self) -> None:
        """Raise RuntimeError unless its bookkeeping is consistent."""
