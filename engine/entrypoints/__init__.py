"""Names of `vllm.entrypoints`: programs that become `quire serve`, and `LLM`."""
