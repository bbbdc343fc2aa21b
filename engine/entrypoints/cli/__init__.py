"""Names of `vllm.entrypoints.cli`."""
