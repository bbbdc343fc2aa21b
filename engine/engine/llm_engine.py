"""Names of `vllm.engine.llm_engine`."""

from engine.offline.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
