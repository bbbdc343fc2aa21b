"""Names of `vllm.entrypoints.openai`."""
