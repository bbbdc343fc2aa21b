"""Names of `vllm.sequence`."""

from dataclasses import dataclass, field

from engine.offline.outputs import RequestMetrics

__all__ = ["RequestMetrics", "SequenceData"]


@dataclass
class SequenceData:
    """Token ids of a prompt, as a `DummyDataFactory` makes them."""

    prompt_token_ids: list[int] = field(default_factory=list)
