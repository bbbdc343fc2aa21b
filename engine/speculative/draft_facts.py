"""`DraftFacts`: what the engine knows of its draft model."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_cache import KVLayout


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
    layout: KVLayout
    token_budget: int
