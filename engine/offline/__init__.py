"""The offline engine, in the caller's process: `LLM`, prompts, outputs, beam search, pooling."""
