"""Names of `vllm.usage`."""
