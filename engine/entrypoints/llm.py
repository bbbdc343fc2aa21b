"""Names of `vllm.entrypoints.llm`."""

from engine.offline.llm import LLM

__all__ = ["LLM"]
