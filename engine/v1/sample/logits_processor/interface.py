"""Names of `vllm.v1.sample.logits_processor.interface`."""

from engine.sampling.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["BatchUpdate", "LogitsProcessor", "MoveDirectionality"]
