"""`DraftProposer`: whoever computes drafts, which takes time before the step."""

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
    """What drafts are planned with.

    Attributes:
        max_model_len: longer sequences get no drafts.
        vocab_size: columns of its logits; those that the target lacks are never drafts.
        num_blocks: of its own KV cache; 0: not allocated yet.
        layout: of that.
        token_budget: most tokens of one of its steps.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    layout: KVCacheConfig
    token_budget: int


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What the core knows of them.

    Attributes:
        max_drafts: drafts of a sequence.
        max_model_len: longer sequences get no drafts; 0: any do.
        reads_tokens: each draft comes from all tokens, so they are to be followed, and vectors in
            their place are in the way.
        cost_fraction: of the time of a prompt, what its states take that nobody but heads asks for.
    """

    max_drafts: int
    max_model_len: int = 0
    reads_tokens: bool = False
    cost_fraction: float = 0.0


class HeadPlan(msgspec.Struct):
    """Drafts that are wanted: at most `counts[i]`, >= 1, of the sequence `seq_ids[i]`."""

    seq_ids: list[int]
    counts: list[int]


class HeadResult(msgspec.Struct):
    """What heads drew.

    Attributes:
        drafts: by sequence, in the order of `HeadPlan.seq_ids`; none where nothing is known of it.
        lost: sequences of which nothing will be known any more.
        reading: seconds that went into tokens that they hadn't read yet.
    """

    drafts: list[list[int]]
    lost: list[int] = msgspec.field(default_factory=list)
    reading: float = 0.0


class DraftHost(Protocol):
    """A draft model, heads on the model's hidden states, or neither.

    Attributes:
        model: the draft model of `speculative_config`; None without one.
        heads: the heads of it; None without any.
    """

    @property
    def model(self) -> DraftFacts | None: ...

    @property
    def heads(self) -> HeadFacts | None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step of the draft model, which has a batch of its own; as `Executor.execute`."""

    def propose(self, plan: HeadPlan) -> HeadResult:
        """Have the heads draw for sequences that decode, between two steps."""


#: Settings of the model that hold for its draft, too.
_SHARED = (
    "device", "dtype", "block_size", "max_num_seqs", "num_threads", "cpu_threads_bind",
    "cpu_kernels", "round_activations", "trust_remote_code", "batch_invariant", "download_dir",
    "skip_tokenizer_init",
)  # fmt: skip


def draft_config(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """The settings of the draft beside a model with `config`."""
    shared = {name: getattr(config, name) for name in _SHARED}
    return EngineConfig(
        model=speculative.model, quantization=speculative.quantization, enable_lora=False, **shared
    )


class DraftProposer(Protocol):
    """A draft model, or heads on the model's hidden states.

    Attributes:
        costs: of one draft for each of some rows, by how many these are.
        seconds: that the last round took; the drafter sets it back.
        reading: of those, what went into tokens that it was behind by.
        is_healthy: whether there may be drafts.
        following: the sequences that it must read along; None: it can read each when it's to draw.
    """

    costs: StepTimes
    following: HeadTracking | None
    seconds: float
    reading: float

    @property
    def is_healthy(self) -> bool: ...

    def propose(self, requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Drafts by sequence id, at most as many as are wanted for each."""

    def supports(self, sequence: Sequence) -> bool:
        """Whether a sequence may have any."""

    def max_drafts(self, sequence: Sequence) -> int:
        """How many it may have."""

    def num_unread_tokens(self, sequence: Sequence) -> float:
        """Seconds that it takes to read what it doesn't know of a sequence, about."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left."""

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget all sequences; `worker_too`: the batch has gone as well."""

    def check_integrity(self) -> None:
        """Raise RuntimeError unless its books balance."""
