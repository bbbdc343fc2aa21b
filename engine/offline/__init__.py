"""Offline inference in the caller's process: `LLM`, prompts, outputs, beam search, pooling."""
