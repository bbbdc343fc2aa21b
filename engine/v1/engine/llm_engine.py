"""Names of `vllm.v1.engine.llm_engine`."""

from engine.offline.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
