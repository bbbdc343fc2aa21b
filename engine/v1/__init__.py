"""Names of `vllm.v1`."""
