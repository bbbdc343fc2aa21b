"""Names of `vllm.plugins`."""
