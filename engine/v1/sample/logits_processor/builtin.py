"""Names of `vllm.v1.sample.logits_processor.builtin`."""

from engine.sampling.logits_processor import process_dict_updates

__all__ = ["process_dict_updates"]
