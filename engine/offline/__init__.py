"""The engine offline, in the process of its user: `LLM`, prompts, outputs, beam search, pooling."""
