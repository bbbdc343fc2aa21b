"""Names of `vllm.engine.async_llm_engine`."""

from engine.offline.async_llm import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
