"""Names of `vllm.v1.engine.async_llm`."""

from engine.offline.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
